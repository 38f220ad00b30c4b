"""What a front end needs of an engine, whether it runs in this process or behind a socket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from slipstream.contracts.limits import ModelLimits
from slipstream.contracts.outputs import EngineOutputs
from slipstream.contracts.request import EngineRequest


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts of a running engine. end_token_ids: the model's own end tokens; plan: EnginePlan.choices as plain
    data (decision -> {"value", "reason", "flag"}), with what memory came to; vllm_0_31: what vLLM 0.31.0
    would have chosen, in the same form. worker_pid: of the process that computes at first."""

    limits: ModelLimits
    end_token_ids: tuple[int, ...]
    plan: dict[str, dict[str, Any]] = field(default_factory=dict)
    vllm_0_31: dict[str, dict[str, Any]] = field(default_factory=dict)
    worker_pid: int = 0


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """ready: an engine is up, and who computes for it; replacing: what starts anew, None where
    nothing does. restarts: engines that took over from one that was
    lost; worker_restarts: workers of this engine that did. progress: messages taken, steps made and looks at
    a worker by this engine; quiet: seconds since that moved while requests were live, None while no engine is
    up. reason: why there is no engine and will be none, else empty."""

    ready: bool
    restarts: int = 0
    worker_restarts: int = 0
    progress: int = 0
    quiet: float | None = 0.0
    reason: str = ""
    replacing: Literal["engine", "worker"] | None = None


class EngineClient(Protocol):
    """add and abort never wait for a step. Outputs come in the order the engine made them."""

    info: EngineInfo

    def add(self, requests: Sequence[EngineRequest]) -> None: ...

    def abort(self, keys: Sequence[int]) -> None:
        """Ends requests without a further output; unknown and finished keys are ignored."""
        ...

    def receive(self, timeout: float | None = None) -> EngineOutputs | None:
        """The next outputs; None after timeout seconds, or at once where the engine (in this process) is
        idle. Raises EngineDeadError when the engine is gone."""
        ...

    def close(self) -> None: ...
