"""The device's part of a step, in order, as it runs on the stream: inputs, forward, sample, commit.

Everything it reads of a request is in the row table. Host facts (LaneSet) only size the work. The eager tick
here works on a step's very lanes, in any backend; bucket_tick.py has the form that graphs hold.

Legend: T tokens, L lanes, N sampling lanes, V vocabulary, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from slipstream.attention.protocol import AttentionBackend, AttentionBatch
from slipstream.contracts.request import EngineRequest
from slipstream.contracts.step import StepPlan
from slipstream.kernels.commit import CommitRecord, CommitRing, commit_step
from slipstream.kernels.logprobs import token_logprobs
from slipstream.kernels.step_inputs import StepInputs, build_step_inputs
from slipstream.models.base import Model
from slipstream.rows.columns import Array, RowWriter
from slipstream.rows.doors import OutRecord, StagedWrites, from_host, leave
from slipstream.rows.table import RowTable
from slipstream.runner.lanes import LOGPROBS, ExactLanes, LaneSet, PromptScore, stage_exact
from slipstream.runner.mirror import RowMirror
from slipstream.sampling.pipeline import Pipeline, SampledTokens
from slipstream.sampling.protocol import SampleBatch

Tensor = torch.Tensor
Scores = tuple[Tensor, Tensor, Tensor]

# Prompt tokens whose logits are held at once: [256, V] float32 is 50 MB at 49,152 and 156 MB at 152k.
SCORE_CHUNK = 256


@dataclass(slots=True)
class StepWork:
    """What step() hands the stream. lanes: as the same tick staged them."""

    writes: StagedWrites | None
    lanes: Any
    length_bound_L: Array
    prompt_scores: list[PromptScore]
    record: OutRecord
    fresh_blocks: Array


@dataclass(slots=True)
class TickOutput:
    """Large and rare results on their way to the host: (ids, values, rank) of sampled and of prompt
    tokens."""

    logprobs: Scores | None
    prompt_logprobs: list[Scores]


NOTHING = TickOutput(None, [])


class Tick(Protocol):
    """How steps run on a device."""

    def admit(self, request: EngineRequest, write: RowWriter) -> None:
        """On the host: write columns of a row that steps alone know of."""
        ...

    def stage_lanes(self, plan: StepPlan, mirror: RowMirror) -> LaneSet:
        """On the host: write the plan's lanes into the table's lane arrays."""
        ...

    def run(self, work: StepWork) -> TickOutput:
        """One step on the stream."""
        ...


def inputs_of(table: RowTable, lanes: int, tokens: int, one_each: bool) -> StepInputs:
    """The inputs of the step that the table's lane arrays describe."""
    columns, arrays = table.columns, table.lanes
    return build_step_inputs(
        arrays["lane_to_row"][:lanes],
        arrays["lane_query_len"][:lanes],
        tokens,
        tokens_RM=columns["tokens"],
        num_computed_R=columns["num_computed"],
        alive_R=columns["alive"],
        blocks_RB=columns["blocks"],
        block_size=table.block_size,
        one_each=one_each,
    )


def begin_step(work: StepWork, table: RowTable, attention: AttentionBackend) -> None:
    """What comes before a step's inputs: the host's writes, and blocks that may hold another's numbers."""
    if work.writes is not None:
        work.writes.apply(table.arena)
    if clears_blocks(work, attention):
        attention.clear(from_host(work.fresh_blocks, table.device).long())


def clears_blocks(work: StepWork, attention: AttentionBackend) -> bool:
    """Whether there are blocks that may hold another's numbers, and these are read."""
    return attention.reads_whole_blocks and len(work.fresh_blocks) > 0


def attention_of(
    table: RowTable,
    inputs: StepInputs,
    query_len_L: Array,
    length_bound_L: Array,
    num_decode_lanes: int,
    decode_tokens: int = 1,
) -> AttentionBatch:
    """A step's inputs as attention sees them, over the table's blocks."""
    return AttentionBatch(
        query_start_L1=inputs.query_start_L1,
        length_L=inputs.length_L,
        position_T=inputs.position_T,
        slot_T=inputs.slot_T,
        row_L=inputs.row_L,
        blocks_RB=table.columns["blocks"],
        query_len_L=query_len_L,
        length_bound_L=length_bound_L,
        num_decode_lanes=num_decode_lanes,
        decode_tokens=decode_tokens,
    )


