"""Where steps are computed, as the engine's loop sees it: in this process, or (worker.py) in a worker's."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Protocol

from slipstream.config.executor import UNI
from slipstream.contracts.errors import WorkerLostError
from slipstream.contracts.step import StepPlan, StepResult
from slipstream.engine.runners import (
    Built,
    ClosedRunner,
    DeviceTime,
    Handle,
    Runner,
    free_caches,
    return_memory,
)
from slipstream.runner.memory import MemoryPlan


class Executor(Protocol):
    """One thread calls it. backend: the name that --distributed-executor-backend has for it. restarts: of
    workers. pid: of who computes; 0 while nobody does."""

    backend: str
    memory: MemoryPlan
    linear_name: str
    linear_reason: str
    restarts: int

    @property
    def pid(self) -> int: ...

    @property
    def up(self) -> bool:
        """Steps can be given. While they can't, tend() is to be called."""
        ...

    @property
    def ears(self) -> tuple[int, ...]:
        """Descriptors that become readable where check() has news, while nothing is in flight."""
        ...

    def step(self, plan: StepPlan) -> Handle:
        """Returns at once and never raises: what fails is raised by the handle."""
        ...

    def check(self) -> WorkerLostError | None:
        """To be called now and then; what happened to the worker while nothing was in flight."""
        ...

    def replace(self, error: WorkerLostError, idle: bool, explained: bool) -> None:
        """What was in flight is forgotten, another worker will come. idle, explained: see Losses. Raises
        CrashLoopError where none will."""
        ...

    def tend(self, seconds: float) -> bool:
        """Wait for the next worker, so long at most; True where it is up. Raises CrashLoopError."""
        ...

    def made_token(self) -> None:
        """The present worker is of some use."""
        ...

    def free_caches(self) -> None:
        """After a step that lacked memory, with nothing in flight."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Failed:
    """The handle of a step that could not be launched."""

    step: int
    error: Exception

    @property
    def event(self) -> DeviceTime:
        raise self.error

    def done(self) -> bool:
        return True

    def wait(self) -> StepResult:
        raise self.error


class InlineExecutor:
    """The runner in this process: what breaks it breaks the engine."""

    backend, up, restarts = UNI, True, 0
    ears: tuple[int, ...] = ()

    def __init__(self, built: Built) -> None:
        self.runner: Runner = built.runner
        self.memory, self.pid = built.memory, os.getpid()
        self.linear_name, self.linear_reason = built.linear_name, built.linear_reason

    def step(self, plan: StepPlan) -> Handle:
        try:
            return self.runner.step(plan)
        except Exception as error:
            return _Failed(plan.step, error)

    def check(self) -> None:
        """There is no worker."""

    def replace(self, error: WorkerLostError, idle: bool, explained: bool) -> None:
        raise error

    def tend(self, seconds: float) -> bool:
        return True

    def made_token(self) -> None:
        """Nobody counts."""

    def free_caches(self) -> None:
        free_caches(self.runner)

    def close(self) -> None:
        try:
            self.runner.close()
        finally:
            self.runner = ClosedRunner()  # nobody else holds it
            return_memory()
