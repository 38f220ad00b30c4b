"""The runners as the engine's loop sees them, and the choice of the plan. Nothing here depends on the old one
being there, and nothing loads torch before a runner is built."""

from __future__ import annotations

import gc
from importlib import import_module
from typing import Protocol, cast, runtime_checkable

from slipstream.config.plan import EnginePlan
from slipstream.contracts.errors import EngineDeadError, StepMemoryError
from slipstream.contracts.step import StepPlan, StepResult
from slipstream.runner.memory import MemoryPlan

RUNNER_V1 = "slipstream.runner_v1.build"
_NO_MEMORY = "DefaultCPUAllocator: can't allocate memory"


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


@runtime_checkable
class Resettable(Protocol):
    """A runner that counts its steps on the device too."""

    def reset(self) -> None:
        """After a failed step, with nothing in flight: the next step is counted as the first."""
        ...


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


def build_runner(plan: EnginePlan, known: MemoryPlan | None = None) -> Built:
    """The runner of the plan, and no other. known: where memory went the last time. Raises ValueError where
    the plan cannot be honoured."""
    if plan.model_runner == "v1":
        return cast(Built, import_module(RUNNER_V1).build_runner(plan))
    from slipstream.runner.build import build_runner as build_v2
    from slipstream.speculation.build import build_drafter

    return build_v2(plan, build_drafter, known)


def lacked_memory(error: BaseException) -> bool:
    """Whether a step failed for want of memory: torch's error of a GPU is a class of its own; of a CPU it is
    a RuntimeError with this text."""
    if isinstance(error, StepMemoryError):
        return True
    return type(error).__name__ in ("OutOfMemoryError", "MemoryError") or _NO_MEMORY in str(error)


def free_caches(runner: Runner) -> None:
    """After a step that lacked memory, with nothing in flight: give back what no tensor holds."""
    if isinstance(runner, Resettable):
        runner.reset()
    return_memory(collect=True)


def return_memory(*, collect: bool = False) -> None:
    """To a GPU, what no tensor uses. An error of a step may be left, whose frames have tensors: collect them
    on a CPU too."""
    import torch

    on_gpu: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if collect or on_gpu:
        gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()


class ClosedRunner:
    """In the place of one whose memory was given back."""

    def step(self, plan: StepPlan) -> Handle:
        raise EngineDeadError("the engine is closed")

    def close(self) -> None:
        """It is."""
