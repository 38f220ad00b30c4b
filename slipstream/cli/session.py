"""A model at a terminal: what generate and chat share. One engine, one event loop, text out as it comes."""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from slipstream.config.args import EngineArgs
from slipstream.contracts.errors import BadRequest
from slipstream.contracts.sampling_params import RequestOutputKind, SamplingParams

Write = Callable[[str], None]


@dataclass(slots=True)
class Speed:
    """Counts and seconds of one answer. first: to the first token; total: to the last."""

    prompt_tokens: int = 0
    tokens: int = 0
    first: float = 0.0
    total: float = 0.0

    def line(self) -> str:
        """tok/s counts the tokens after the first, over the time after it: prefill is in TTFT."""
        rate = (self.tokens - 1) / (self.total - self.first) if self.tokens > 1 else 0.0
        return (
            f"[{self.prompt_tokens} prompt tokens, {self.tokens} tokens, TTFT {self.first:.2f} s, "
            f"{rate:.1f} tok/s]"
        )


class Session:
    """Raises ValueError at construction for flags that cannot be honoured. Close it, or use it in a with
    block."""

    def __init__(self, args: EngineArgs) -> None:
        from slipstream.engine.async_llm import AsyncLLM
        from slipstream.text.chat_template import load_chat_template

        if args.skip_tokenizer_init:
            raise ValueError("--skip-tokenizer-init: text needs a tokenizer")
        self._engine = AsyncLLM.from_engine_args(args)
        tokenizer = self._engine.get_tokenizer()
        assert tokenizer is not None
        self._tokenizer = tokenizer
        try:
            self._template = load_chat_template(args.chat_template, tokenizer)
        except ValueError:
            self._engine.shutdown()
            raise
        self._runner = asyncio.Runner()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_error: object) -> None:
        self._engine.shutdown()
        self._runner.close()

    @property
    def has_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str) -> list[int]:
        """A plain prompt, with the start token that the model was trained with."""
        return self._tokenizer.encode(text)

    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """A conversation through the chat template. Raises BadRequest where there is none."""
        if self._template is None:
            raise BadRequest(
                "chat_template", None, "the model has none: use --chat-template or generate --raw"
            )
        return self._tokenizer.encode(self._template(messages), add_special_tokens=False)

    def stream(self, prompt: Sequence[int], params: SamplingParams, write: Write) -> tuple[str, Speed]:
        """Writes an answer as it comes. Ctrl-C raises KeyboardInterrupt; the session can go on."""
        return self._runner.run(self._stream(prompt, params, write))

    def whole(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[tuple[str, Speed]]:
        """All answers, made in one batch."""

        async def all_of_them() -> list[tuple[str, Speed]]:
            return await asyncio.gather(*(self._stream(prompt, params, lambda _: None) for prompt in prompts))

        return self._runner.run(all_of_them())

    async def _stream(self, prompt: Sequence[int], params: SamplingParams, write: Write) -> tuple[str, Speed]:
        speed = Speed(prompt_tokens=len(prompt))
        text: list[str] = []
        begin = time.perf_counter()
        outputs = self._engine.generate(
            {"prompt_token_ids": prompt}, params.clone(output_kind=RequestOutputKind.DELTA), uuid.uuid4().hex
        )
        async with aclosing(outputs):
            async for output in outputs:
                speed.total = time.perf_counter() - begin
                for piece in output.outputs:
                    speed.first = speed.first or speed.total
                    speed.tokens += len(piece.token_ids)
                    text.append(piece.text)
                    write(piece.text)
        return "".join(text), speed


def to_stdout(text: str) -> None:
    print(text, end="", flush=True)


def note(text: str) -> None:
    """A line about the answer, not of it."""
    print(text, file=sys.stderr, flush=True)
