"""The lane set of a step: arrays that stay the same objects for as long as nobody joins or leaves.

Legend: L lanes, D decode lanes (they come first).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from slipstream.contracts.step import empty_i32
from slipstream.scheduler.columns import DECODE, Array, RowColumns
from slipstream.scheduler.config import SchedulerConfig

FOREVER = 1 << 30
Grants = tuple[Array, Array, Array]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A prefill lane: KV positions end - size .. end - 1 of the row; last: it ends in a sampled token."""

    row: int
    size: int
    end: int
    last: bool


@dataclass(frozen=True, slots=True)
class Lanes:
    """row, generation, query_len: int32 [L]; samples: bool [L]; key: int64 [L]. index: row as int64, which
    NumPy looks up three times as fast; decode_row: a view of that, [D]."""

    row: Array
    index: Array
    generation: Array
    query_len: Array
    samples: Array
    key: Array
    decode_row: Array
    chunks: tuple[Chunk, ...]

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True, slots=True)
class Flight:
    """A step between schedule() and apply(). departures: as counted when it was planned. share: drafts that
    there is room for, a lane; drafts: that one lane verifies at most."""

    step: int
    lanes: Lanes
    departures: int
    share: int
    drafts: int


def make_lanes(columns: RowColumns, decode_row: Array, chunks: list[Chunk]) -> Lanes:
    """decode_row: [D]. Bounds are settled: those of chunks after the first step of the set."""
    decodes = len(decode_row)
    index = np.empty(decodes + len(chunks), np.int64)
    index[:decodes] = decode_row
    query_len = np.ones(len(index), np.int32)
    samples = np.ones(len(index), np.bool_)
    for lane, chunk in enumerate(chunks, decodes):
        index[lane], query_len[lane], samples[lane] = chunk.row, chunk.size, chunk.last
    generation, key, row = columns.generation[index], columns.key[index], index.astype(np.int32)
    return Lanes(row, index, generation, query_len, samples, key, index[:decodes], tuple(chunks))


def take_chunk(columns: RowColumns, row: int, budget: int) -> Chunk:
    """The row's next prefill lane. Of several only the last is cut short, so those that end come first."""
    start, target = int(columns.computed_bound[row]), int(columns.target[row])
    end = min(target, start + budget)
    columns.computed_bound[row] = end
    if end == target:
        columns.phase[row] = DECODE
    return Chunk(row, end - start, end, end == target)


def half_blocks(columns: RowColumns, chunks: Iterable[Chunk], block_size: int) -> Array:
    """int32, StepPlan's."""
    found = [NO_ROWS]
    for chunk in chunks:
        begin = max(chunk.end // block_size, -(-(chunk.end - chunk.size) // block_size))
        stop = columns.granted[chunk.row] if chunk.last else -(-chunk.end // block_size)
        found.append(columns.blocks[chunk.row, begin:stop])
    return np.concatenate(found)


def affordable_drafts(drafts: int, decodes: int, most_tokens: int, prompts_wait: bool) -> int:
    """So many drafts a lane that the step's tokens hold them. Where prompts wait they get half of what is
    left of it."""
    if not drafts or not decodes:
        return drafts
    spare = most_tokens - decodes
    return min(drafts, (spare // 2 if prompts_wait else spare) // decodes)


NO_ROWS = empty_i32()
NO_GRANTS: Grants = (NO_ROWS, NO_ROWS, NO_ROWS)
NO_KEYS = np.empty(0, np.int64)
EMPTY_LANES = Lanes(NO_ROWS, NO_KEYS, NO_ROWS, NO_ROWS, np.empty(0, np.bool_), NO_KEYS, NO_KEYS, ())


def are_ending(columns: RowColumns, rows: Array, gains: Iterable[float]) -> bool:
    """Whether the steps in flight are likely to end every row. gains: tokens that each is expected to bring,
    asked for only where they could. Bounds are settled."""
    max_len = columns.max_len[rows]
    if (columns.computed_bound[rows] + 1 < max_len).any():
        return False
    return bool((columns.length[rows] + sum(gains) >= max_len).all())


def give_back(columns: RowColumns, rows: Array, width: int, counts: Array, owned: Array | None) -> bool:
    """Bounds assumed that each of a step's decode rows gains `width` tokens; give back those that it did not.
    owned: bool [L], or None for all. Returns whether there were any."""
    unused = width - counts if owned is None else (width - counts) * owned[: len(counts)]
    columns.computed_bound[rows] -= unused
    return bool(unused.any())


def length_bound(columns: RowColumns, lanes: Lanes, width: int) -> int:
    """Most KV positions of any lane after the next step, in which decode lanes gain up to `width`. Bounds are
    settled."""
    bound = max((chunk.end for chunk in lanes.chunks), default=0)
    if len(lanes.decode_row):
        after = columns.computed_bound[lanes.decode_row] + width
        bound = max(bound, int(np.minimum(after, columns.max_len[lanes.decode_row]).max()))
    return bound


def blocks_short(columns: RowColumns, rows: Array, config: SchedulerConfig, width: int, ahead: int) -> Array:
    """int32: blocks that each decode row lacks for a step of up to `width` tokens and `ahead` more, never
    past its max_len."""
    max_len = columns.max_len[rows]
    upto = np.minimum(columns.computed_bound[rows] + (width + config.lookahead), max_len)
    wanted = -(-upto // config.block_size)
    if ahead:
        wanted = np.minimum(wanted + ahead, -(-max_len // config.block_size))
    short: Array = np.maximum(wanted - columns.granted[rows], 0)
    return short


def quiet_tokens(columns: RowColumns, rows: Array, config: SchedulerConfig) -> tuple[int, int]:
    """By how many tokens the bounds of these decode rows may move with the blocks there are, and by how many
    until the first of them stands at its limit."""
    if not len(rows):
        return 0, 0
    computed, max_len = columns.computed_bound[rows], columns.max_len[rows]
    room = columns.granted[rows] * config.block_size
    room = np.where(room < max_len, room - config.lookahead - computed, FOREVER)
    return int(room.min()), int((max_len - 1 - computed).min())
