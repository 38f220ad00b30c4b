"""An engine process that is replaced when it dies or hangs, and the rule for when that has become hopeless.

Who is alive is judged by progress, not by a port: the engine counts messages taken and steps made in memory
that both sides map, so that a look costs neither side a message.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from slipstream.config.args import EngineArgs
from slipstream.contracts.errors import EngineDeadError, EngineMemoryError
from slipstream.contracts.outputs import EngineOutputs
from slipstream.contracts.request import EngineRequest
from slipstream.engine.client import EngineHealth, EngineInfo
from slipstream.engine.process_client import ProcessClient
from slipstream.observe.log import get_logger

log = get_logger(__name__)

# A step of a large prompt takes a CPU minutes: one that computes has so many times as long.
COMPUTING_FACTOR = 20.0
COMPUTING_SECONDS = 0.02  # of CPU time between two looks: it computes; two ticks of Linux' clock
# A new engine may take so many times as long to start as the first one, and so long at least.
START_FACTOR, START_SECONDS = 4.0, 120.0
STEADY_SECONDS = 60.0  # an idle engine that lived so long did not die of its start


@dataclass(slots=True)
class Watchdog:
    """Tells an engine that is stuck: for `seconds` work was pending, its count stood still and it did not
    compute; or, if it computed, for COMPUTING_FACTOR times as long. 0 never tells."""

    seconds: float
    count: int = -1
    since: float = 0.0  # when the count moved
    moved: float = 0.0  # when anything did
    spent: float = 0.0

    def stuck(self, count: int, spent: float, busy: bool, now: float) -> bool:
        """spent: seconds of CPU time, where that tells of progress."""
        if count != self.count or not busy:
            self.restart(count, now)
        if spent - self.spent >= COMPUTING_SECONDS:
            self.moved = now
        self.spent = spent
        quiet = max(now - self.moved, (now - self.since) / COMPUTING_FACTOR)
        return 0 < self.seconds < quiet

    def restart(self, count: int, now: float) -> None:
        self.count, self.since, self.moved = count, now, now


class SteadyClient:
    """A client whose engine is replaced; one thread calls it. While no engine is up, what is added and
    aborted is dropped: whoever calls tend() adds all that is live once it returns True.

    Raises what ProcessClient raises where the first engine cannot start.
    """

    def __init__(
        self, args: EngineArgs, start: Callable[[EngineArgs, bool], ProcessClient] = ProcessClient
    ) -> None:
        self._args, self._start = args, start
        begin = time.monotonic()
        self._now = start(args, True)
        self._since = time.monotonic()  # of the state that it is in
        self._start_seconds = max(START_SECONDS, START_FACTOR * (self._since - begin))
        self.info: EngineInfo = self._now.info
        self._watchdog = Watchdog(args.engine_progress_timeout)
        self._watchdog.restart(0, self._since)
        self._on_cpu = self.info.plan["device"]["value"] == "cpu"
        self._state: Literal["up", "ending", "starting"] = "up"
        self._fruitful = False  # it has made a token
        self._busy = False
        self._deaths = 0  # in a row, without a token between
        self.restarts = 0

    @property
    def up(self) -> bool:
        return self._state == "up"

    @property
    def health(self) -> EngineHealth:
        quiet = time.monotonic() - self._watchdog.since if self._state == "up" else None
        return EngineHealth(self._state == "up", self.restarts, self._now.progress, quiet)

    @property
    def pid(self) -> int:
        """The engine's process."""
        return self._now.pid

    def add(self, requests: Sequence[EngineRequest]) -> None:
        if self._state == "up":
            self._now.add(requests)

    def abort(self, keys: Sequence[int]) -> None:
        if self._state == "up":
            self._now.abort(keys)

    def look(self) -> None:
        """Ask for a snapshot; dropped like a request while no engine is up."""
        if self._state == "up":
            self._now.look()

    def filenos(self) -> tuple[int, ...]:
        """Descriptors that tell of news; none while no engine is up."""
        return self._now.filenos() if self._state == "up" else ()

    def receive(self, timeout: float | None = None) -> EngineOutputs | None:
        """The next outputs; None also where the engine is lost. Raises EngineDeadError where there will be
        no other."""
        if self._state != "up":
            return None
        try:
            outputs = self._now.receive(timeout)
        except EngineDeadError as error:
            self._failed(error)
            return None
        if outputs is not None and len(outputs.tokens):
            self._fruitful = True
        return outputs

    def tend(self, busy: bool) -> bool:
        """To be called a few times a second, after receive() has returned None. busy: requests are live. True
        where another engine has taken over, which knows no request. Raises as receive() does."""
        now, self._busy = time.monotonic(), busy
        if self._state == "up":
            spent = self._now.cpu_seconds if self._on_cpu else 0.0
            if self._watchdog.stuck(self._now.progress, spent, busy, now):
                self._lose(f"the engine made no progress for {self._watchdog.seconds:g} s")
        elif self._state == "ending":
            if self._now.ended:  # only now is its memory free
                self._now.close()
                self._now = self._start(self._args, False)
                self._state, self._since = "starting", now
            elif now - self._since > START_SECONDS:
                raise EngineDeadError("the engine process cannot be killed")
        else:
            return self._await_start(now)
        return False

    def _await_start(self, now: float) -> bool:
        try:
            self._now.receive(0)
        except EngineDeadError as error:
            self._failed(error)
            return False
        if not self._now.ready:
            if now - self._since > self._start_seconds:
                self._lose(f"the engine was not ready after {self._start_seconds:.0f} s")
            return False
        self.info = self._now.info
        self.restarts += 1
        log.info("engine replaced", restarts=self.restarts, seconds=now - self._since)
        self._state, self._since, self._fruitful = "up", now, False
        self._watchdog.restart(0, now)
        return True

    def _failed(self, error: EngineDeadError) -> None:
        """Where memory was too little, the next engine computes half as many tokens in a step; but two of
        every row at least."""
        names = ("max_num_batched_tokens", "max_num_seqs")
        if isinstance(error, EngineMemoryError):
            planned, rows = (int(self.info.plan[name]["value"]) for name in names)
            tokens = self._args.max_num_batched_tokens or planned
            fewer = max(tokens // 2, 2 * rows)
            if fewer < tokens:
                log.warning("out of memory in a step; fewer tokens a step", before=tokens, now=fewer)
                self._args = replace(self._args, max_num_batched_tokens=fewer)
        self._lose(str(error))

    def _lose(self, reason: str) -> None:
        """The engine is of no use any more. Raises EngineDeadError where another would not be either."""
        now = time.monotonic()
        steady = self._state == "up" and not self._busy and now - self._since > STEADY_SECONDS
        if self._fruitful or steady:
            self._deaths = 0
        self._fruitful = False
        self._deaths += 1
        self._now.kill()
        self._state, self._since = "ending", now
        most = self._args.max_engine_restarts
        if self._deaths > most:
            times = "" if not most else f"{self._deaths} engines in a row were lost without making a token: "
            raise EngineDeadError(times + reason)
        log.error("engine lost; starting another", reason=reason, in_a_row=self._deaths)

    def close(self) -> None:
        """Let the engine finish its steps; one that is not up is ended at once."""
        if self._state != "up":
            self._now.kill()
        self._now.close()
