"""A step in flight, and how its record becomes a StepResult."""

from __future__ import annotations

import numpy as np

from slipstream.contracts.step import PromptLogprobs, StepResult, TokenLogprobs
from slipstream.rows.doors import to_host
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
        count_L, finish_L, token_L = self._work.record.read(lanes.num_lanes)
        return StepResult(
            step=self.step,
            lane_row=lanes.lane_row,
            lane_generation=lanes.lane_generation,
            num_tokens=count_L,
            tokens=token_L[:, None],
            finish=finish_L,
            logprobs=None if output.logprobs is None else self._token_logprobs(output.logprobs, lanes),
            prompt_logprobs=[
                PromptLogprobs(s.row, s.generation, s.first, *(to_host(t) for t in scores))
                for s, scores in zip(self._work.prompt_scores, output.prompt_logprobs, strict=True)
            ],
        )

    def _token_logprobs(self, scores: Scores, lanes: LaneSet) -> TokenLogprobs:
        """From the lanes that are scored to all lanes of the step."""
        ids, values, rank = (to_host(t) for t in scores)
        lane = lanes.scored_lane
        spread = (lanes.num_lanes, 1, ids.shape[1])
        out = TokenLogprobs(
            np.zeros(spread, np.int32), np.zeros(spread, np.float32), np.zeros(spread[:2], np.int32)
        )
        out.ids[lane, 0], out.values[lane, 0], out.rank[lane, 0] = ids, values, rank
        return out
