"""LLM: prompts in, outputs out, in this process. The caller's thread runs the engine."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import numpy as np

from slipstream.config.args import EngineArgs
from slipstream.config.executor import UNI
from slipstream.contracts.errors import EngineDeadError, EngineError
from slipstream.contracts.sampling_params import RequestOutputKind, SamplingParams
from slipstream.engine.client import EngineClient, EngineInfo
from slipstream.engine.input_processor import InputProcessor, Prompt, open_tokenizer
from slipstream.engine.interrupts import interrupts_between_steps
from slipstream.engine.output_processor import OutputProcessor
from slipstream.engine.outputs import RequestOutput
from slipstream.engine.progress import Progress
from slipstream.text.tokenizer import Tokenizer

T = TypeVar("T")
Message = Mapping[str, Any]
UseTqdm = bool | Callable[..., Any]


def _ignore(num_tokens: int) -> None:
    """What is called after a step where nobody wants to know of it."""


class LLM:
    """A model that answers lists of prompts.

    model: a Hugging Face folder or a GGUF file; every other keyword is a field of EngineArgs. Raises
    TypeError for an unknown keyword, ValueError that names what cannot be honoured. With
    distributed_executor_backend="mp" a worker process computes, and is replaced where it dies. on_step: set
    it to be called after every step with the number of tokens that it made.
    """

    def __init__(self, model: str, *, tokenizer: str | None = None, **engine_args: Any) -> None:
        known = {field.name for field in fields(EngineArgs)}
        for name in engine_args:
            if name not in known:
                raise TypeError(f"LLM() got an unexpected keyword argument {name!r}")
        args = {"distributed_executor_backend": UNI, **engine_args}
        self.args = EngineArgs(model=str(model), tokenizer=tokenizer, **args)
        self._tokenizer = open_tokenizer(self.args)
        self._client = _open_engine(self.args)
        self._inputs = InputProcessor(self._tokenizer, self._client.info, self.args.seed)
        self._outputs = OutputProcessor(self._tokenizer)
        self._num_requests = 0
        self.on_step: Callable[[int], None] = _ignore
        self._close = weakref.finalize(self, _close, self._inputs, self._client)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Outputs in the order of the prompts.

        prompts: text, token ids, {"prompt": ...} or {"prompt_token_ids": ...}; one or a list. sampling_params
        and priority: one for all or one each. use_tqdm: a progress bar, or what makes one. A request that
        fails alone has finish_reason "error". Raises BadRequest (a ValueError) before anything runs where a
        prompt or parameter cannot be served, EngineDeadError after close().
        """
        if not self._close.alive:
            raise EngineDeadError("this LLM is closed")
        each = _as_prompts(prompts)
        default = SamplingParams() if sampling_params is None else sampling_params
        params = _one_each("sampling_params", default, SamplingParams, len(each))
        priorities = _one_each("priority", 0 if priority is None else priority, int, len(each))
        prepared = [self._inputs.prepare(*one) for one in zip(each, params, priorities, strict=True)]
        first = self._num_requests
        self._num_requests += len(prepared)
        states = [
            self._outputs.open(str(number), one, RequestOutputKind.FINAL_ONLY)
            for number, one in enumerate(prepared, first)
        ]
        progress = Progress(use_tqdm, len(states))
        try:
            with interrupts_between_steps() as check:
                self._client.add([request for state in states for request in state.engine_requests()])
                self._run(len(states), progress, check)
        finally:
            # After an interruption the engine must not go on with what nobody waits for.
            self._client.abort(self._outputs.close(states))
            progress.close()
        return [output for state in states if (output := state.take()) is not None]

    def _run(self, num_requests: int, progress: Progress, check: Callable[[], None]) -> None:
        """Step the engine until this many requests have ended. check: raises what ends it before."""
        while num_requests:
            outputs = self._client.receive()
            check()
            if outputs is None:
                raise EngineError(f"the engine is idle and {num_requests} requests have not ended")
            ready, stopped = self._outputs.process(outputs)
            if stopped:
                self._client.abort(stopped)
            num_requests -= len(ready)
            progress.update(ready, len(outputs.tokens))
            self.on_step(len(outputs.tokens))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """generate() on conversations: one, a list of {"role", "content"}, or a list of such.

        chat_template: a file or text of one, instead of the model's own. Raises BadRequest for turns that the
        template refuses, ValueError where there is no template.
        """
        from slipstream.text.chat_template import load_chat_template

        tokenizer = self.get_tokenizer()
        template = load_chat_template(chat_template or self.args.chat_template, tokenizer)
        if template is None:
            raise ValueError("chat_template=None: the model has none of its own, so one must be given")
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if single else messages
        prompts: list[Prompt] = []
        for turns in conversations:
            text = template(
                turns, add_generation_prompt=add_generation_prompt, tools=tools,
                continue_final_message=continue_final_message, template_kwargs=chat_template_kwargs,
            )
            ids = tokenizer.encode(text, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": ids})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    @property
    def info(self) -> EngineInfo:
        """What the engine chose and why, and the limits of requests."""
        return self._client.info

    def get_tokenizer(self) -> Tokenizer:
        """Raises ValueError with skip_tokenizer_init=True."""
        if self._tokenizer is None:
            raise ValueError("skip_tokenizer_init=True: this LLM has no tokenizer")
        return self._tokenizer

    def close(self) -> None:
        """End the engine and free its memory; otherwise done when the LLM is no longer used."""
        self._close()


def _close(inputs: InputProcessor, client: EngineClient) -> None:
    inputs.close()
    client.close()


def _open_engine(args: EngineArgs) -> EngineClient:
    """torch is loaded here, not before."""
    from slipstream.engine.inproc import InprocClient
    from slipstream.engine.open_core import open_core

    return InprocClient(open_core(args, _no_watchdog))


def _no_watchdog() -> None:
    """Who waits for a worker in his own thread needs no sign of life."""


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    listed = list(prompts)
    single = bool(listed) and isinstance(listed[0], int | np.integer)
    return [prompts] if single else listed


def _one_each(field: str, given: T | Sequence[T], kind: type[T], count: int) -> list[T]:
    """given, `count` times where it is one. Raises ValueError."""
    each = [given] * count if isinstance(given, kind) else list(given)  # type: ignore[arg-type]
    if len(each) != count:
        raise ValueError(f"{field}: {len(each)} for {count} prompts: must be one for all, or one each")
    for one in each:
        if not isinstance(one, kind):
            raise TypeError(f"{field}={one!r}: must be {kind.__name__}")
    return each
