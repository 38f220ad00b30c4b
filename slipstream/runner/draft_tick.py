"""Steps of rows that have drafts, at their exact sizes: on a CPU, whose stream is the device and may look at
what it computes.

Legend: T tokens, L lanes, N sampled positions.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from slipstream.attention.protocol import AttentionBackend, AttentionBatch
from slipstream.contracts.request import EngineRequest
from slipstream.contracts.step import StepPlan
from slipstream.kernels.draft_inputs import DraftInputs
from slipstream.models.base import Model
from slipstream.rows.columns import RowWriter
from slipstream.rows.doors import from_host, seen
from slipstream.rows.table import RowTable
from slipstream.runner.drafting import Computed, Drafting
from slipstream.runner.lanes import ExactLanes, stage_drafts, stage_exact
from slipstream.runner.mirror import RowMirror
from slipstream.runner.tick import EagerTick, StepWork, TickOutput
from slipstream.sampling.pipeline import Pipeline
from slipstream.sampling.protocol import SampleBatch

Tensor = torch.Tensor


class EagerDraftTick(EagerTick):
    """Binds the parts that a step runs through. CPU only."""

    def __init__(
        self,
        table: RowTable,
        model: Model,
        attention: AttentionBackend,
        pipeline: Pipeline,
        drafting: Drafting,
    ) -> None:
        super().__init__(table, model, attention, pipeline)
        self._drafting = drafting

    def admit(self, request: EngineRequest, write: RowWriter) -> None:
        self._drafting.drafter.admit(request, write)

    def stage_lanes(self, plan: StepPlan, mirror: RowMirror) -> ExactLanes:
        drafts = stage_drafts(plan, self._table, mirror)
        lanes = stage_exact(plan, self._table, mirror, self._pipeline.names)
        return dataclasses.replace(lanes, drafts=drafts)

    @torch.inference_mode()
    def run(self, work: StepWork) -> TickOutput:
        """One step on the stream. Every lane samples; commit ignores those that are not at their row's
        end."""
        self._begin(work)
        lanes: ExactLanes = work.lanes
        room = seen(self._table.lanes["draft_limits"])[1]
        drafts = min(int(seen(self._drafting.wanted(lanes.num_lanes)).sum()), int(room))
        inputs = self._drafting.inputs(lanes.num_lanes, lanes.num_tokens + drafts, lanes.num_lanes + drafts)
        batch = self._batch(inputs, lanes)
        hidden_TH, aux_TX = self._model.forward_aux(
            inputs.token_T, inputs.position_T, self._attention.bind(batch), self._drafting.drafter.aux_layers
        )
        logits_NV = self._model.logits(hidden_TH[inputs.sample_token_N]).float()
        places = self._places(inputs, lanes)
        samples = SampleBatch(
            inputs.sample_row_N, inputs.sample_length_N, self._table.columns, places
        )
        logprobs, sampled = self._choose(logits_NV, samples, lanes.num_logprobs)
        bound = int(batch.length_bound_L.max(initial=0)) + 1
        computed = Computed(batch, hidden_TH, aux_TX, lanes.drafts, bound)
        self._drafting.finish(inputs, sampled, work.record.draft_lines(lanes.num_lanes), computed)
        return TickOutput(logprobs, [self._score_prompt(hidden_TH, score) for score in work.prompt_scores])

    def _batch(self, inputs: DraftInputs, lanes: ExactLanes) -> AttentionBatch:
        return AttentionBatch(
            query_start_L1=inputs.query_start_L1,
            length_L=inputs.length_L,
            position_T=inputs.position_T,
            slot_T=inputs.slot_T,
            row_L=inputs.row_L,
            blocks_RB=self._table.columns["blocks"],
            query_len_L=np.diff(seen(inputs.query_start_L1)),
            length_bound_L=seen(inputs.length_L),
            num_decode_lanes=lanes.num_decode_lanes,
        )

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
