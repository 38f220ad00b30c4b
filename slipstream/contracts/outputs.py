"""What the engine sends the front end after a step: arrays over the requests that have news."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np

from slipstream.contracts.step import PromptLogprobs, TokenLogprobs

Array = np.ndarray
# Of EngineSnapshot.steps: counts, then times.
STEP_COLUMNS = (
    "step", "lanes", "tokens", "plan_begin", "launch_begin", "launch_end", "device_begin", "device_end",
    "apply_begin", "apply_end",
)  # fmt: skip


# Travels with every step's outputs: as an array without names it costs a third of a dataclass.
class EngineStats(msgspec.Struct, array_like=True, gc=False):
    """The scheduler's and loop's state at the end of a step. Counts are rows, blocks and requests; times
    microseconds, but totals since the start in seconds.

    host_us: of this step; host_seconds: of all. device_idle_seconds: between steps, while there was work;
    steps_starved: steps that were launched with nothing left on the device, though there was work.
    generation_tokens: delivered. drafts: lanes that verified drafts; accepted_per_position[i]: drafts whose
    token i was taken; draft_limit: drafts that a lane of the last step planned verifies at most. worker_pid:
    the process that computes, 0 while another one starts; worker_restarts: of those that took over.
    """

    num_running: int = 0
    num_waiting: int = 0
    free_blocks: int = 0
    num_blocks: int = 0
    steps: int = 0
    steps_in_flight: int = 0
    preemptions: int = 0
    prefix_hit_tokens: int = 0
    prefix_query_tokens: int = 0
    host_us: float = 0.0
    num_rows: int = 0
    generation_tokens: int = 0
    computed_tokens: int = 0
    steps_starved: int = 0
    host_seconds: float = 0.0
    device_busy_seconds: float = 0.0
    device_idle_seconds: float = 0.0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()
    draft_limit: int = 0
    worker_pid: int = 0
    worker_restarts: int = 0


@dataclass(slots=True)
class EngineSnapshot:
    """The row table and the last steps, made only when somebody looks.

    [R] arrays over rows: phase int8 (0 free, 1 prefill, 2 decode), key int64 (the owner), and int32 length
    (tokens known), computed (KV positions), max_len, num_blocks, drafted and accepted (tokens since the owner
    came). steps: float64 [S, STEP_COLUMNS], the oldest first; its times are seconds before the snapshot, so
    at most 0.
    """

    phase: Array
    key: Array
    length: Array
    computed: Array
    max_len: Array
    num_blocks: Array
    drafted: Array
    accepted: Array
    steps: Array


@dataclass(slots=True)
class EngineOutputs:
    """News of n requests. keys: int64 [n]; num_tokens: int32 [n]; tokens: int32, those of every request one
    after the other; finish: int32 [n], Finish codes. logprobs rows follow keys ([n, Q, 1 + K]) where any of
    them asked.

    prompt_logprobs: (key, piece) pairs. num_cached: (key, tokens) pairs, once a request, when it is first
    admitted, and admitted: (key, time.monotonic()) of that. errors: (key, text) pairs for requests that
    failed alone; their finish is ERROR. snapshot: the answer to somebody who looked, without other news.
    drafted: int32 [n], drafts that were verified for the request; None of a step without drafts.
    """

    keys: Array
    num_tokens: Array
    tokens: Array
    finish: Array
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[tuple[int, PromptLogprobs]] = field(default_factory=list)
    num_cached: list[tuple[int, int]] = field(default_factory=list)
    errors: list[tuple[int, str]] = field(default_factory=list)
    stats: EngineStats = field(default_factory=EngineStats)
    admitted: list[tuple[int, float]] = field(default_factory=list)
    snapshot: EngineSnapshot | None = None
    drafted: Array | None = None
