"""What every endpoint holds: the engine, the served name, the metrics; and how a request's prompts run on
it."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import numpy as np
from fastapi import Request

from slipstream.contracts.errors import BadRequest, EngineError
from slipstream.contracts.limits import MAX_SEQUENCES, check_prompt
from slipstream.contracts.sampling_params import RequestOutputKind, SamplingParams
from slipstream.server.assistant import Assistant
from slipstream.server.errors import ApiError
from slipstream.server.metrics import Metrics
from slipstream.server.options import ServerOptions
from slipstream.server.streams import merge
from slipstream.text.parsers.reasoning import ThinkParser
from slipstream.text.parsers.registry import REASONING_PARSERS

if TYPE_CHECKING:
    from slipstream.contracts.outputs import EngineStats
    from slipstream.engine.client import EngineHealth, EngineInfo
    from slipstream.engine.input_processor import TokensPrompt
    from slipstream.engine.look import Look
    from slipstream.engine.outputs import RequestOutput
    from slipstream.server.schema import GenerateBody, SamplingBody
    from slipstream.text.tokenizer import Tokenizer

MAX_ID = 256
LONG_REQUEST = 4096  # characters or ids; the work on a longer request is done off the event loop
PIECE = 2**16  # ids that are worked on at once: the loop must wait for a call into a library to end

T = TypeVar("T")


class Engine(Protocol):
    """The part of AsyncLLM that the server uses."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def health(self) -> EngineHealth: ...

    def generate(
        self,
        prompt: TokensPrompt,
        sampling_params: SamplingParams,
        request_id: str,
        priority: int = 0,
        max_wait: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]: ...

    async def look(self) -> Look: ...

    def shutdown(self) -> None: ...


class Render(Protocol):
    """Turns a conversation into the prompt's text. Raises BadRequest for turns that the template refuses.
    takes_tools, takes_documents: whether it shows them."""

    takes_tools: bool
    takes_documents: bool

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any],
    ) -> str: ...


@dataclass(frozen=True, slots=True)
class Input:
    """One prompt. text: as given; None where the client sent token ids, or it was cut."""

    token_ids: Sequence[int]
    text: str | None = None

    def last(self, count: int | None) -> Input:
        """Its last tokens; all where count is None."""
        return self if count is None or len(self.token_ids) <= count else Input(self.token_ids[-count:])


