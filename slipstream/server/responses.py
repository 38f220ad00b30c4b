"""POST /v1/responses: OpenAI's newer shape of a chat. Nothing is stored."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response
from typing_extensions import TypedDict

from slipstream.contracts.errors import BadRequest
from slipstream.server.answers import ChatScores, UsageCount
from slipstream.server.assistant import Assistant
from slipstream.server.body import StrictRoute
from slipstream.server.chat import encode_chat, with_tools
from slipstream.server.context import Context, Input
from slipstream.server.errors import ApiError, ErrorBody, describe
from slipstream.server.response_items import Event, Items
from slipstream.server.response_schema import NOT_STORED, ResponseBody, ResponseNamedTool
from slipstream.server.streams import NamedEventStream, json_answer, started, until_disconnect
from slipstream.server.tools import ToolUse, plan_tools

if TYPE_CHECKING:
    from slipstream.engine.outputs import CompletionOutput, RequestOutput

Outputs = AsyncGenerator[tuple[int, "RequestOutput"], None]


class ResponseAnswer(TypedDict):
    """The fields that tell something; those that only repeat the request are left out of this schema."""

    id: str
    object: str
    created_at: int
    status: str
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None


def router(context: Context) -> APIRouter:
    routes = APIRouter(route_class=StrictRoute, tags=["responses"])

    @routes.post("/v1/responses", responses={200: {"model": ResponseAnswer}, "4XX": {"model": ErrorBody}})
    async def respond(body: ResponseBody, request: Request) -> Response:
        """Answers a conversation, as items."""
        context.check_model(body.model)
        params = body.params()
        most = context.engine.info.limits.max_logprobs
        if body.top_logprobs is not None and body.top_logprobs > most >= 0:
            raise BadRequest("top_logprobs", body.top_logprobs, f"must be at most max_logprobs={most}")
        tools = plan_tools(
            context.options, body.chat_tools(), body.chat_choice(), body.parallel_tool_calls is not False
        )
        prompt = await encode_chat(context, body.messages(), body, False, tools)
        name = context.name("resp_", body, request)
        build = _Builder(context, body, name, prompt, tools)
        outputs = context.run(name, body, [prompt], context.told(with_tools(params, tools), prompt))
        if body.stream:
            outputs = await started(request, outputs)
            return NamedEventStream(name, build.events(outputs), outputs, build.failed)
        return json_answer(await until_disconnect(request, build.answer(outputs)))

    for method in ("GET", "DELETE"):

        @routes.api_route("/v1/responses/{name}", methods=[method], responses={404: {"model": ErrorBody}})
        async def stored(name: str) -> Response:
            """Always 404."""
            raise ApiError(404, f"{name[:80]!r}: {NOT_STORED}", "response_id")

    return routes


class _Builder:
    """Turns engine outputs into the answer of one request."""

    def __init__(
        self, context: Context, body: ResponseBody, name: str, prompt: Input, tools: ToolUse
    ) -> None:
        self._context, self._body, self._name = context, body, name
        self._created = int(time.time())
        self._speaker = Assistant(tools, context.thinker(prompt.text or ""))
        self._scores = ChatScores(context.tokenizer, body.top_logprobs or 0)
        self._count = UsageCount()
        self._items = Items()
        self._reason: str | None = None
        self._number = 0  # of the event that is next, or is being sent

    async def answer(self, outputs: Outputs) -> dict[str, Any]:
        async with aclosing(outputs):
            async for _, output in outputs:
                for _event in self._take(output):
                    continue
        return self._response(self._status)

    async def events(self, outputs: Outputs) -> AsyncIterator[Event]:
        """OpenAI's events, numbered; the last one holds the whole response."""
        for kind in ("created", "in_progress"):
            yield self._about(kind, self._response("in_progress"))
            self._number += 1
        async for _, output in outputs:
            for event in self._take(output):
                yield {**event, "sequence_number": self._number}
                self._number += 1
        yield self._about(self._status, self._response(self._status))

    def failed(self, error: Exception) -> Event:
        """The event that ends a stream in place of the one that the error kept back."""
        message = describe(error)[1]["error"]["message"]
        response = self._response("failed") | {"error": {"code": "server_error", "message": message}}
        return self._about("failed", response)

    def _about(self, kind: str, response: dict[str, Any]) -> Event:
        return {"type": f"response.{kind}", "sequence_number": self._number, "response": response}

    def _take(self, output: RequestOutput) -> list[Event]:
        """Events of an output: all of them, so that what is built is complete whoever reads them."""
        self._count.add(0, output)
        events: list[Event] = []
        for piece in output.outputs:
            said = self._speaker.feed(piece.text, piece.finish_reason)
            events += self._items.add(said, self._token_scores(piece))
            if piece.finish_reason is not None:
                self._reason = piece.finish_reason
                events += self._items.end(self._status)
        return events

    def _token_scores(self, piece: CompletionOutput) -> list[Any]:
        if not self._body.scored:
            return []
        return list(self._scores.build(piece.token_ids, piece.logprobs or ())["content"])

    @property
    def _status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    def _response(self, status: str) -> dict[str, Any]:
        body, ended = self._body, status in ("completed", "incomplete")
        choice = body.tool_choice
        return {
            "id": self._name,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._context.model,
            "output": list(self._items.items) if ended else [],
            "usage": self._usage() if ended else None,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "top_logprobs": body.top_logprobs or 0,
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "tool_choice": choice.model_dump() if isinstance(choice, ResponseNamedTool) else choice or "auto",
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "reasoning": {
                "effort": None if body.reasoning is None else body.reasoning.effort,
                "summary": None,
            },
            "text": body.text_options(),
            "truncation": "disabled",
            "metadata": body.metadata or {},
            "previous_response_id": None,
            "background": False,
            "store": False,
            "user": body.user,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._count.usage()
        thoughts = self._context.count_thoughts([self._speaker])
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": thoughts or 0},
            "total_tokens": usage["total_tokens"],
        }
