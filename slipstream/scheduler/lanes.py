"""The lane set of a step: arrays that stay the same objects for as long as nobody joins or leaves.

Legend: L lanes, D decode lanes (they come first).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slipstream.contracts.step import empty_i32
from slipstream.scheduler.columns import Array, RowColumns
from slipstream.scheduler.config import SchedulerConfig

FOREVER = 1 << 30


@dataclass(frozen=True, slots=True)
class Chunk:
    """A prefill lane: KV positions end - size .. end - 1 of the row; last: it ends in a sampled token."""

    row: int
    size: int
    end: int
    last: bool


@dataclass(frozen=True, slots=True)
class Lanes:
    """row, generation, query_len: int32 [L]; samples: bool [L]; key: int64 [L]; decode_row: a view of row,
    [D]. length_bound: most KV positions of any lane after the first step of the set."""

    row: Array
    generation: Array
    query_len: Array
    samples: Array
    key: Array
    decode_row: Array
    chunks: tuple[Chunk, ...]
    length_bound: int

    def __len__(self) -> int:
        return len(self.row)


def make_lanes(columns: RowColumns, decode_row: Array, chunks: list[Chunk], tokens_per_step: int) -> Lanes:
    """decode_row: [D]. Bounds are settled: those of decode rows before this step, those of chunks after
    it."""
    decodes = len(decode_row)
    row = np.empty(decodes + len(chunks), np.int32)
    row[:decodes] = decode_row
    query_len = np.full(len(row), tokens_per_step, np.int32)
    samples = np.ones(len(row), np.bool_)
    bound = int(columns.computed_bound[decode_row].max(initial=0)) + tokens_per_step if decodes else 0
    for lane, chunk in enumerate(chunks, decodes):
        row[lane], query_len[lane], samples[lane] = chunk.row, chunk.size, chunk.last
        bound = max(bound, chunk.end)
    generation, key = columns.generation[row], columns.key[row]
    return Lanes(row, generation, query_len, samples, key, row[:decodes], tuple(chunks), bound)


NO_ROWS = empty_i32()
NO_KEYS = np.empty(0, np.int64)
EMPTY_LANES = Lanes(NO_ROWS, NO_ROWS, NO_ROWS, np.empty(0, np.bool_), NO_KEYS, NO_ROWS, (), 0)


def blocks_short(columns: RowColumns, rows: Array, config: SchedulerConfig, ahead: int) -> Array:
    """int32: blocks that each decode row lacks for its next step and `ahead` more, never past its max_len."""
    max_len = columns.max_len[rows]
    reach = config.tokens_per_step + config.lookahead
    upto = np.minimum(columns.computed_bound[rows] + reach, max_len)
    wanted = -(-upto // config.block_size)
    if ahead:
        wanted = np.minimum(wanted + ahead, -(-max_len // config.block_size))
    short: Array = np.maximum(wanted - columns.granted[rows], 0)
    return short


def quiet_steps(columns: RowColumns, rows: Array, config: SchedulerConfig) -> int:
    """For how many steps these decode rows need no block and none reaches its bound."""
    if not len(rows):
        return 0
    computed, max_len = columns.computed_bound[rows], columns.max_len[rows]
    room = columns.granted[rows] * config.block_size
    room = np.where(room < max_len, room - config.lookahead - computed, FOREVER)
    left = int((max_len - 1 - computed).min())
    return min(int(room.min()) // config.tokens_per_step, -(-left // config.tokens_per_step))