def commit_to(
    table: RowTable,
    inputs: StepInputs,
    lane_N: Tensor,
    sampled: SampledTokens,
    record: CommitRecord | CommitRing,
) -> None:
    """The end of a step: what lanes lane_N (int64) sampled goes into their rows and into the record."""
    columns = table.columns
    commit_step(
        inputs,
        lane_N,
        sampled.tokens_N,
        sampled.ok_N,
        tokens_RM=columns["tokens"],
        length_R=columns["length"],
        num_computed_R=columns["num_computed"],
        max_len_R=columns["max_len"],
        end_ids_RE=columns["end_ids"],
        alive_R=columns["alive"],
        record=record,
    )


class PromptScorer:
    """Logprobs of prompt tokens, from the hidden states of a step."""

    def __init__(self, table: RowTable, model: Model) -> None:
        self._table, self._model = table, model

    def __call__(self, hidden_TH: Tensor, score: PromptScore) -> Scores:
        target_T = self._table.columns["tokens"][score.row, score.first : score.first + score.count].clone()
        pieces = []
        for begin in range(0, score.count, SCORE_CHUNK):
            end = min(begin + SCORE_CHUNK, score.count)
            logits_TV = self._model.logits(hidden_TH[score.token + begin : score.token + end])
            pieces.append(token_logprobs(logits_TV, target_T[begin:end], score.num_logprobs))
        ids, values, rank = (leave(torch.cat(parts)) for parts in zip(*pieces, strict=True))
        return ids, values, rank


class EagerTick:
    """Binds the parts that a step runs through."""

    def __init__(
        self, table: RowTable, model: Model, attention: AttentionBackend, pipeline: Pipeline
    ) -> None:
        self._table = table
        self._model = model
        self._attention = attention
        self._pipeline = pipeline
        self._score_prompt = PromptScorer(table, model)

    def admit(self, request: EngineRequest, write: RowWriter) -> None:
        """Nothing."""

    def stage_lanes(self, plan: StepPlan, mirror: RowMirror) -> ExactLanes:
        return stage_exact(plan, self._table, mirror, self._pipeline.names)

    @torch.inference_mode()
    def run(self, work: StepWork) -> TickOutput:
        """One step on the stream."""
        begin_step(work, self._table, self._attention)
        lanes: ExactLanes = work.lanes
        one_each = lanes.num_decode_lanes == lanes.num_lanes
        inputs = inputs_of(self._table, lanes.num_lanes, lanes.num_tokens, one_each)
        batch = attention_of(
            self._table, inputs, lanes.query_len_L, work.length_bound_L, lanes.num_decode_lanes
        )
        hidden_TH = self._model.forward(inputs.token_T, inputs.position_T, self._attention.bind(batch))
        sample_N = self._table.lanes["sample_to_lane"][: lanes.num_samples].long()
        logprobs, sampled = self._sample(hidden_TH, inputs, sample_N, lanes)
        commit_to(self._table, inputs, sample_N, sampled, work.record.lines(lanes.num_lanes))
        return TickOutput(logprobs, [self._score_prompt(hidden_TH, score) for score in work.prompt_scores])

    def _sample(
        self, hidden_TH: Tensor, inputs: StepInputs, sample_N: Tensor, lanes: ExactLanes
    ) -> tuple[Scores | None, SampledTokens]:
        """Token and validity of every sampling lane, and raw logprobs of those that asked."""
        if len(sample_N) == 0:
            empty = sample_N.int()
            return None, SampledTokens(empty, empty.bool())
        last_N = (inputs.query_start_L1[1:][sample_N] - 1).long()
        row_N = inputs.row_L[sample_N]
        places = {name: self._table.lanes[f"feature_{name}"][:n].long() for name, n in lanes.counts.items()}
        batch = SampleBatch(row_N, self._table.columns["length"][row_N], self._table.columns, places)
        return self._choose(self._model.logits(hidden_TH[last_N]).float(), batch, lanes.num_logprobs)

    def _choose(
        self, logits_NV: Tensor, batch: SampleBatch, num_logprobs: int
    ) -> tuple[Scores | None, SampledTokens]:
        asked = batch.feature_lanes.get(LOGPROBS)
        # Before the pipeline changes the logits in place.
        raw = logits_NV[asked] if asked is not None else None
        sampled = self._pipeline.sample(logits_NV, batch)
        if raw is None or asked is None:
            return None, sampled
        # A row that fails has no token; its scores are never read.
        token = sampled.tokens_N[asked].clamp(min=0)
        ids, values, rank = map(leave, token_logprobs(raw, token, num_logprobs))
        return (ids, values, rank), sampled
