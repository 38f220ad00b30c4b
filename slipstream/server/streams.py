"""Async plumbing of answers: merging iterators, server-sent events, and noticing that a client has gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any, ClassVar, TypeVar

import msgspec
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from slipstream.observe.log import get_logger
from slipstream.server.errors import describe

T = TypeVar("T")
log = get_logger(__name__)
DONE = b"data: [DONE]\n\n"
_encode_fast = msgspec.json.Encoder().encode


def _encode(data: Any) -> bytes:
    """JSON. An answer repeats what a client sent, whose integers may be wider than 64 bits."""
    try:
        return _encode_fast(data)
    except OverflowError:
        return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()


def event(data: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(data) + b"\n\n"


class ClientGone(Exception):
    """The client closed the connection before its answer was ready."""


async def merge(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items of all sources as they come, each with its source's index. The first exception ends all of them,
    and so does closing this iterator."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as source:
            async for one in source:
                yield 0, one
        return
    queue: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue()

    async def pump(index: int, source: AsyncGenerator[T, None]) -> None:
        try:
            async for item in source:
                queue.put_nowait((index, item))
        except Exception as error:
            queue.put_nowait(error)
        finally:
            await source.aclose()
            queue.put_nowait(None)

    tasks = [asyncio.create_task(pump(index, source)) for index, source in enumerate(sources)]
    try:
        live = len(tasks)
        while live:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                live -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until_disconnect(request: Request, work: Awaitable[T]) -> T:
    """The result of work; cancels it and raises ClientGone when the client goes first. The body must be
    read. The work begins at once, in the task that asks: a request of many is with the engine before the next
    one is looked at."""
    task = asyncio.current_task()
    assert task is not None

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        task.cancel()

    gone = asyncio.ensure_future(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if not gone.done() or gone.cancelled() or task.uncancel():
            raise
        raise ClientGone from None
    finally:
        gone.cancel()


def json_answer(data: Any) -> Response:
    return Response(_encode(data), media_type="application/json")


async def started(request: Request, source: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """source, with its first item already waiting: what is refused or fails before it can still choose the
    answer's status. Raises ClientGone. Closing the result closes source."""

    async def rest() -> AsyncGenerator[T, None]:
        async with aclosing(source):
            yield first
            async for item in source:
                yield item

    first = await until_disconnect(request, anext(source))
    return rest()


class EventStream(StreamingResponse):
    """Sends events as they come, then [DONE]. An error after the start, in making an event or in writing it,
    becomes the event that failed makes of it: by default one of OpenAI's error shape.

    source is what events read from: it is closed, and its requests with it, however the answer ends.
    """

    _end: ClassVar[bytes] = DONE

    def __init__(
        self,
        name: str,
        events: AsyncIterator[Any],
        source: AsyncGenerator[Any, None],
        failed: Callable[[Exception], Any] = lambda error: describe(error)[1],
    ) -> None:
        super().__init__(
            self._framed(name, events, failed),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Starlette's own watch for the end of the connection is a task group a stream.
        try:
            with suppress(ClientGone):
                await until_disconnect(Request(scope, receive), self.stream_response(send))
        finally:
            await self._source.aclose()

    async def _framed(
        self, name: str, events: AsyncIterator[Any], failed: Callable[[Exception], Any]
    ) -> AsyncIterator[bytes]:
        try:
            async for data in events:
                yield self._frame(data)
        except Exception as error:
            log.error("stream failed", request=name, error=repr(error))
            yield self._frame(failed(error))
        if self._end:
            yield self._end

    @staticmethod
    def _frame(data: Any) -> bytes:
        return event(data)


class NamedEventStream(EventStream):
    """Events with a line for their type. There is no [DONE]."""

    _end = b""

    @staticmethod
    def _frame(data: Any) -> bytes:
        kind: str = data["type"]
        return b"event: " + kind.encode() + b"\n" + event(data)
