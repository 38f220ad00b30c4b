"""The V2 runner: a step is a list of verbs over the row table. It never waits for the device.

No feature has a name here; what a feature needs joins through a list (sampling), a protocol (attention) or a
column.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slipstream.contracts.step import Admission, StepPlan
from slipstream.rows.doors import OutDoor
from slipstream.rows.stream import Stream
from slipstream.rows.table import RowTable
from slipstream.runner.handle import StepHandle
from slipstream.runner.lanes import LaneSet, prompt_scores
from slipstream.runner.mirror import RowMirror
from slipstream.runner.tick import StepWork, Tick, TickOutput
from slipstream.sampling.pipeline import Pipeline


class ModelRunner:
    """Turns plans into steps on the stream. One thread calls it."""

    def __init__(
        self,
        *,
        table: RowTable,
        tick: Tick,
        pipeline: Pipeline,
        stream: Stream,
        records: OutDoor,
        vocab_size: int,
    ) -> None:
        self.table = table
        self.stream = stream
        self._pipeline = pipeline
        self._vocab_size = vocab_size
        self._mirror = RowMirror(table.num_rows)
        self._tick = tick
        self._out, self._records = records, records.ring
        self._lanes: LaneSet | None = None
        self._failure: Exception | None = None  # of a step, until reset()

    def step(self, plan: StepPlan) -> StepHandle:
        """Submit one step; returns at once."""
        self._release(plan)
        self._admit(plan.admissions)
        if len(plan.grant_row):
            self.table.grant(plan.grant_row, plan.grant_index, plan.grant_block)
        if len(plan.legal_row):
            self.table.constrain(plan)
        lanes = self._stage_lanes(plan)
        bound_L = self._mirror.advance(lanes.index_L, lanes.query_len_L)
        scores = prompt_scores(lanes, self._mirror, bound_L)
        writes = self.table.flush()
        slot, record = self._records.take()
        work = StepWork(writes, lanes, bound_L, scores, record, plan.fresh_blocks())
        event = self.stream.submit(lambda: self._run(work))
        if writes is not None:
            writes.done_by(event)
        handle = StepHandle(plan.step, work, event)
        self._records.give_ticket(slot, handle)
        return handle

    def _release(self, plan: StepPlan) -> None:
        """Rows whose owner left die, unless this very plan gives them to somebody else."""
        rows = plan.released
        if len(rows) and plan.admissions:
            rows = np.setdiff1d(rows, np.array([each.row for each in plan.admissions], np.int32))
        if len(rows):
            self.table.release(rows)

    def _admit(self, admissions: Sequence[Admission]) -> None:
        for admission in admissions:
            writer = self.table.admit(admission)
            features = self._pipeline.admit(admission.request, writer)
            writer.scalar("features", features)
            self._tick.admit(admission.request, writer)
            writer.commit()
            self._mirror.admit(admission, features, self._vocab_size)

    def _stage_lanes(self, plan: StepPlan) -> LaneSet:
        if plan.lanes_changed or self._lanes is None:
            self._lanes = self._tick.stage_lanes(plan, self._mirror)
        return self._lanes

    def _run(self, work: StepWork) -> TickOutput:
        """Runs on the stream. What comes after a step that failed fails like it: rows are not as planned."""
        if self._failure is not None:
            raise self._failure
        try:
            return self._tick.run(work)
        except Exception as error:
            self._failure = error
            raise

    def reset(self) -> None:
        """After a failed step, with nothing in flight: it may have ended before its record was written."""
        self._failure = None
        self.table.reset()
        self.stream.submit(self._out.reset).wait()

    def close(self) -> None:
        self.stream.close()
