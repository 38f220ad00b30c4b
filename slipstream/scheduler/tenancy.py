"""Which request owns which row and which blocks. Whatever takes or returns either goes through here."""

from __future__ import annotations

import numpy as np

from slipstream.contracts.step import Admission
from slipstream.scheduler.blocks import BlockPool
from slipstream.scheduler.columns import FREE, PREFILL, Array, RowColumns
from slipstream.scheduler.config import SchedulerConfig
from slipstream.scheduler.prefix import NoPrefixCache, PrefixCache, Prefixes
from slipstream.scheduler.queue import Entry


class Tenancy:
    """released: rows whose owner left since the last plan. departures: counts owners that left, so that a
    step in flight can tell at once that all of its lanes are still owned as they were."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.columns = RowColumns(config)
        self.pool = BlockPool(config.num_blocks)
        self._prefixes: Prefixes = (
            PrefixCache(self.pool, config.block_size) if config.enable_prefix_caching else NoPrefixCache()
        )
        self._config = config
        self.entry_of: list[Entry | None] = [None] * config.max_num_seqs
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self.released: list[int] = []
        self.departures = 0

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def num_owned_rows(self) -> int:
        return len(self.entry_of) - len(self._free_rows)

    def owners(self) -> list[Entry]:
        return [entry for entry in self.entry_of if entry is not None]

    def owner(self, row: int) -> Entry:
        entry = self.entry_of[row]
        assert entry is not None, f"row {row} has no owner"
        return entry

    def admit(self, entry: Entry, reserve: int) -> Admission | None:
        """Give the entry a row, and blocks for its tokens and the lookahead; None where that would leave
        fewer than `reserve` free blocks. A row must be free."""
        cached = self._prefixes.lookup(entry)
        reach = min(len(entry.tokens) + self._config.lookahead, entry.request.max_len)
        fresh = self._config.blocks_for(reach) - len(cached)
        if fresh + reserve > self.pool.num_free - self.pool.count_idle(cached):
            return None
        self.pool.share(cached)
        blocks = np.concatenate((np.array(cached, np.int32), self.pool.take(fresh)))
        row = self._free_rows.pop()
        self.entry_of[row] = entry
        entry.row = row
        num_cached = len(cached) * self._config.block_size
        columns = self.columns
        columns.phase[row] = PREFILL
        columns.key[row] = entry.request.key
        columns.length[row] = columns.target[row] = len(entry.tokens)
        columns.max_len[row] = entry.request.max_len
        columns.computed_bound[row] = num_cached
        columns.registered[row] = len(cached)
        columns.granted[row] = len(blocks)
        columns.drafted[row] = columns.accepted[row] = 0
        columns.constrained[row], columns.held[row] = bool(entry.request.grammar), False
        columns.blocks[row, : len(blocks)] = blocks
        columns.tokens[row, : len(entry.tokens)] = entry.tokens
        return Admission(row, int(columns.generation[row]), entry.request, entry.tokens, num_cached, blocks)

    def grant(self, rows: Array, counts: Array) -> tuple[Array, Array, Array]:
        """counts[i] more blocks for rows[i]: int32 (row, index, block) of every new block-table cell."""
        columns = self.columns
        row = np.repeat(rows, counts)
        before = np.cumsum(counts) - counts
        index = np.repeat(columns.granted[rows] - before, counts) + np.arange(len(row))
        block = self.pool.take(len(row))
        columns.blocks[row, index] = block
        columns.granted[rows] += counts
        return row.astype(np.int32), index.astype(np.int32), block

    def computed(self, row: int, end: int) -> None:
        """A prefill's result came: KV positions below `end` hold known tokens."""
        self._register(row, end // self._config.block_size)

    def leave(self, row: int, *, keep: bool = True) -> Entry:
        """The owner leaves; row and blocks may be reused at once. keep: others may use its full blocks."""
        columns, entry = self.columns, self.owner(row)
        blocks = columns.blocks[row, : columns.granted[row]]
        if not keep:
            self.pool.forget(blocks)
        elif columns.length[row] > columns.target[row]:
            # Every delivered token but the last has been computed: the next was sampled from it.
            self._register(row, (int(columns.length[row]) - 1) // self._config.block_size)
        self.pool.give_back(blocks)
        columns.phase[row] = FREE
        columns.generation[row] += 1
        columns.granted[row] = 0
        self.entry_of[row] = None
        entry.row = -1
        self._free_rows.append(row)
        self.released.append(row)
        self.departures += 1
        return entry

    def forget(self) -> None:
        """Nobody owns a row, and the device knows neither rows nor blocks any more."""
        self.released.clear()
        self.pool.forget_all()

    def take_released(self) -> Array:
        """int32, the rows to name in the next plan."""
        rows = np.array(self.released, np.int32)
        self.released.clear()
        return rows

    def _register(self, row: int, count: int) -> None:
        columns = self.columns
        first = int(columns.registered[row])
        if count > first:
            self._prefixes.register(self.owner(row), columns.tokens[row], columns.blocks[row], first, count)
            columns.registered[row] = count

    def check(self) -> None:
        """Raises AssertionError where a row or a block is shared, leaked or counted wrongly."""
        columns = self.columns
        owned = [row for row, entry in enumerate(self.entry_of) if entry is not None]
        rows = list(range(len(self.entry_of)))
        assert sorted([*owned, *self._free_rows]) == rows, "a row leaked or is free twice"
        assert np.flatnonzero(columns.phase != FREE).tolist() == owned
        holders = np.zeros(self._config.num_blocks, np.int32)
        for row in owned:
            entry, blocks = self.owner(row), columns.blocks[row, : columns.granted[row]]
            assert entry.row == row and entry.request.key == columns.key[row] and not entry.waiting
            assert len(set(blocks.tolist())) == len(blocks), f"row {row} holds a block twice"
            assert columns.granted[row] <= self._config.blocks_for(int(columns.max_len[row]))
            assert columns.target[row] <= columns.length[row] <= columns.max_len[row]
            holders[blocks] += 1
        self.pool.check(holders)
