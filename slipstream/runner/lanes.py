"""The lanes of a step as the host knows them: counts and places, rebuilt only when the lane set changes.

Legend: L lanes, N sampling lanes, K top logprobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.contracts.step import StepPlan
from slipstream.rows.table import RowTable
from slipstream.runner.mirror import RowMirror

Array = np.ndarray

LOGPROBS = "logprobs"


@dataclass(frozen=True, slots=True)
class PromptScore:
    """A prefill lane whose prompt tokens are to be scored: targets are positions first .. first + count - 1,
    each predicted by the hidden state of the token before it, found at `token` and on in the step's
    tokens."""

    lane: int
    row: int
    generation: int
    first: int
    count: int
    token: int
    num_logprobs: int


@dataclass(frozen=True, slots=True)
class LaneSet:
    """counts: feature name -> sampling lanes that use it (features nobody uses are absent). logprob_lane: the
    lanes that sample and asked for logprobs."""

    lane_row: Array
    lane_generation: Array
    query_len_L: Array
    num_tokens: int
    num_decode_lanes: int
    sample_lane_N: Array
    counts: dict[str, int]
    num_logprobs: int
    logprob_lane: Array

    @property
    def num_lanes(self) -> int:
        return len(self.lane_row)


def stage_lanes(plan: StepPlan, table: RowTable, mirror: RowMirror, features: Sequence[str]) -> LaneSet:
    """Write the plan's lanes into the table's lane arrays, and keep what the host needs of them."""
    sample_lane_N = np.flatnonzero(plan.lane_samples).astype(np.int32)
    row_N = plan.lane_row[sample_lane_N]
    table.set_lanes("lane_to_row", plan.lane_row)
    table.set_lanes("lane_query_len", plan.lane_query_len)
    table.set_lanes("sample_to_lane", sample_lane_N)
    counts: dict[str, int] = {}
    bits_N = mirror.features[row_N]
    used = int(np.bitwise_or.reduce(bits_N)) if len(bits_N) else 0
    places = {name: np.flatnonzero(bits_N >> i & 1) for i, name in enumerate(features) if used >> i & 1}
    num_logprobs = int(mirror.logprobs[row_N].max(initial=-1))
    if num_logprobs >= 0:
        places[LOGPROBS] = np.flatnonzero(mirror.logprobs[row_N] >= 0)
    for name, place in places.items():
        table.set_lanes(f"feature_{name}", place.astype(np.int32))
        counts[name] = len(place)
    return LaneSet(
        plan.lane_row,
        plan.lane_generation,
        plan.lane_query_len,
        int(plan.lane_query_len.sum()),
        plan.num_decode_lanes,
        sample_lane_N,
        counts,
        num_logprobs,
        sample_lane_N[places.get(LOGPROBS, slice(0))],
    )


def prompt_scores(lanes: LaneSet, mirror: RowMirror, bound_L: Array) -> list[PromptScore]:
    """The prefill lanes of this step that owe prompt logprobs. bound_L: KV length after the step, exact for
    them."""
    first = lanes.num_decode_lanes
    wanted = mirror.prompt_logprobs[lanes.lane_row[first:]]
    if not (wanted >= 0).any():
        return []
    token_L = np.concatenate(([0], np.cumsum(lanes.query_len_L)))
    scores = []
    for lane in range(first, lanes.num_lanes):
        row, end = int(lanes.lane_row[lane]), int(bound_L[lane])
        start = end - int(lanes.query_len_L[lane])
        count = min(end, int(mirror.prompt_len[row]) - 1) - start
        if mirror.prompt_logprobs[row] >= 0 and count > 0:
            scores.append(
                PromptScore(
                    lane,
                    row,
                    int(lanes.lane_generation[lane]),
                    start + 1,
                    count,
                    int(token_L[lane]),
                    int(mirror.prompt_logprobs[row]),
                )
            )
    return scores