@dataclass(frozen=True, slots=True)
class Context:
    """Shared by the endpoints of one app. names: of the model, which clients may use; answers give the first.
    tokenizer: None where clients send ids; render: the chat template, None where the model has none;
    max_chars: of a text that can fit."""

    engine: Engine
    names: tuple[str, ...]
    metrics: Metrics
    options: ServerOptions
    tokenizer: Tokenizer | None = None
    render: Render | None = None
    max_chars: int = 0
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model(self) -> str:
        """The model's name in answers."""
        return self.names[0]

    def check_model(self, name: str | None) -> None:
        """Raises ApiError (404) for a model that is not served here."""
        if name is not None and name not in self.names:
            known = ", ".join(map(repr, self.names))
            raise ApiError(
                404,
                f"model={name[:80]!r}: does not exist, this server has {known}",
                "model",
                "model_not_found",
            )

    def need_tokenizer(self, field: str) -> Tokenizer:
        """Raises BadRequest that names the field which needs it, where the server runs without a
        tokenizer."""
        if self.tokenizer is None:
            raise BadRequest(field, "text", "must be token ids: this server runs with --skip-tokenizer-init")
        return self.tokenizer

    def name(self, prefix: str, body: SamplingBody, request: Request) -> str:
        """The answer's id: the client's own (body, then X-Request-Id) or one of ours, after the prefix.
        Raises BadRequest for a header that is too long."""
        header = request.headers.get("x-request-id")
        if header is not None and not 0 < len(header) <= MAX_ID:
            raise BadRequest("x-request-id", header, f"must be 1 to {MAX_ID} characters")
        return f"{prefix}{body.request_id or header or uuid.uuid4().hex}"

    def thinker(self, prompt: str) -> ThinkParser | None:
        """A reader of thoughts for an answer to this prompt, None without --reasoning-parser."""
        name = self.options.reasoning_parser
        return None if name is None else REASONING_PARSERS[name](prompt)

    def told(self, params: SamplingParams, prompt: Input) -> SamplingParams:
        """The parameters of an answer whose thoughts are told apart: a constraint begins after them."""
        asked, thinker = params.structured_outputs, self.thinker(prompt.text or "")
        if asked is None or thinker is None:
            return params
        thoughts: Literal["open", "optional"] = "open" if thinker.thinks else "optional"
        return params.clone(structured_outputs=replace(asked, thoughts=thoughts))

    def count_thoughts(self, speakers: Sequence[Assistant]) -> int | None:
        """Tokens of the thoughts in an answer's choices, counted from their text. None where they are not
        told apart."""
        if self.options.reasoning_parser is None or self.tokenizer is None:
            return None
        texts = (speaker.thoughts for speaker in speakers)
        return sum(len(self.tokenizer.encode(text, add_special_tokens=False)) for text in texts)

    def kept_tokens(self, body: GenerateBody, max_tokens: int | None) -> int | None:
        """The last tokens of a prompt that truncate_prompt_tokens leaves; None for all. Raises BadRequest."""
        most, asked = self.engine.info.limits.max_model_len, body.truncate_prompt_tokens
        if asked == 0 or (asked is not None and asked > most):
            limit = f"must be -1 for what fits, or 1 to max_model_len={most}"
            raise BadRequest("truncate_prompt_tokens", asked, limit)
        return asked if asked != -1 else max(most - max(max_tokens or 1, 1), 1)

    async def encode(
        self, field: str, text: str, add_special_tokens: bool, cut: bool = False, size: int | None = None
    ) -> list[int]:
        """Token ids of a text. size: characters of all texts of its request, where there are more. Raises
        BadRequest without a tokenizer, or for a text that can never fit and is not to be cut."""
        tokenizer = self.need_tokenizer(field)
        if len(text) > self.max_chars and not cut:
            limit = f"must be at most {self.max_chars} characters, for max_model_len and the longest token"
            raise BadRequest(field, f"{len(text)} characters", limit)
        return await off_loop(size or len(text), tokenizer.encode, text, add_special_tokens)

    async def check(self, inputs: Sequence[Input], params: SamplingParams, field: str) -> None:
        """Raises BadRequest for the first prompt that cannot be served. field: what holds them."""
        size = sum(len(prompt.token_ids) for prompt in inputs)
        await off_loop(size, self._check, inputs, params, field)

    def _check(self, inputs: Sequence[Input], params: SamplingParams, field: str) -> None:
        for prompt in inputs:
            ids = prompt.token_ids
            parts = [np.asarray(ids[start : start + PIECE]) for start in range(0, len(ids), PIECE)]
            whole = np.concatenate(parts) if len(parts) > 1 else ids
            check_prompt(whole, params, self.engine.info.limits, field)

    async def run(
        self, name: str, body: SamplingBody, inputs: Sequence[Input], params: SamplingParams
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Outputs of all prompts as they come, each with its prompt's index. Closing the iterator aborts
        what runs.

        Every prompt is checked before the first one starts. The engine knows the request by a name of our
        own, so that two clients may choose the same one.
        """
        await self.check(inputs, params, body.prompt_field)
        params = params.clone(
            output_kind=RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
        )
        unique = f"{name}-{uuid.uuid4().hex[:8]}"
        outputs = [self._run_one(f"{unique}-{i}", prompt, params, body) for i, prompt in enumerate(inputs)]
        async with aclosing(merge(outputs)) as merged:
            async for item in merged:
                yield item

    async def _run_one(
        self, request_id: str, prompt: Input, params: SamplingParams, body: SamplingBody
    ) -> AsyncGenerator[RequestOutput, None]:
        tokens: TokensPrompt = {"prompt_token_ids": prompt.token_ids}
        if body.cache_salt is not None:
            tokens["cache_salt"] = body.cache_salt
        outputs = self.engine.generate(
            tokens, params, request_id, body.priority or 0, self.options.max_queue_seconds
        )
        with self.metrics.request(request_id, len(prompt.token_ids), params) as meter:
            async with aclosing(outputs):
                async for output in outputs:
                    meter.observe(output)
                    if any(piece.finish_reason == "error" for piece in output.outputs):
                        raise EngineError(output.error or "the engine failed while serving this request")
                    yield output


async def off_loop(size: int, work: Callable[..., T], *args: Any) -> T:
    """What the work gives, done in a thread where its request is large."""
    return work(*args) if size <= LONG_REQUEST else await asyncio.to_thread(work, *args)


def check_count(prompts: int, n: int) -> None:
    """Raises BadRequest before anything is allocated for a request of too many sequences."""
    if prompts * n > MAX_SEQUENCES:
        raise BadRequest(
            "prompt", f"{prompts} prompts", f"prompts times n={n} must be at most {MAX_SEQUENCES}"
        )
