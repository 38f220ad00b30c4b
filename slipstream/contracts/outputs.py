"""What the engine sends the front end after a step: arrays over the requests that have news."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from slipstream.contracts.step import PromptLogprobs, TokenLogprobs

Array = np.ndarray


@dataclass(slots=True)
class EngineStats:
    """The scheduler's and loop's state at the end of a step. Counts are rows, blocks and requests; times
    microseconds."""

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


@dataclass(slots=True)
class EngineOutputs:
    """News of n requests. keys: int64 [n]; num_tokens: int32 [n]; tokens: int32, those of every request one
    after the other; finish: int32 [n], Finish codes. logprobs rows follow keys ([n, Q, 1 + K]) where any of
    them asked.

    prompt_logprobs: (key, piece) pairs. num_cached: (key, tokens) pairs, once a request, when it is first
    admitted. errors: (key, text) pairs for requests that failed alone; their finish is ERROR.
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
