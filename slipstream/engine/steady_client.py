"""An engine process that is replaced when it dies or hangs, and the rule for when that has become hopeless.

Who is alive is judged by progress, not by a port: the engine counts messages taken and steps made in memory
that both sides map, so that a look costs neither side a message.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal

from slipstream.config.args import EngineArgs
from slipstream.contracts.errors import CrashLoopError, EngineDeadError
from slipstream.contracts.outputs import EngineOutputs
from slipstream.contracts.request import EngineRequest
from slipstream.engine import wire
from slipstream.engine.client import EngineHealth, EngineInfo
from slipstream.engine.faults import START_FACTOR, START_SECONDS, Losses, Watchdog
from slipstream.engine.process_client import ProcessClient
from slipstream.engine.spare import Spare
from slipstream.observe.log import get_logger

log = get_logger(__name__)


class SteadyClient:
    """A client whose engine is replaced; one thread calls it. While no engine is up, what is added and
    aborted is dropped: whoever calls tend() adds all that is live once it returns True.

    Raises what ProcessClient raises where the first engine cannot start.
    """

    def __init__(
        self, args: EngineArgs, make: Callable[[EngineArgs, bool, bool], ProcessClient] = ProcessClient
    ) -> None:
        self._args = args
        begin = time.monotonic()
        self._now = make(args, True, False)
        self._since = time.monotonic()  # of the state that it is in
        self._start_seconds = max(START_SECONDS, START_FACTOR * (self._since - begin))
        self._spare = Spare(lambda spare: make(args, False, spare), args.spare_processes)
        self._spare.later()
        self.info: EngineInfo = self._now.info
        self._watchdog = Watchdog(args.engine_progress_timeout)
        self._watchdog.restart(0, self._since)
        self._losses = Losses("engines", args.max_engine_restarts)
        self._computes_here = self.info.plan["device"]["value"] == "cpu" and self.info.worker_pid == self.pid
        self._state: Literal["up", "ending", "starting"] = "up"
        self._busy = False
        self.restarts = 0
        self._worker_pid = self.info.worker_pid
        self._worker_restarts = 0

    @property
    def up(self) -> bool:
        return self._state == "up"

    @property
    def health(self) -> EngineHealth:
        quiet = time.monotonic() - self._watchdog.since if self._state == "up" else None
        replacing: Literal["engine", "worker"] | None = None
        if self._state != "up":
            replacing = "engine"
        elif not self._worker_pid:
            replacing = "worker"
        return EngineHealth(
            replacing is None, self.restarts, self._worker_restarts, self._now.progress, quiet,
            replacing=replacing,
        )

    @property
    def pid(self) -> int:
        """The engine's process."""
        return self._now.pid

    def add(self, requests: Sequence[EngineRequest]) -> None:
        if self._state == "up":
            self._now.add(requests)
        else:
            wire.encode(requests)  # what no engine can be told is refused now, not when the next one is up

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
        if outputs is not None:
            if len(outputs.tokens):
                self._losses.fruitful = True
            self._worker_pid = outputs.stats.worker_pid
            self._worker_restarts = outputs.stats.worker_restarts
        return outputs

    def tend(self, busy: bool) -> bool:
        """To be called a few times a second, after receive() has returned None. busy: requests are live. True
        where another engine has taken over, which knows no request. Raises as receive() does."""
        now, self._busy = time.monotonic(), busy
        if self._state == "up":
            self._spare.tend()
            spent = self._now.cpu_seconds if self._computes_here else 0.0
            if self._watchdog.stuck(self._now.progress, spent, busy, now):
                self._lose(f"the engine made no progress for {self._watchdog.seconds:g} s")
        elif self._state == "ending":
            if self._now.ended:  # only now is its memory free
                self._now.close()
                self._now = self._spare.take()
                self._now.begin(self._args)
                self._state, self._since = "starting", now
            elif now - self._since > START_SECONDS:
                raise CrashLoopError("the engine process cannot be killed")
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
        self._state, self._since = "up", now
        self._worker_pid, self._worker_restarts = self.info.worker_pid, 0
        self._losses.started()
        self._watchdog.restart(0, now)
        self._spare.later()
        return True

    def _failed(self, error: EngineDeadError) -> None:
        """Raises the error where it says itself that another engine would end likewise."""
        if isinstance(error, CrashLoopError):
            self._now.kill()
            self._state = "ending"
            raise error
        self._lose(str(error))

    def _lose(self, reason: str) -> None:
        """The engine is of no use any more. Raises CrashLoopError where another would not be either."""
        idle = self._state == "up" and not self._busy
        self._now.kill()
        self._state, self._since = "ending", time.monotonic()
        self._losses.lost(reason, idle)
        log.error("engine lost; starting another", reason=reason, in_a_row=self._losses.in_a_row)

    def close(self) -> None:
        """Let the engine finish its steps; one that is not up is ended at once."""
        self._spare.close()
        if self._state != "up":
            self._now.kill()
        self._now.close()
