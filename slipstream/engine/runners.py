"""The runners as the engine's loop sees them, and the choice of the plan. Nothing here depends on the old one
being there."""

from __future__ import annotations

from importlib import import_module
from typing import Protocol, cast

from slipstream.config.plan import EnginePlan
from slipstream.contracts.step import StepPlan, StepResult
from slipstream.runner import build as build_v2
from slipstream.runner.memory import MemoryPlan
from slipstream.speculation.build import build_drafter

RUNNER_V1 = "slipstream.runner_v1.build"


class DeviceTime(Protocol):
    """When a step ran: time.perf_counter() seconds."""

    @property
    def begin(self) -> float: ...

    @property
    def end(self) -> float: ...


class Handle(Protocol):
    """A step in flight. event.end is known once wait() has returned."""

    @property
    def step(self) -> int: ...

    @property
    def event(self) -> DeviceTime: ...

    def done(self) -> bool: ...

    def wait(self) -> StepResult:
        """Blocks until the step is done. Raises what the step raised."""
        ...


class Runner(Protocol):
    """Turns plans into steps, in order. One thread calls it."""

    def step(self, plan: StepPlan) -> Handle: ...

    def close(self) -> None: ...


class Built(Protocol):
    """A runner ready for its first plan. memory.num_blocks counts the null block."""

    @property
    def runner(self) -> Runner: ...

    @property
    def memory(self) -> MemoryPlan: ...

    @property
    def linear_name(self) -> str: ...

    @property
    def linear_reason(self) -> str: ...


def build_runner(plan: EnginePlan) -> Built:
    """The runner of the plan, and no other. Raises ValueError where the plan cannot be honoured."""
    if plan.model_runner == "v1":
        return cast(Built, import_module(RUNNER_V1).build_runner(plan))
    return build_v2.build_runner(plan, build_drafter)
