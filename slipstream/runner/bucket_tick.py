"""A step in the form that CUDA graphs hold: one of a few shapes, every lane samples, all sizes fixed.

A lane that has not come to the end of its row (an unfinished prefill) or is dead or padding samples
something, and commit ignores it. What the host learns is in the pinned record that commit's kernel writes.

Legend: T tokens, L lanes, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slipstream.attention.protocol import AttentionBackend, AttentionBatch
from slipstream.contracts.request import EngineRequest
from slipstream.contracts.step import StepPlan, empty_i32
from slipstream.kernels.commit import CommitRing
from slipstream.kernels.logprobs import token_logprobs
from slipstream.kernels.step_inputs import StepInputs
from slipstream.models.base import Model
from slipstream.rows.columns import RowWriter
from slipstream.rows.doors import leave
from slipstream.rows.table import RowTable
from slipstream.runner.graphs import Captured, Pool, capture_all, captured
from slipstream.runner.lanes import BucketLanes, stage_bucket
from slipstream.runner.mirror import RowMirror
from slipstream.runner.shapes import Shape, Shapes
from slipstream.runner.tick import (
    NOTHING,
    PromptScorer,
    Scores,
    StepWork,
    TickOutput,
    attention_of,
    begin_step,
    clears_blocks,
    commit_to,
    inputs_of,
)
from slipstream.sampling.pipeline import Pipeline, SampledTokens
from slipstream.sampling.protocol import SampleBatch

Tensor = torch.Tensor

NO_BOUNDS = empty_i32()


class BucketTick:
    """Binds the parts. Its graphs are captured once the KV pool has its final place; until then every step
    is eager."""

    def __init__(
        self,
        table: RowTable,
        model: Model,
        attention: AttentionBackend,
        pipeline: Pipeline,
        shapes: Shapes,
        ring: CommitRing,
        max_tokens: int,
        hidden_size: int,
    ) -> None:
        self._table, self._model, self._attention = table, model, attention
        self._pipeline, self._shapes, self._ring = pipeline, shapes, ring
        self._lane_L = torch.arange(table.num_rows - 1, device=table.device)
        # A mixed step leaves its hidden states here, for prompts that are to be scored.
        size = (max_tokens, hidden_size)
        self._hidden_TH = torch.zeros(size, dtype=model.activation_dtype, device=table.device)
        self._score_prompt = PromptScorer(table, model)
        self.graphs: dict[Shape, Captured[Scores | None]] = {}

    def admit(self, request: EngineRequest, write: RowWriter) -> None:
        """Nothing."""

    def stage_lanes(self, plan: StepPlan, mirror: RowMirror) -> BucketLanes:
        return stage_bucket(plan, self._table, mirror, self._pipeline.names, self._shapes)

    def run(self, work: StepWork) -> TickOutput:
        """One step on the stream: a graph of the staged writes, if any, and one of the step."""
        lanes: BucketLanes = work.lanes
        extra = lanes.num_logprobs >= 0 or work.prompt_scores or clears_blocks(work, self._attention)
        ready = not extra and lanes.shape in self.graphs
        if ready and (work.writes is None or work.writes.replay()):
            self.launch(lanes.shape)
            return NOTHING
        with torch.inference_mode():
            return self._run(work, lanes)

    def _run(self, work: StepWork, lanes: BucketLanes) -> TickOutput:
        begin_step(work, self._table, self._attention)
        scores = self.launch(lanes.shape)
        left = None
        if scores is not None:
            lines = lanes.shape.samples if lanes.drafts else lanes.num_lanes
            ids, values, rank = (leave(each[:lines]) for each in scores)
            left = ids, values, rank
        return TickOutput(left, [self._score_prompt(self._hidden_TH, each) for each in work.prompt_scores])

    def point_all_lanes_nowhere(self) -> None:
        """Every lane is the padding row's, with one token: the state in which shapes are tried and
        captured."""
        self._table.lanes["lane_to_row"].fill_(self._table.padding_row)
        self._table.lanes["lane_query_len"].fill_(1)

    def launch(self, shape: Shape) -> Scores | None:
        """The body of a step, on the stream: its graph, or eagerly where there is none of this shape."""
        found = self.graphs.get(shape)
        if found is None:
            return self._body(shape)
        graph, scores = found
        graph.replay()
        return scores

    def launch_each_kind(self, shapes: Sequence[Shape]) -> None:
        """Launches what these shapes launch, and what applies staged writes, without repeating it for layers
        alike. Lanes must point nowhere, and nothing be staged."""
        whole, self._model = self._model, self._model.of_each_kind()
        self._table.door.launch(self._table.arena)
        try:
            for shape in shapes:
                self._body(shape)
        finally:
            self._model = whole

    def captured(self, shape: Shape, pool: Pool) -> Captured[Scores | None]:
        """See graphs.captured."""
        return captured(lambda: self._body(shape), self._table.device, pool)

    def capture(self, shapes: Sequence[Shape]) -> None:
        """Graphs of these shapes, and of staged writes, whose kernel takes Python longer to launch than a
        step's graph."""
        table = self._table
        self.graphs = capture_all(shapes, self._body, table.device)
        if shapes:
            table.door.capture(table.arena, lambda launch: captured(launch, table.device)[0].replay)

    def begin(self) -> None:
        """Trials have taken turns of the ring; the first real step takes the first."""
        self._ring.turn_2.zero_()

    def _body(self, shape: Shape) -> Scores | None:
        """The whole tick. Returns the logprobs, where the shape has them."""
        inputs = inputs_of(self._table, shape.lanes, shape.tokens, shape.decode)
        batch = self._batch(inputs, shape)
        hidden_TH = self._model.forward(inputs.token_T, inputs.position_T, self._attention.bind(batch))
        samples = SampleBatch(inputs.row_L, inputs.length_L, self._table.columns, {})
        last_L = None if shape.decode else inputs.query_start_L1[1:] - 1
        scores, sampled = self._sample(hidden_TH, last_L, samples, shape)
        commit_to(self._table, inputs, self._lane_L[: shape.lanes], sampled, self._ring)
        return scores

    def _sample(
        self, hidden_TH: Tensor, place_N: Tensor | None, samples: SampleBatch, shape: Shape
    ) -> tuple[Scores | None, SampledTokens]:
        """place_N: which tokens sample in a mixed step; in a step of decode lanes alone all of them do."""
        hidden_NH = hidden_TH
        if place_N is not None:
            self._hidden_TH[: shape.tokens].copy_(hidden_TH)
            # In trials that compute nothing lanes end where they begin: at 0 (kernels/precompile.py).
            hidden_NH = hidden_TH.index_select(0, place_N.clamp(min=0))
        logits_NV = self._model.logits(hidden_NH)
        sampled = self._pipeline.sample_all(logits_NV, samples, shape.stage)
        scores = None
        if shape.num_logprobs >= 0:
            scores = token_logprobs(logits_NV, sampled.tokens_N, shape.num_logprobs)
        return scores, sampled

    def _batch(self, inputs: StepInputs, shape: Shape) -> AttentionBatch:
        decodes = shape.lanes if shape.decode else 0
        return attention_of(self._table, inputs, NO_BOUNDS, NO_BOUNDS, decodes, 1 + shape.drafts)
