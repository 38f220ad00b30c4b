"""The lanes of a step as the host knows them: counts and places, rebuilt only when the lane set changes.

An eager step has the plan's very lanes, and lists of those that use a feature. A bucketed step has one of a
few shapes that a graph may hold: its lanes are filled up with the padding row, and each of them samples.

Legend: L lanes, N sampling lanes, K top logprobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.contracts.step import StepPlan
from slipstream.rows.table import RowTable
from slipstream.runner.mirror import RowMirror
from slipstream.runner.shapes import Shape, Shapes

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
    """index_L: lane_row as int64, for NumPy's sake. num_logprobs: the most that any lane asked for, -1 for
    none. scored_lane: the lanes to which the lines of the step's logprobs belong, one for each token they
    sample. drafts: that a lane verifies at most."""

    lane_row: Array
    index_L: Array
    lane_generation: Array
    query_len_L: Array
    num_tokens: int
    num_decode_lanes: int
    num_logprobs: int
    scored_lane: Array
    drafts: int

    @property
    def num_lanes(self) -> int:
        return len(self.lane_row)


@dataclass(frozen=True, slots=True)
class ExactLanes(LaneSet):
    """counts: feature name -> sampling lanes that use it (features nobody uses are absent)."""

    num_samples: int
    counts: dict[str, int]


@dataclass(frozen=True, slots=True)
class BucketLanes(LaneSet):
    """shape: what the step is filled up to."""

    shape: Shape


def stage_exact(plan: StepPlan, table: RowTable, mirror: RowMirror, features: Sequence[str]) -> ExactLanes:
    """Write the plan's lanes into the table's lane arrays, and keep what the host needs of them."""
    sample_lane_N = np.flatnonzero(plan.lane_samples).astype(np.int32)
    row_N = plan.lane_row[sample_lane_N]
    table.set_lanes("lane_to_row", plan.lane_row)
    table.set_lanes("lane_query_len", plan.lane_query_len)
    table.set_lanes("sample_to_lane", sample_lane_N)
    counts: dict[str, int] = {}
    bits_N = mirror.features[row_N]
    places = {name: np.flatnonzero(bits_N >> i & 1) for i, name in _used(bits_N, features)}
    num_logprobs = int(mirror.logprobs[row_N].max(initial=-1))
    if num_logprobs >= 0:
        places[LOGPROBS] = np.flatnonzero(mirror.logprobs[row_N] >= 0)
    for name, place in places.items():
        table.set_lanes(f"feature_{name}", place.astype(np.int32))
        counts[name] = len(place)
    drafts, room = _draft_limits(plan, mirror)
    table.set_lanes("draft_limits", np.array((drafts, room), np.int32))
    return ExactLanes(
        plan.lane_row,
        plan.lane_row.astype(np.int64),
        plan.lane_generation,
        plan.lane_query_len,
        int(plan.lane_query_len.sum()),
        plan.num_decode_lanes,
        num_logprobs,
        sample_lane_N[places.get(LOGPROBS, slice(0))],
        drafts,
        len(sample_lane_N),
        counts,
    )


def stage_bucket(
    plan: StepPlan, table: RowTable, mirror: RowMirror, features: Sequence[str], shapes: Shapes
) -> BucketLanes:
    """The same for a bucketed step. Lanes beyond the plan's have one token in a step of decode lanes alone,
    none in others."""
    lanes, tokens = len(plan.lane_row), int(plan.lane_query_len.sum())
    index_L = plan.lane_row.astype(np.int64)
    decode = plan.num_decode_lanes == lanes
    drafts, room = _draft_limits(plan, mirror)
    used = [name for _, name in _used(mirror.features[index_L], features)]
    num_logprobs = int(mirror.logprobs[index_L].max(initial=-1))
    shape = shapes.find(
        lanes, tokens, decode=decode, features=used, num_logprobs=num_logprobs, drafts=drafts, room=room
    )
    row_L = np.full(shape.lanes, table.padding_row, np.int32)
    query_len_L = np.full(shape.lanes, int(decode), np.int32)
    row_L[:lanes], query_len_L[:lanes] = plan.lane_row, plan.lane_query_len
    table.set_lanes("lane_to_row", row_L)
    table.set_lanes("lane_query_len", query_len_L)
    drafts = min(drafts, shape.drafts)
    if decode:
        room = max(room, shape.samples - shape.lanes)  # it is computed anyway
    table.set_lanes("draft_limits", np.array((drafts, room), np.int32))
    return BucketLanes(
        plan.lane_row,
        index_L,
        plan.lane_generation,
        plan.lane_query_len,
        tokens,
        plan.num_decode_lanes,
        num_logprobs,
        np.arange(lanes),
        drafts,
        shape,
    )


def _draft_limits(plan: StepPlan, mirror: RowMirror) -> tuple[int, int]:
    """Drafts of a lane and of all together. A step that scores prompts has none: where their tokens stand
    would depend on how many there are."""
    if not plan.draft_tokens:
        return 0, 0
    scores = (mirror.prompt_logprobs[plan.lane_row[plan.num_decode_lanes :]] >= 0).any()
    return (0, 0) if scores else (plan.draft_tokens, plan.draft_room)


def _used(bits_N: Array, features: Sequence[str]) -> list[tuple[int, str]]:
    """Number and name of the features that some lane uses."""
    used = int(np.bitwise_or.reduce(bits_N)) if len(bits_N) else 0
    return [(i, name) for i, name in enumerate(features) if used >> i & 1]


def prompt_scores(lanes: LaneSet, mirror: RowMirror, bound_L: Array) -> list[PromptScore]:
    """The prefill lanes of this step that owe prompt logprobs. bound_L: KV length after the step, exact for
    them."""
    first = lanes.num_decode_lanes
    if first == lanes.num_lanes:
        return []
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
