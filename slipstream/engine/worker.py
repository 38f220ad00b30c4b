"""Steps in a worker process, which is replaced when it dies or hangs. Everything here runs on the engine's
thread.

Plans and results travel as bytes over two pipes (worker_wire.py). Who is alive is judged by results and, on
a CPU, by CPU time: a worker that only waits for a lock makes none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

from slipstream.config.args import EngineArgs
from slipstream.config.executor import MP
from slipstream.contracts.errors import (
    CrashLoopError,
    EngineError,
    StepMemoryError,
    WorkerLostError,
)
from slipstream.contracts.step import StepPlan, StepResult
from slipstream.engine import wire, worker_wire
from slipstream.engine.faults import LOOK_SECONDS, START_FACTOR, START_SECONDS, Losses, Watchdog
from slipstream.engine.processes import Closed, Receiver, Sender, cpu_seconds, log_level, spawn
from slipstream.engine.spare import Spare
from slipstream.engine.worker_process import SPARE, THREAD
from slipstream.observe.log import current_format, get_logger

log = get_logger(__name__)
MODULE = "slipstream.engine.worker_process"
_ENDING_SECONDS = 0.005  # a killed process takes a few milliseconds to be gone
_CLOSE_SECONDS = 20.0  # for the steps in flight
_EXIT_SECONDS = 2.0  # for a process that has hung up to be gone


class Worker:
    """One worker process, from its spawn to its end. spare: it imports quietly and waits. keep: descriptors
    that it holds open, so that by them others see its end."""

    def __init__(self, spare: bool = False, keep: tuple[int, ...] = ()) -> None:
        plans, ours = os.pipe()
        theirs, results = os.pipe()
        words = [SPARE] * spare
        if threading.current_thread() is threading.main_thread():
            words.append(THREAD)
        self._process = spawn(MODULE, *words, filenos=(plans, results), keep=keep)
        os.close(plans)
        os.close(results)
        self.waiting: Callable[[], None] = _nothing
        self._sender = Sender(ours, lambda: self.waiting())
        self._receiver = Receiver(theirs)
        self.send, self.fileno = self._sender.send, theirs

    def receive(self, timeout: float) -> tuple[int, bytes] | None:
        """The next message; None after timeout seconds. Raises WorkerLostError once there is none to come."""
        try:
            return self._receiver.receive(timeout)
        except Closed:
            raise WorkerLostError(f"the worker process {self._end()}") from None

    def _end(self) -> str:
        try:
            code = self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return "hung up"
        return f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Nothing is left of the process."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """End the process whatever it does; close() tidies up."""
        self._process.kill()

    def finish(self) -> None:
        """Let it end what is in flight."""
        try:
            self.send(worker_wire.CLOSE)
            self._process.wait(_CLOSE_SECONDS)
        except (Closed, WorkerLostError, subprocess.TimeoutExpired):
            self.kill()
        self.close()

    def close(self) -> None:
        self._process.wait()
        self._sender.close()
        self._receiver.close()


class WorkerHandle:
    """A step that a worker computes."""

    __slots__ = ("_executor", "event", "outcome", "plan", "step")

    def __init__(self, executor: ProcessExecutor, plan: StepPlan) -> None:
        self._executor, self.plan, self.step = executor, plan, plan.step
        self.event = worker_wire.WorkerTime()
        self.outcome: StepResult | EngineError | None = None

    def done(self) -> bool:
        while self.outcome is None:
            if not self._executor.take(0):
                return False
        return True

    def wait(self) -> StepResult:
        """Raises StepMemoryError, WorkerLostError."""
        while self.outcome is None:
            if not self._executor.take(LOOK_SECONDS):
                self._executor.look()
        if isinstance(self.outcome, EngineError):
            raise self.outcome
        return self.outcome


class ProcessExecutor:
    """An Executor. beat: called a few times a second while this process waits for a worker that it does not
    take for a stuck one. make: Worker, or what makes one; worker: one to begin with.

    Raises what the first worker raised where it cannot start: ValueError with its text, else EngineError.
    """

    backend = MP

    def __init__(
        self,
        args: EngineArgs,
        beat: Callable[[], None],
        make: Callable[[bool], Worker] = Worker,
        worker: Worker | None = None,
    ) -> None:
        begin = time.monotonic()
        self._beat = beat
        self._worker = worker or make(False)
        self._spare = Spare(make, args.spare_processes)
        self._pending: deque[WorkerHandle] = deque()
        self._lost: WorkerLostError | None = None
        self._results = 0
        self.restarts = 0
        self._losses = Losses("workers", args.max_engine_restarts)
        self._watchdog = Watchdog(args.engine_progress_timeout)
        self._since = begin  # of the state that it is in
        self._state: Literal["up", "ending", "starting"] = "starting"
        try:
            self._begin(worker_wire.WorkerStart(args, None, None, log_level(), current_format()))
            while (ready := self._receive_ready(LOOK_SECONDS)) is None:
                beat()
        except BaseException:
            self._worker.kill()
            self._worker.close()
            raise
        self.plan, self.memory = ready.plan, ready.memory
        self.linear_name, self.linear_reason = ready.linear_name, ready.linear_reason
        # Another worker makes the same of it, with as many blocks.
        again = dataclasses.replace(ready.plan, num_blocks=ready.memory.num_blocks)
        self._again = worker_wire.WorkerStart(None, again, ready.memory, log_level(), current_format())
        self._on_cpu = self.plan.device == "cpu"
        self._start_seconds = max(START_SECONDS, START_FACTOR * (time.monotonic() - begin))
        self._ready_now()

    @property
    def pid(self) -> int:
        return self._worker.pid if self._state == "up" else 0

    @property
    def up(self) -> bool:
        return self._state == "up"

    @property
    def ears(self) -> tuple[int, ...]:
        return (self._worker.fileno,) if self._state == "up" and self._lost is None else ()

    def step(self, plan: StepPlan) -> WorkerHandle:
        handle = WorkerHandle(self, plan)
        if self._lost is None:
            if not self._pending:  # it was idle, for however long
                self._watchdog.restart(self._results, time.monotonic())
            self._pending.append(handle)
            self._tell(worker_wire.PLAN, self._plans.write(plan))
        else:
            handle.outcome = self._lost
        return handle

    def take(self, timeout: float) -> bool:
        """Take one message of the worker, or its end; False where there is none within timeout seconds."""
        if self._lost is not None:
            return True
        try:
            message = self._worker.receive(timeout)
        except WorkerLostError as error:
            self._lose(error)
            return True
        if message is None:
            return False
        kind, body = message
        if kind == worker_wire.DONE:
            handle = self._pending.popleft()
            handle.outcome = worker_wire.read_result(body, handle.plan, handle.event)
            self._results += 1
            return True
        failure: wire.Failure = wire.decoder(wire.Failure)(body)
        if failure.memory:
            self._pending.popleft().outcome = StepMemoryError(failure.text)
            self._results += 1
        else:
            self._lose(WorkerLostError(f"the worker failed: {failure.text}"))
        return True

    def look(self) -> None:
        """Whether the worker is stuck with what it has, where it gave no sign for LOOK_SECONDS."""
        spent = cpu_seconds(self._worker.pid) if self._on_cpu else 0.0
        if self._watchdog.stuck(self._results, spent, True, time.monotonic()):
            self._lose(WorkerLostError(f"the worker made no progress for {self._watchdog.seconds:g} s"))
        else:
            self._beat()

    def _look_while_sending(self) -> None:
        self.look()
        if self._lost is not None:
            raise Closed

    def _lose(self, error: WorkerLostError) -> None:
        """Every step in flight fails with this."""
        self._lost = error
        for handle in self._pending:
            handle.outcome = error
        self._pending.clear()

    def check(self) -> WorkerLostError | None:
        if self._state == "up":
            self._spare.tend()
            if not self._pending:
                self.take(0)
        return self._lost

    def replace(self, error: WorkerLostError, idle: bool, explained: bool = False) -> None:
        self._pending.clear()
        self._worker.kill()
        self._state, self._since = "ending", time.monotonic()
        self._losses.lost(str(error), idle, explained)
        log.error("worker lost; starting another", reason=str(error), in_a_row=self._losses.in_a_row)

    def tend(self, seconds: float) -> bool:
        self._beat()
        now = time.monotonic()
        if self._state == "ending":
            if not self._worker.ended:  # only then is its memory free
                if now - self._since > START_SECONDS:
                    raise CrashLoopError("the worker process cannot be killed")
                time.sleep(min(seconds, _ENDING_SECONDS))
                return False
            self._worker.close()
            self._worker = self._spare.take()
            self._state, self._since = "starting", now
            self._begin(self._again)
        try:
            ready = self._receive_ready(seconds)
        except CrashLoopError:
            raise
        except (EngineError, ValueError) as error:
            self.replace(WorkerLostError(str(error)), False)
            return False
        if ready is not None:
            self.restarts += 1
            log.info("worker replaced", restarts=self.restarts, seconds=now - self._since)
            self._ready_now()
        elif now - self._since > self._start_seconds:
            self.replace(WorkerLostError(f"not ready after {self._start_seconds:.0f} s"), False)
        return self._state == "up"

    def _begin(self, start: worker_wire.WorkerStart) -> None:
        self._tell(worker_wire.START, wire.encode(start))

    def _tell(self, kind: int, body: bytes = b"") -> None:
        with contextlib.suppress(Closed):  # what it said last is still to be read, and then its end
            self._worker.send(kind, body)

    def _receive_ready(self, seconds: float) -> worker_wire.WorkerReady | None:
        message = self._worker.receive(seconds)
        if message is None:
            return None
        kind, body = message
        if kind == worker_wire.FAILED:
            failure: wire.Failure = wire.decoder(wire.Failure)(body)
            raise ValueError(failure.text) if failure.users else EngineError(failure.text)
        ready: worker_wire.WorkerReady = wire.decoder(worker_wire.WorkerReady)(body)
        return ready

    def _ready_now(self) -> None:
        self._plans = worker_wire.PlanWriter()
        self._worker.waiting = self._look_while_sending
        self._lost, self._state = None, "up"
        self._losses.started()
        self._watchdog.restart(self._results, time.monotonic())
        self._spare.later()

    def made_token(self) -> None:
        self._losses.fruitful = True

    def free_caches(self) -> None:
        self._tell(worker_wire.FREE)

    def close(self) -> None:
        self._spare.close()
        if self._state == "up" and self._lost is None:
            self._worker.finish()
        else:
            self._worker.kill()
            self._worker.close()


def _nothing() -> None:
    """A worker that reads no longer is noticed later."""
