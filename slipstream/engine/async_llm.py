"""AsyncLLM: requests as async generators on an event loop; the engine runs in a process of its own."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

from slipstream.config.args import EngineArgs
from slipstream.contracts.errors import OVERDUE, EngineDeadError, EngineError, QueueTimeoutError
from slipstream.contracts.outputs import EngineStats
from slipstream.contracts.sampling_params import SamplingParams
from slipstream.contracts.structured_outputs import FIELD
from slipstream.engine.client import EngineClient, EngineHealth, EngineInfo
from slipstream.engine.input_processor import InputProcessor, Prompt, open_tokenizer
from slipstream.engine.look import Look, Lookers
from slipstream.engine.output_processor import OutputProcessor
from slipstream.engine.outputs import RequestOutput
from slipstream.engine.request_state import RequestState
from slipstream.observe.log import get_logger
from slipstream.text.tokenizer import Tokenizer

log = get_logger(__name__)

# How often the engine is looked after: while it is up, and while another one starts.
TEND_SECONDS, START_TEND_SECONDS = 0.25, 0.02
MOST_WOKEN = 32  # readers, between two looks at what has arrived
MOST_COMPILING = 16  # requests whose grammars are compiled at once; others wait


def failure(state: RequestState, text: str) -> Exception:
    """Why a request failed alone: by what it asked, where the text names the field, else by us."""
    if text == OVERDUE:
        return QueueTimeoutError(state.max_wait)
    asked, start = state.prepared.params.structured_outputs, f"{FIELD}: "
    if asked is not None and text.startswith(start):
        return asked.wrong(text.removeprefix(start))
    return EngineError(text)


def _at_rest(info: EngineInfo) -> EngineStats:
    blocks = info.limits.num_blocks
    return EngineStats(free_blocks=blocks, num_blocks=blocks, worker_pid=info.worker_pid)


class SelectableClient(EngineClient, Protocol):
    """An engine that an event loop can wait for. up: one runs; while none does, what is added, aborted or
    asked is dropped. pid: of its process; None where that is this one."""

    @property
    def pid(self) -> int | None: ...

    @property
    def up(self) -> bool: ...

    @property
    def health(self) -> EngineHealth: ...

    def tend(self, busy: bool) -> bool:
        """To be called a few times a second; busy: requests are live. True where another engine has taken
        over, which knows no request. Raises EngineDeadError where none will."""
        ...

    def look(self) -> None:
        """Ask for a snapshot; it comes in outputs of its own."""
        ...

    def filenos(self) -> tuple[int, ...]:
        """Descriptors that become readable when receive(0) may have news; none while no engine is up."""
        ...


class AsyncLLM:
    """A running engine. Everything here belongs to the thread of one event loop at a time.

    stats: the engine's state after the last step that the loop has heard of; its counts are this engine's.
    """

    def __init__(self, client: SelectableClient, tokenizer: Tokenizer | None, seed: int = 0) -> None:
        self.info: EngineInfo = client.info
        self.stats = _at_rest(client.info)
        self._client = client
        self._tokenizer = tokenizer
        self._inputs = InputProcessor(tokenizer, client.info, seed)
        self._outputs = OutputProcessor(tokenizer)
        self._wake: dict[RequestState, asyncio.Event] = {}
        self._news: deque[asyncio.Event] = deque()  # of readers that are to be woken
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ears: tuple[int, ...] = ()  # descriptors that the loop waits for
        self._dead: str | None = None
        self._lookers = Lookers()
        # Threads that wait for grammars to be tried, which processes do.
        self._compiling = ThreadPoolExecutor(MOST_COMPILING, thread_name_prefix="compiling")

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> AsyncLLM:
        """Start an engine process; returns when it is ready. Another one takes its place, and its requests,
        when it dies or hangs. Raises ValueError for what cannot be honoured, EngineError where the engine
        fails to start."""
        from slipstream.engine.steady_client import SteadyClient

        tokenizer = open_tokenizer(args)
        engine = cls(SteadyClient(args), tokenizer, args.seed)
        engine._compiling.submit(engine._inputs.begin_trials)
        return engine

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        priority: int = 0,
        max_wait: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request as they come; the last one is `finished`. Closing the generator aborts.
        max_wait: seconds that the request may wait for a row; QueueTimeoutError where it got none by then.
        The engine decides, so that nobody is refused who has just been let in.

        A reader that falls behind gets several steps in one output. Requests of one request_id are strangers
        to each other, but abort() ends all of them. Raises BadRequest, EngineError where this request fails,
        EngineDeadError where the engine does.
        """
        self._listen()
        self._check()
        if sampling_params.structured_outputs is None:
            prepared = self._inputs.prepare(prompt, sampling_params, priority)
        else:
            prepared = await asyncio.get_running_loop().run_in_executor(
                self._compiling, self._inputs.prepare, prompt, sampling_params, priority
            )
            self._check()
        state = self._outputs.open(request_id, prepared)
        state.max_wait = math.inf if max_wait is None else max_wait
        wake = self._wake[state] = asyncio.Event()
        try:
            self._client.add(state.engine_requests())
            while True:
                await wake.wait()
                wake.clear()
                self._check()
                if state.error is not None:
                    raise failure(state, state.error)
                if (output := state.take()) is not None:
                    yield output
                    if output.finished:
                        return
        finally:
            del self._wake[state]
            self._end([state])

    async def look(self) -> Look:
        """The row table and the last steps. Those who look at once share one snapshot. Raises
        EngineDeadError."""
        self._listen()
        self._check()
        if not self._lookers:
            self._client.look()
        return await self._lookers.join()

    async def abort(self, request_id: str) -> None:
        """End the live requests of this id: their generators give a last output, with finish_reason
        "abort"."""
        states = [state for state in self._wake if state.request_id == request_id]
        self._end(states)
        for state in states:
            self._wake[state].set()

    def _end(self, states: Iterable[RequestState]) -> None:
        keys = self._outputs.close(states)
        if keys and self._dead is None:
            self._client.abort(keys)

    def watch(self) -> None:
        """Look after the engine on the running loop from now on, also while there is no request."""
        self._listen()

    def _listen(self) -> None:
        """Wait for the engine on the running loop."""
        loop = asyncio.get_running_loop()
        if self._loop is loop or self._dead is not None:
            return
        self._deafen()
        self._loop = loop
        self._tend()

    def _hear(self) -> None:
        """Wait for the descriptors that the client has now."""
        filenos = self._client.filenos() if self._loop is not None else ()
        if self._loop is None or filenos == self._ears:
            return
        self._forget_ears(self._loop)
        self._ears = filenos
        for fileno in filenos:
            self._loop.add_reader(fileno, self._read)
        self._loop.call_soon(self._read)  # the descriptors tell of changes only

    def _forget_ears(self, loop: asyncio.AbstractEventLoop) -> None:
        for fileno in self._ears:
            loop.remove_reader(fileno)
        self._ears = ()

    def _deafen(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._loop is not None and not self._loop.is_closed():
            self._forget_ears(self._loop)
        self._loop, self._timer, self._ears = None, None, ()
        self._news.clear()  # who is left is woken otherwise

    def _tend(self) -> None:
        """Replace an engine that is lost: whoever is live goes on with the tokens that he has."""
        self._read()
        with self._ending_streams():
            if self._dead is None and self._client.tend(self._outputs.num_live > 0):
                self.stats = _at_rest(self._client.info)
                self._client.add(self._outputs.resume(self._wake))
                if self._lookers:
                    self._client.look()
            elif not self._client.up:
                self._refuse_overdue()
        if self._loop is not None:
            self._hear()
            seconds = TEND_SECONDS if self._client.up else START_TEND_SECONDS
            self._timer = self._loop.call_later(seconds, self._tend)

    def _refuse_overdue(self) -> None:
        """The engine says whose wait is over; while there is none, it is said here."""
        now = time.monotonic()
        for state, wake in self._wake.items():
            if state.admit_by <= now:
                state.error = OVERDUE
                wake.set()

    def _read(self) -> None:
        """Take what the engine has sent."""
        with self._ending_streams():
            while self._dead is None and (outputs := self._client.receive(0)) is not None:
                self.stats = outputs.stats
                self._lookers.show(outputs, self._outputs)
                ready, stopped = self._outputs.process(outputs)
                if stopped:
                    self._client.abort(stopped)
                self._tell(ready)
        if self._ears and not self._client.up:
            self._hear()  # a process that has gone would be heard for ever

    def _tell(self, ready: list[RequestState]) -> None:
        """They have something to take. Whoever has ended comes first: his client may have more to ask."""
        if ready and not self._news and self._loop is not None:
            self._loop.call_soon(self._wake_some)
        for state in ready:
            add = self._news.appendleft if state.finished else self._news.append
            add(self._wake[state])

    def _wake_some(self) -> None:
        """A reader has tens of microseconds of work with what it takes: all of them at once would keep who
        arrives from the engine."""
        for _ in range(min(len(self._news), MOST_WOKEN)):
            self._news.popleft().set()
        if self._news and self._loop is not None:
            self._loop.call_soon(self._wake_some)

    @contextmanager
    def _ending_streams(self) -> Iterator[None]:
        """Streams that nobody feeds any more must end, not hang."""
        try:
            yield
        except EngineDeadError as error:
            log.error("engine is gone", reason=str(error))
            self._die(str(error))
        except Exception as error:
            log.exception("outputs could not be read")
            self._die(f"outputs could not be read: {error!r}")

    def _die(self, reason: str) -> None:
        self._deafen()
        self._dead = reason
        self._lookers.fail(EngineDeadError(reason))
        for wake in self._wake.values():
            wake.set()

    def _check(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(self._dead)

    def stop(self, reason: str) -> None:
        """Take no more requests; those that run raise EngineDeadError with the reason."""
        if self._dead is None:
            self._die(reason)

    @property
    def errored(self) -> bool:
        """True once the engine takes no requests any more."""
        self._read()
        return self._dead is not None

    @property
    def health(self) -> EngineHealth:
        """How the engine does, or why there is none any more."""
        self._read()
        health = self._client.health
        if self._dead is None:
            return health
        return replace(health, ready=False, quiet=None, reason=self._dead, replacing=None)

    @property
    def engine_pid(self) -> int | None:
        """The engine's process; None where that is this one. The one that computes is stats.worker_pid."""
        return self._client.pid

    def get_tokenizer(self) -> Tokenizer | None:
        """None with skip_tokenizer_init."""
        return self._tokenizer

    def shutdown(self) -> None:
        """End the engine; requests that run raise EngineDeadError. May be called again."""
        self.stop("the engine was shut down")
        self._compiling.shutdown(wait=False, cancel_futures=True)
        self._inputs.close()
        self._client.close()
