"""Sends requests to an OpenAI-compatible server and times what comes back. Made to be light: a chunk of a
stream costs a few microseconds, and 1,000 streams fit on one core beside a server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from slipstream.cli.serve_load import Ask

DONE = b"[DONE]"
ERROR_CHARACTERS = 300


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class Choice(msgspec.Struct):
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    def holds_tokens(self) -> bool:
        """A chunk of a chat may tell the role alone."""
        if self.delta is None:
            return self.text is not None
        return bool(self.delta.content or self.delta.reasoning_content or self.delta.tool_calls)


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Event(msgspec.Struct):
    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(Event).decode


class EventLines:
    """Server-sent events out of bytes that come in pieces of any size."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The data of each event that is whole now."""
        buffer = self._rest + data
        if b"\r" in buffer:
            buffer = buffer.replace(b"\r\n", b"\n")
        *events, self._rest = buffer.split(b"\n\n")
        for event in events:
            lines = [line[5:].lstrip(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield b"\n".join(lines)


@dataclass(slots=True)
class Record:
    """One request. Times: seconds after the start of the run. due: when there was room, where it had to wait
    for that. arrived: of every chunk with tokens. *_tokens: as the server counted them. error: why it failed,
    "" where it did not."""

    due: float
    sent: float = 0.0
    ended: float = 0.0
    arrived: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    @property
    def ttft(self) -> float:
        return self.arrived[0] - self.sent

    @property
    def e2e(self) -> float:
        return self.ended - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first; None where there is one token only."""
        tokens = self.output_tokens
        return (self.arrived[-1] - self.arrived[0]) / (tokens - 1) if tokens > 1 else None

    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.arrived, self.arrived[1:], strict=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server. body: what every request holds besides prompt and max_tokens. chat: prompts are messages."""

    base_url: str
    endpoint: str
    body: dict[str, Any]
    api_key: str | None = None
    timeout: float = 600.0

    @property
    def chat(self) -> bool:
        return self.endpoint.rstrip("/").endswith("chat/completions")

    def session(self) -> aiohttp.ClientSession:
        headers = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        return aiohttp.ClientSession(
            self.base_url.rstrip("/") + "/",
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self.timeout),
            headers=headers,
        )

    def request(self, ask: Ask) -> bytes:
        """The body of a request."""
        turns = [{"role": "user", "content": ask.prompt}]
        prompt = {"messages": turns} if self.chat else {"prompt": ask.prompt}
        return msgspec.json.encode({**self.body, **prompt, "max_tokens": ask.max_tokens})


async def first_model(target: Target) -> str:
    """The first model that the server names. Raises ValueError where it names none, or does not answer."""
    try:
        async with target.session() as session, session.get("v1/models") as answer:
            answer.raise_for_status()
            return str((await answer.json())["data"][0]["id"])
    except (aiohttp.ClientConnectionError, TimeoutError) as error:
        raise ValueError(f"--base-url={target.base_url}: nobody answers at /v1/models: {error}") from None
    except (aiohttp.ClientError, OSError, KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"--base-url={target.base_url}: {error!r} at /v1/models; name the --model") from None


class Run:
    """All requests of a benchmark: each is sent when it is due, and where max_concurrency is given, when
    fewer are running."""

    def __init__(self, target: Target, asks: Sequence[Ask], max_concurrency: int | None) -> None:
        self.records = [Record(ask.due) for ask in asks]
        self.running = self.most_running = self.done = self.failed = self.chunks = 0
        self._target, self._asks = target, asks
        self._room = asyncio.Semaphore(max_concurrency or len(asks) or 1)
        self._begin = 0.0

    def clock(self) -> float:
        return time.perf_counter() - self._begin

    async def run(self) -> float:
        """Returns the seconds from the first request to the last end."""
        async with self._target.session() as session:
            self._begin = time.perf_counter()
            tasks, room_since = [], 0.0
            for ask, record in zip(self._asks, self.records, strict=True):
                while (wait := ask.due - self.clock()) > 0:  # a timer may be a little early
                    await asyncio.sleep(wait)
                full = self._room.locked()
                await self._room.acquire()
                if full:
                    room_since = self.clock()
                record.due = max(ask.due, room_since)
                tasks.append(asyncio.create_task(self._one(session, ask, record)))
            await asyncio.gather(*tasks)
            return self.clock()

    async def _one(self, session: aiohttp.ClientSession, ask: Ask, record: Record) -> None:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self._stream(session, ask, record)
            if not record.arrived and not record.error:
                record.error = "the answer held no tokens"
        except TimeoutError:
            record.error = f"no end within {self._target.timeout:g} s"
        except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
            record.error = repr(error)[:ERROR_CHARACTERS]
        finally:
            record.ended = self.clock()
            self.running -= 1
            self.done += 1
            self.failed += bool(record.error)
            self._room.release()

    async def _stream(self, session: aiohttp.ClientSession, ask: Ask, record: Record) -> None:
        body = self._target.request(ask)
        record.sent = self.clock()
        headers = {"Content-Type": "application/json"}
        async with session.post(self._target.endpoint.lstrip("/"), data=body, headers=headers) as answer:
            if answer.status != 200:
                record.error = f"status {answer.status}: {(await answer.text())[:ERROR_CHARACTERS]}"
                return
            lines = EventLines()
            async for piece in answer.content.iter_any():
                now = self.clock()
                for data in lines.feed(piece):
                    if data != DONE:
                        self._take(_decode(data), record, now)

    def _take(self, event: Event, record: Record, now: float) -> None:
        if event.error is not None:
            record.error = str(event.error)[:ERROR_CHARACTERS]
        if any(choice.holds_tokens() for choice in event.choices):
            record.arrived.append(now)
            self.chunks += 1
        if event.usage is not None:
            record.prompt_tokens = event.usage.prompt_tokens
            record.output_tokens = event.usage.completion_tokens
        elif record.output_tokens < len(record.arrived):
            record.output_tokens = len(record.arrived)  # a server that counts nothing: a chunk is a token
