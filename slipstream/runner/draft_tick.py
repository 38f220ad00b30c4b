"""Steps of rows that have drafts. At their exact sizes on a CPU, whose stream is the device and may look at
what it computes; and in the form that graphs hold, where the device decides how many drafts there are.

Legend: T tokens, L lanes, N sampled positions.
"""

from __future__ import annotations

import numpy as np
import torch

from slipstream.attention.protocol import AttentionBackend
from slipstream.contracts.request import EngineRequest
from slipstream.kernels.commit import CommitRing
from slipstream.kernels.draft_inputs import DraftInputs
from slipstream.models.base import Model
from slipstream.rows.columns import RowWriter
from slipstream.rows.doors import from_host, seen
from slipstream.rows.table import RowTable
from slipstream.runner.bucket_tick import BucketTick
from slipstream.runner.lanes import ExactLanes
from slipstream.runner.shapes import Shape, Shapes
from slipstream.runner.tick import EagerTick, Scores, StepWork, TickOutput, attention_of, begin_step
from slipstream.sampling.pipeline import Pipeline
from slipstream.sampling.protocol import SampleBatch
from slipstream.speculation.verifier import Computed, Verifier

Tensor = torch.Tensor


class EagerDraftTick(EagerTick):
    """Binds the parts that a step runs through. CPU only."""

    def __init__(
        self,
        table: RowTable,
        model: Model,
        attention: AttentionBackend,
        pipeline: Pipeline,
        verifier: Verifier,
    ) -> None:
        super().__init__(table, model, attention, pipeline)
        self._verifier = verifier

    def admit(self, request: EngineRequest, write: RowWriter) -> None:
        self._verifier.drafter.admit(request, write)

    @torch.inference_mode()
    def run(self, work: StepWork) -> TickOutput:
        """One step on the stream. Every lane samples; commit ignores those that are not at their row's
        end."""
        begin_step(work, self._table, self._attention)
        lanes: ExactLanes = work.lanes
        room = seen(self._table.lanes["draft_limits"])[1]
        drafts = min(int(seen(self._verifier.wanted(lanes.num_lanes)).sum()), int(room))
        inputs = self._verifier.inputs(lanes.num_lanes, lanes.num_tokens + drafts, lanes.num_lanes + drafts)
        length_L = seen(inputs.length_L)
        query_len_L = np.diff(seen(inputs.query_start_L1))
        batch = attention_of(self._table, inputs, query_len_L, length_L, lanes.num_decode_lanes)
        hidden_TH, aux_TX = self._model.forward_aux(
            inputs.token_T, inputs.position_T, self._attention.bind(batch), self._verifier.drafter.aux_layers
        )
        logits_NV = self._model.logits(hidden_TH[inputs.sample_token_N]).float()
        places = self._places(inputs, lanes)
        samples = SampleBatch(
            inputs.sample_row_N, inputs.sample_length_N, self._table.columns, places
        )
        logprobs, sampled = self._choose(logits_NV, samples, lanes.num_logprobs)
        bound = int(length_L.max(initial=0)) + 1
        computed = Computed(batch, hidden_TH, aux_TX, lanes.drafts, bound)
        self._verifier.finish(inputs, sampled, work.record.draft_lines(lanes.num_lanes), computed)
        return TickOutput(logprobs, [self._score_prompt(hidden_TH, score) for score in work.prompt_scores])

    def _places(self, inputs: DraftInputs, lanes: ExactLanes) -> dict[str, Tensor]:
        """Where each feature's lanes sample, among N."""
        arrays, count_L = self._table.lanes, np.diff(seen(inputs.sample_start_L1))
        sample_lane = seen(arrays["sample_to_lane"])
        places = {}
        for name, count in lanes.counts.items():
            uses_L = np.zeros(lanes.num_lanes, np.bool_)
            uses_L[sample_lane[seen(arrays[f"feature_{name}"])[:count]]] = True
            places[name] = from_host(np.flatnonzero(np.repeat(uses_L, count_L)), self._table.device)
        return places


class BucketDraftTick(BucketTick):
    """The same in shapes: a step's room for drafts is fixed, and so is how many a drafter makes."""

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
        verifier: Verifier,
    ) -> None:
        super().__init__(table, model, attention, pipeline, shapes, ring, max_tokens, hidden_size)
        self._verifier = verifier

    def admit(self, request: EngineRequest, write: RowWriter) -> None:
        self._verifier.drafter.admit(request, write)

    def _body(self, shape: Shape) -> Scores | None:
        inputs = self._verifier.inputs(shape.lanes, shape.tokens, shape.samples)
        batch = self._batch(inputs, shape)
        hidden_TH, aux_TX = self._model.forward_aux(
            inputs.token_T, inputs.position_T, self._attention.bind(batch), self._verifier.drafter.aux_layers
        )
        samples = SampleBatch(inputs.sample_row_N, inputs.sample_length_N, self._table.columns, {})
        place_N = None if shape.decode else inputs.sample_token_N
        scores, sampled = self._sample(hidden_TH, place_N, samples, shape)
        computed = Computed(batch, hidden_TH, aux_TX, shape.drafts, self._table.max_model_len)
        self._verifier.finish(inputs, sampled, self._ring, computed)
        return scores
