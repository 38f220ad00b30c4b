"""POST /v1/chat/completions: turns through the model's chat template, answers as messages or as deltas."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response

from slipstream.contracts.errors import BadRequest
from slipstream.contracts.sampling_params import SamplingParams
from slipstream.server.answers import (
    ChatChoice,
    ChatCompletion,
    ChatMessage,
    ChatScores,
    Usage,
    UsageCount,
    prompt_scores,
)
from slipstream.server.assistant import Assistant, Said, whole_calls
from slipstream.server.body import StrictRoute
from slipstream.server.context import Context, Input, check_count
from slipstream.server.errors import ErrorBody
from slipstream.server.schema import ChatBody, Message, TemplateOptions
from slipstream.server.streams import EventStream, json_answer, started, until_disconnect
from slipstream.server.tools import NO_TOOLS, ToolUse, plan_tools

if TYPE_CHECKING:
    from slipstream.engine.outputs import CompletionOutput, RequestOutput

Outputs = AsyncGenerator[tuple[int, "RequestOutput"], None]
ROLE = "assistant"


def router(context: Context) -> APIRouter:
    routes = APIRouter(route_class=StrictRoute, tags=["chat"])

    @routes.post(
        "/v1/chat/completions", responses={200: {"model": ChatCompletion}, "4XX": {"model": ErrorBody}}
    )
    async def chat(body: ChatBody, request: Request) -> Response:
        """Answers a conversation."""
        context.check_model(body.model)
        params = _params(context, body)
        check_count(1, params.n)
        tools = plan_tools(
            context.options, body.tools or (), body.tool_choice, body.parallel_tool_calls is not False
        )
        kept = context.kept_tokens(body, params.max_tokens)
        special = bool(body.add_special_tokens)
        whole = await encode_chat(context, body.messages, body, special, tools, kept is not None)
        # Where its thoughts stand is told by the end of its text, which stays.
        prompt = Input(whole.last(kept).token_ids, whole.text)
        name = context.name("chatcmpl-", body, request)
        build = _Builder(context, body, name, prompt, tools)
        outputs = context.run(name, body, [prompt], context.told(with_tools(params, tools), prompt))
        if body.stream:
            outputs = await started(request, outputs)
            return EventStream(name, build.events(outputs), outputs)
        return json_answer(await until_disconnect(request, build.answer(outputs)))

    return routes


def with_tools(params: SamplingParams, tools: ToolUse) -> SamplingParams:
    """The parameters that an answer with tools needs."""
    if tools.forced is not None:
        return params.clone(structured_outputs=tools.forced)
    return params.clone(skip_special_tokens=False) if tools.special_tokens else params


def _params(context: Context, body: ChatBody) -> SamplingParams:
    params = body.params()
    most = context.engine.info.limits.max_logprobs
    if body.top_logprobs is not None and body.top_logprobs > most >= 0:
        raise BadRequest("top_logprobs", body.top_logprobs, f"must be at most max_logprobs={most}")
    return params


async def encode_chat(
    context: Context,
    messages: Sequence[Message],
    options: TemplateOptions,
    add_special_tokens: bool,
    tools: ToolUse = NO_TOOLS,
    cut: bool = False,
) -> Input:
    """The rendered conversation as token ids; cut: it may be longer than what fits. Raises BadRequest where
    there is no template or it refuses the turns."""
    options.check_template()
    if context.render is None:
        raise BadRequest(
            "messages", "...", "need a chat template: the model has none, start with --chat-template"
        )
    told = options.kwargs()
    if "documents" in told and not context.render.takes_documents:
        raise BadRequest("documents", "...", "this model's chat template shows no documents")
    turns = [turn.turn(i) for i, turn in enumerate(messages)]
    if tools.shown and not context.render.takes_tools:
        turns = tools.told(turns)
    text = context.render(
        turns,
        add_generation_prompt=options.add_generation_prompt,
        continue_final_message=options.continue_final_message,
        tools=tools.shown or None,
        template_kwargs=told,
    )
    return Input(await context.encode("messages", text, add_special_tokens, cut), text)


class _Builder:
    """Turns engine outputs into the answer of one request."""

    def __init__(
        self, context: Context, body: ChatBody, name: str, prompt: Input, tools: ToolUse
    ) -> None:
        self._body, self._prompt = body, prompt
        self._context = context
        self._speakers = [
            Assistant(tools, context.thinker(prompt.text or "")) for _ in range(body.n or 1)
        ]
        self._head = (name, int(time.time()), context.model)
        self._count = UsageCount()
        by_id = bool(body.return_tokens_as_token_ids)
        self._scores = ChatScores(context.tokenizer, body.top_logprobs or 0, by_id)
        last = body.messages[-1]
        self._echo = last.text(-1) if body.echo and last.role == ROLE else ""

    async def answer(self, outputs: Outputs) -> ChatCompletion:
        answer = self._envelope("chat.completion", [])
        async with aclosing(outputs):
            async for _, output in outputs:
                self._count.add(0, output)
                answer["choices"] += [self._whole(piece) for piece in output.outputs]
                if output.prompt_logprobs is not None:
                    answer["prompt_logprobs"] = prompt_scores(output.prompt_logprobs)
        answer["choices"].sort(key=lambda choice: choice["index"])
        answer["usage"] = self._usage()
        self._add_prompt_ids(answer)
        return answer

    async def events(self, outputs: Outputs) -> AsyncIterator[ChatCompletion]:
        """First a chunk with the role of every choice, then deltas, then usage where it was asked."""
        options = self._body.stream_options
        roles: list[ChatChoice] = [
            {
                "index": i,
                "delta": {"role": ROLE, "content": self._echo},
                "logprobs": None,
                "finish_reason": None,
            }
            for i in range(self._body.n or 1)
        ]
        for role in roles:
            chunk = self._envelope("chat.completion.chunk", [role])
            self._add_prompt_ids(chunk)
            yield chunk
        async for _, output in outputs:
            self._count.add(0, output)
            for piece in output.outputs:
                said = self._speakers[piece.index].feed(piece.text, piece.finish_reason)
                choice = self._choice(piece)
                choice["delta"] = self._delta(said)
                chunk = self._envelope("chat.completion.chunk", [choice])
                if options is not None and options.continuous_usage_stats:
                    chunk["usage"] = self._count.usage()
                yield chunk
        if options is not None and options.include_usage:
            last = self._envelope("chat.completion.chunk", [])
            last["usage"] = self._usage()
            yield last

    def _usage(self) -> Usage:
        """Of the whole answer."""
        return self._count.usage(self._context.count_thoughts(self._speakers))

    def _whole(self, piece: CompletionOutput) -> ChatChoice:
        speaker = self._speakers[piece.index]
        said = speaker.feed(piece.text, piece.finish_reason)
        choice = self._choice(piece)
        content = self._echo + said.content
        message: ChatMessage = {"role": ROLE, "content": content if content or not speaker.marked else None}
        if said.thoughts and self._body.include_reasoning is not False:
            message["reasoning_content"] = said.thoughts
        if said.calls:
            message["tool_calls"] = whole_calls(said.calls)
        choice["message"] = message
        return choice

    def _delta(self, said: Said) -> ChatMessage:
        delta: ChatMessage = {}
        if said.content:
            delta["content"] = said.content
        if said.thoughts and self._body.include_reasoning is not False:
            delta["reasoning_content"] = said.thoughts
        if said.calls:
            delta["tool_calls"] = said.calls
        return delta

    def _envelope(self, kind: str, choices: list[ChatChoice]) -> ChatCompletion:
        name, created, model = self._head
        return {"id": name, "object": kind, "created": created, "model": model, "choices": choices}

    def _add_prompt_ids(self, answer: ChatCompletion) -> None:
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = list(self._prompt.token_ids)

    def _choice(self, piece: CompletionOutput) -> ChatChoice:
        """Everything of a choice but its text."""
        reason = self._speakers[piece.index].finish(piece.finish_reason)
        choice: ChatChoice = {"index": piece.index, "logprobs": None, "finish_reason": reason}
        if self._body.logprobs:
            choice["logprobs"] = self._scores.build(piece.token_ids, piece.logprobs or ())
        if piece.finish_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        if self._body.return_token_ids:
            choice["token_ids"] = list(piece.token_ids)
        return choice
