"""Messages between an engine and the worker that computes for it. A plan travels as it differs from the one
before; a result without what its plan has already.

Both sides keep the arrays of the last lanes: where the scheduler's are the same objects, they are not sent,
and the runner gets the same objects too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from slipstream.config.args import EngineArgs
from slipstream.config.plan import EnginePlan
from slipstream.contracts.step import PromptLogprobs, StepPlan, StepResult, TokenLogprobs, empty_i32
from slipstream.engine import wire
from slipstream.runner.memory import MemoryPlan

START, PLAN, FREE, CLOSE = 1, 2, 3, 4  # to a worker: WorkerStart, a plan, nothing, nothing
READY, DONE, FAILED = 5, 6, 7  # from it: WorkerReady, a result, wire.Failure


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """What a worker is told first: the flags, from which it makes the plan, or the plan and where memory went
    if there was a worker before it. log_level: None is silent."""

    args: EngineArgs | None
    plan: EnginePlan | None
    memory: MemoryPlan | None
    log_level: str | None
    log_format: str


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """What an engine must know of a runner that is built."""

    plan: EnginePlan
    memory: MemoryPlan
    linear_name: str
    linear_reason: str


class _Plan(msgspec.Struct, array_like=True, gc=False):
    """same_lanes: the lane arrays are those of the plan before. whole: None where nothing else has changed
    but the numbers here."""

    step: int
    len_bound: int
    lanes_changed: bool
    draft_tokens: int
    draft_room: int
    same_lanes: bool
    whole: StepPlan | None


class _Result(msgspec.Struct, array_like=True, gc=False):
    """Times: time.perf_counter() seconds, which is one clock for all processes on Linux. lines: int32 [2 + Q,
    L], num_tokens, finish and tokens; [3 + Q, L] where drafted comes before the tokens: one array costs a
    third of four."""

    step: int
    launched: float
    begin: float
    end: float
    has_drafted: bool
    lines: bytes
    logprobs: TokenLogprobs | None
    prompt_logprobs: list[PromptLogprobs]


class PlanWriter:
    """Of one worker: it knows what that one has seen."""

    def __init__(self) -> None:
        self._row = self._generation = self._query_len = self._samples = empty_i32()

    def write(self, plan: StepPlan) -> bytes:
        same = (
            plan.lane_row is self._row
            and plan.lane_generation is self._generation
            and plan.lane_query_len is self._query_len
            and plan.lane_samples is self._samples
        )
        news = plan.admissions or len(plan.released) or len(plan.grant_row) or len(plan.legal_row)
        whole = None
        if not same:
            self._row, self._generation = plan.lane_row, plan.lane_generation
            self._query_len, self._samples, whole = plan.lane_query_len, plan.lane_samples, plan
        elif news:
            nothing = empty_i32()
            whole = replace(
                plan, lane_row=nothing, lane_generation=nothing, lane_query_len=nothing, lane_samples=nothing
            )
        changed = plan.lanes_changed
        return wire.encode(
            _Plan(plan.step, plan.len_bound, changed, plan.draft_tokens, plan.draft_room, same, whole)
        )


class PlanReader:
    """The other side of a PlanWriter."""

    def __init__(self) -> None:
        self._decode = wire.decoder(_Plan, writable=True)
        self._last: StepPlan | None = None

    def read(self, body: bytes) -> StepPlan:
        told: _Plan = self._decode(body)
        plan, last = told.whole, self._last
        if told.same_lanes:
            assert last is not None, "the first plan has lanes"
            lanes = last.lane_row, last.lane_generation, last.lane_query_len, last.lane_samples
            if plan is None:
                plan = StepPlan(
                    told.step, *lanes, last.num_decode_lanes, told.lanes_changed, told.len_bound,
                    draft_tokens=told.draft_tokens, draft_room=told.draft_room,
                )  # fmt: skip
            else:
                plan.lane_row, plan.lane_generation, plan.lane_query_len, plan.lane_samples = lanes
        assert plan is not None
        self._last = plan
        return plan


@dataclass(slots=True)
class WorkerTime:
    """When a step ran on the worker's device, and when the worker had launched it: time.perf_counter()
    seconds, 0 until the result is there."""

    begin: float = 0.0
    end: float = 0.0
    launched: float = 0.0


def write_result(result: StepResult, launched: float, begin: float, end: float) -> bytes:
    drafted = () if result.drafted is None else (result.drafted,)
    lines = np.concatenate((result.num_tokens, result.finish, *drafted, result.tokens.T.reshape(-1)))
    return wire.encode(
        _Result(
            result.step, launched, begin, end, bool(drafted), lines.tobytes(), result.logprobs,
            result.prompt_logprobs,
        )
    )


_decode_result: Any = wire.decoder(_Result)


def read_result(body: bytes, plan: StepPlan, event: WorkerTime) -> StepResult:
    """The result of this plan; its times go into event."""
    told: _Result = _decode_result(body)
    assert told.step == plan.step, f"result of step {told.step}, expected {plan.step}"
    event.begin, event.end, event.launched = told.begin, told.end, told.launched
    lines = np.frombuffer(told.lines, np.int32).reshape(-1, len(plan.lane_row))
    first = 2 + told.has_drafted
    return StepResult(
        told.step, plan.lane_row, plan.lane_generation, lines[0], lines[first:].T, lines[1], told.logprobs,
        told.prompt_logprobs, lines[2] if told.has_drafted else None,
    )
