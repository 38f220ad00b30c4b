"""POST /v1/completions. One builder makes the choices of whole answers and of streams, so both say the
same."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response

from slipstream.contracts.sampling_params import SamplingParams
from slipstream.server.answers import (
    Completion,
    CompletionChoice,
    CompletionScores,
    UsageCount,
    prompt_scores,
)
from slipstream.server.body import StrictRoute
from slipstream.server.context import Context, Input, check_count
from slipstream.server.errors import ErrorBody
from slipstream.server.schema import CompletionBody
from slipstream.server.streams import EventStream, json_answer, started, until_disconnect

if TYPE_CHECKING:
    from slipstream.engine.outputs import CompletionOutput, RequestOutput, TokenScores

Outputs = AsyncGenerator[tuple[int, "RequestOutput"], None]


def router(context: Context) -> APIRouter:
    routes = APIRouter(route_class=StrictRoute, tags=["completions"])

    @routes.post("/v1/completions", responses={200: {"model": Completion}, "4XX": {"model": ErrorBody}})
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continues each prompt."""
        context.check_model(body.model)
        params = body.params()
        inputs = await _inputs(context, body, params)
        name = context.name("cmpl-", body, request)
        build = _Builder(context, body, name, inputs)
        outputs = context.run(name, body, inputs, params)
        if body.stream:
            outputs = await started(request, outputs)
            return EventStream(name, build.events(outputs), outputs)
        return json_answer(await until_disconnect(request, build.answer(outputs)))

    return routes


async def _inputs(context: Context, body: CompletionBody, params: SamplingParams) -> list[Input]:
    """The prompts as token ids. Raises BadRequest for too many of them, and for a text that cannot be served
    before the next one is read."""
    prompts = body.prompt
    if isinstance(prompts, str) or not prompts or isinstance(prompts[0], int):
        prompts = [prompts]  # type: ignore[assignment]
    check_count(len(prompts), params.n)
    kept = context.kept_tokens(body, params.max_tokens)
    size = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
    inputs: list[Input] = []
    for prompt in prompts:
        if isinstance(prompt, str):
            special = body.add_special_tokens is not False
            ids = await context.encode("prompt", prompt, special, kept is not None, size)
            inputs.append(Input(ids, prompt).last(kept))
            await context.check(inputs[-1:], params, "prompt")
        else:
            assert isinstance(prompt, list)
            inputs.append(Input(prompt).last(kept))
    return inputs


class _Builder:
    """Turns engine outputs into the answer of one request. Choice index: prompt index times n plus sample
    index."""

    def __init__(self, context: Context, body: CompletionBody, name: str, inputs: Sequence[Input]) -> None:
        self._context, self._body, self._inputs = context, body, inputs
        self._head = (name, int(time.time()), context.model)
        self._scores: dict[int, CompletionScores] = {}
        self._prompt_scores: dict[int, list[TokenScores | None]] = {}
        self._count = UsageCount()
        self._tokenizer = context.tokenizer

    async def answer(self, outputs: Outputs) -> Completion:
        choices: list[CompletionChoice] = []
        async with aclosing(outputs):
            async for index, output in outputs:
                self._count.add(index, output)
                choices += [self._choice(index, output, piece) for piece in output.outputs]
        answer = self._envelope(sorted(choices, key=lambda choice: choice["index"]))
        answer["usage"] = self._count.usage()
        return answer

    async def events(self, outputs: Outputs) -> AsyncIterator[Completion]:
        options = self._body.stream_options
        async for index, output in outputs:
            self._count.add(index, output)
            for piece in output.outputs:
                chunk = self._envelope([self._choice(index, output, piece)])
                if options is not None and options.continuous_usage_stats:
                    chunk["usage"] = self._count.usage()
                yield chunk
        if options is not None and options.include_usage:
            last = self._envelope([])
            last["usage"] = self._count.usage()
            yield last

    def _envelope(self, choices: list[CompletionChoice]) -> Completion:
        name, created, model = self._head
        return {
            "id": name,
            "object": "text_completion",
            "created": created,
            "model": model,
            "choices": choices,
        }

    def _choice(self, index: int, output: RequestOutput, piece: CompletionOutput) -> CompletionChoice:
        """One choice, whole or the next piece of it; what belongs to the prompt is in the first."""
        body = self._body
        number = index * (body.n or 1) + piece.index
        first = number not in self._scores
        scores = self._scores.setdefault(number, CompletionScores(bool(body.return_tokens_as_token_ids)))
        if output.prompt_logprobs is not None:
            self._prompt_scores[index] = output.prompt_logprobs
        choice: CompletionChoice = {
            "index": number,
            "text": piece.text,
            "logprobs": None,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        tokens = list(piece.token_ids)
        token_scores: list[TokenScores | None] = list(piece.logprobs or ())
        first_text = ""
        if body.echo and first:
            choice["text"] = self._prompt_text(index) + piece.text
            if body.logprobs is not None:
                tokens = [*self._inputs[index].token_ids, *tokens]
                token_scores = [*self._prompt_scores[index], *token_scores]
                first_text = self._text(tokens[:1])
        if body.logprobs is not None:
            choice["logprobs"] = scores.build(tokens, token_scores, first_text)
        if body.prompt_logprobs is not None and first:
            choice["prompt_logprobs"] = prompt_scores(self._prompt_scores.get(index))
        if body.return_token_ids:
            choice["token_ids"] = list(piece.token_ids)
            if first:
                choice["prompt_token_ids"] = list(self._inputs[index].token_ids)
        return choice

    def _prompt_text(self, index: int) -> str:
        text = self._inputs[index].text
        return self._text(self._inputs[index].token_ids) if text is None else text

    def _text(self, tokens: Sequence[int]) -> str:
        return "" if self._tokenizer is None else self._tokenizer.decode(tokens, skip_special_tokens=False)
