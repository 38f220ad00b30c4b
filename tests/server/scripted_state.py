"""An engine without a model that shows a busy row table: requests come, prefill, decode, draft, leave."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from scripted import ScriptedEngine

from slipstream.contracts.outputs import EngineSnapshot, EngineStats
from slipstream.engine.look import Look

STEP_SECONDS = 0.0011
DRAFTS = 3


@dataclass
class BusyEngine(ScriptedEngine):
    """rows: of the table. load: share of them that are owned. drafting: share of decoding rows that draft.
    still: nothing changes any more."""

    rows: int = 8
    load: float = 0.8
    drafting: float = 0.3
    looks: int = 0
    still: bool = False
    steps_done: int = 0
    counts: EngineStats = field(default_factory=EngineStats)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(7)
        zeros = lambda: np.zeros(self.rows, np.int32)  # noqa: E731 (seven columns alike)
        self.table = EngineSnapshot(
            np.zeros(self.rows, np.int8), np.arange(self.rows), zeros(), zeros(), zeros(), zeros(), zeros(),
            zeros(), np.zeros((0, 10)),
        )  # fmt: skip
        self._prompt = zeros()
        self._drafts = np.zeros(self.rows, np.bool_)
        self._names = [""] * self.rows
        self._since = np.zeros(self.rows)
        self._numbers = 0
        self.counts.num_rows, self.counts.num_blocks = self.rows, 40 * self.rows
        self.counts.accepted_per_position = (0,) * DRAFTS
        for _ in range(60):
            self._advance(20)

    @property
    def stats(self) -> EngineStats:
        return self.counts

    def _advance(self, steps: int) -> None:
        table, random, now = self.table, self._random, time.monotonic()
        for row in range(self.rows):
            if table.phase[row] == 0 and random.random() < 0.06 + self.load / 2:
                self._numbers += 1
                self._names[row] = f"chatcmpl-{self._numbers:08x}"
                self._prompt[row] = table.length[row] = random.integers(40, 1500)
                table.max_len[row] = table.length[row] + random.integers(60, 900)
                table.phase[row], table.computed[row], self._since[row] = 1, 0, now
                table.drafted[row] = table.accepted[row] = 0
                self._drafts[row] = random.random() < self.drafting
            elif table.phase[row] == 1:
                table.computed[row] = min(table.length[row], table.computed[row] + random.integers(200, 900))
                table.phase[row] = 2 if table.computed[row] == table.length[row] else 1
            elif table.phase[row] == 2:
                self._decode(row, steps)
            table.num_blocks[row] = -(-table.computed[row] // 16) + 1
        owned = table.phase > 0
        self.counts.num_running = int(owned.sum())
        self.counts.num_waiting = int(random.integers(0, 4) if self.load > 0.7 else 0)
        self.counts.free_blocks = max(0, self.counts.num_blocks - int(table.num_blocks[owned].sum()) // 3)
        self.counts.steps += steps
        self.counts.steps_in_flight = 1
        self.counts.device_busy_seconds += steps * STEP_SECONDS
        self.counts.device_idle_seconds += steps * STEP_SECONDS * 0.004
        self.counts.computed_tokens += steps * int((table.phase == 2).sum()) + 900

    def _decode(self, row: int, steps: int) -> None:
        table, counts = self.table, self.counts
        gained = steps
        if self._drafts[row]:
            taken = [int(n) for n in self._random.binomial(steps, [0.82, 0.63, 0.44])]
            gained += sum(taken)
            table.drafted[row] += DRAFTS * steps
            table.accepted[row] += sum(taken)
            counts.drafts += steps
            counts.draft_tokens += DRAFTS * steps
            counts.accepted_tokens += sum(taken)
            both = zip(counts.accepted_per_position, taken, strict=True)
            counts.accepted_per_position = tuple(old + new for old, new in both)
        counts.generation_tokens += gained
        table.length[row] = min(table.max_len[row], table.length[row] + gained)
        table.computed[row] = table.length[row] - 1
        if table.length[row] == table.max_len[row]:
            table.phase[row] = 0

    def _last_steps(self) -> np.ndarray:
        """Two steps in flight: a step is launched while its predecessor runs."""
        count = 60
        spent = self._random.normal(STEP_SECONDS, STEP_SECONDS * 0.06, count)
        gaps = np.where(self._random.random(count) < 0.08, STEP_SECONDS * 0.05, 0.0)
        end = np.cumsum(spent + gaps)
        begin = end - spent
        apply = end + 20e-6
        plan = np.roll(apply, 2) + 80e-6
        plan[:2] = begin[:2] - STEP_SECONDS * 0.9
        numbers = self.counts.steps - count + np.arange(count)
        lanes = np.full(count, float(self.counts.num_running))
        table = np.stack(
            (numbers, lanes, lanes + 40 * (numbers % 5 == 0), plan, plan + 45e-6, plan + 120e-6, begin, end,
             apply, apply + 60e-6), axis=1
        )  # fmt: skip
        table[:, 3:] -= table[-1, 9] + 30e-6
        return table

    async def look(self) -> Look:
        self.looks += 1
        if not self.still:
            self._advance(20)
        self.table.steps = self._last_steps()
        owners: dict[int, Any] = {
            row: SimpleNamespace(
                request_id=self._names[row],
                prepared=SimpleNamespace(token_ids=range(self._prompt[row])),
                num_cached=int(self._prompt[row]) // 64 * 16,
                metrics=SimpleNamespace(arrival_time=float(self._since[row])),
            )
            for row in np.flatnonzero(self.table.phase).tolist()
        }
        return Look(self.table, self.counts, owners)
