"""A step in flight, and how its record becomes a StepResult."""

from __future__ import annotations

import numpy as np

from slipstream.contracts.step import PromptLogprobs, StepResult, TokenLogprobs
from slipstream.rows.doors import HostRecord
from slipstream.rows.stream import Event
from slipstream.runner.lanes import LaneSet
from slipstream.runner.tick import Scores, StepWork, TickOutput


class StepHandle:
    """Waits for one step. It is the ticket of the step's record: the ring reuses the record only once it was
    read."""

    def __init__(self, step: int, work: StepWork, event: Event) -> None:
        self.step = step
        self.event = event
        self._work = work
        self._result: StepResult | None = None

    def done(self) -> bool:
        return self._result is not None or self.event.done()

    def wait(self) -> StepResult:
        """Blocks until the step is done. Raises what the step raised."""
        if self._result is None:
            self._result = self._read(self.event.wait())
        return self._result

    def _read(self, output: TickOutput) -> StepResult:
        lanes = self._work.lanes
        record = self._work.record.read(lanes.num_lanes, lanes.drafts)
        return StepResult(
            step=self.step,
            lane_row=lanes.lane_row,
            lane_generation=lanes.lane_generation,
            num_tokens=record.count_L,
            tokens=record.token_LQ,
            finish=record.finish_L,
            logprobs=None if output.logprobs is None else _token_logprobs(output.logprobs, lanes, record),
            prompt_logprobs=[
                PromptLogprobs(s.row, s.generation, s.first, *(t.numpy() for t in scores))
                for s, scores in zip(self._work.prompt_scores, output.prompt_logprobs, strict=True)
            ],
            drafted=record.drafted_L,
        )


def _token_logprobs(scores: Scores, lanes: LaneSet, record: HostRecord) -> TokenLogprobs:
    """From the lines of the lanes that are scored to all lanes of the step."""
    ids, values, rank = (t.numpy() for t in scores)
    spread = (*record.token_LQ.shape, ids.shape[1])
    out = TokenLogprobs(
        np.zeros(spread, np.int32), np.zeros(spread, np.float32), np.zeros(spread[:2], np.int32)
    )
    lane, place = lanes.scored_lane, 0
    if record.drafted_L is not None:
        count = 1 + record.drafted_L[lane]
        place = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        lane = np.repeat(lane, count)
    lines = len(lane)
    out.ids[lane, place], out.values[lane, place], out.rank[lane, place] = (
        ids[:lines], values[:lines], rank[:lines],
    )
    return out
