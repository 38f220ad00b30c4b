"""Builds a runner from an EnginePlan: model, table, attention, sampling, stream; profile step; KV pool.

Two ways of building meet here: steps of exact size in torch operations (a CPU, or CUDA without Triton), and
bucketed steps for graphs on Triton's kernels.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from slipstream.attention.protocol import AttentionBackend
from slipstream.config.plan import EnginePlan
from slipstream.contracts.step import StepPlan, mask_places
from slipstream.loading.from_plan import load_planned, make_attention
from slipstream.models.base import Model
from slipstream.rows.doors import OutDoor
from slipstream.rows.stream import CpuStream, CudaStream, Stream
from slipstream.rows.table import RowTable
from slipstream.runner.bucket_tick import BucketTick
from slipstream.runner.draft_tick import BucketDraftTick, EagerDraftTick
from slipstream.runner.lanes import LOGPROBS
from slipstream.runner.memory import MemoryPlan
from slipstream.runner.memory_eager import plan_eager_memory
from slipstream.runner.runner import ModelRunner
from slipstream.runner.shapes import Shapes, most_samples
from slipstream.runner.tick import EagerTick, Tick
from slipstream.runner.warmup import Compiling, warm_up
from slipstream.sampling.pipeline import Pipeline, default_features
from slipstream.speculation.protocol import Drafter
from slipstream.speculation.verifier import Verifier

log = logging.getLogger("slipstream.runner")

# Top logprobs that graphs compute; requests that ask for more get eager steps.
GRAPH_LOGPROBS = 20

DrafterOf = Callable[[EnginePlan, Model, torch.device], Drafter | None]


def no_drafter(plan: EnginePlan, model: Model, device: torch.device) -> None:
    """Every step gives one token a row."""


@dataclass(frozen=True, slots=True)
class BuiltRunner:
    """A runner ready for its first plan. memory.num_blocks counts the null block."""

    runner: ModelRunner
    memory: MemoryPlan
    linear_name: str
    linear_reason: str


@dataclass(frozen=True, slots=True)
class Parts:
    """What every runner has."""

    plan: EnginePlan
    device: torch.device
    model: Model
    pipeline: Pipeline
    table: RowTable
    records: OutDoor
    drafter: Drafter | None

    @property
    def num_bytes(self) -> int:
        """Weights, and what a drafter keeps."""
        return self.model.num_bytes + (0 if self.drafter is None else self.drafter.num_bytes)

    def attention(self) -> AttentionBackend:
        """The KV pool is not there yet."""
        more = () if self.drafter is None else self.drafter.layers
        return make_attention(self.plan, self.model, self.device, more)

    def verifier(self, attention: AttentionBackend) -> Verifier | None:
        if self.drafter is None or self.plan.speculation is None:
            return None
        return Verifier(self.table, self.drafter, attention, self.plan.speculation.acceptance)

    def runner(self, tick: Tick, stream: Stream) -> ModelRunner:
        return ModelRunner(
            table=self.table,
            tick=tick,
            pipeline=self.pipeline,
            stream=stream,
            records=self.records,
            vocab_size=self.plan.spec.vocab_size,
        )

    def built(self, runner: ModelRunner, memory: MemoryPlan) -> BuiltRunner:
        return BuiltRunner(runner, memory, self.model.linear_name, self.model.linear_reason)


def build_runner(
    plan: EnginePlan, drafter_of: DrafterOf = no_drafter, known: MemoryPlan | None = None
) -> BuiltRunner:
    """Load, profile, size, allocate. known: what that came to before; eager steps are not profiled again.
    Raises ValueError where the plan cannot be honoured."""
    device = torch.device(plan.device)
    stream: Stream = CudaStream(device) if device.type == "cuda" else CpuStream()
    bucketed = plan.attention_backend != "torch"
    compiling = Compiling(device) if bucketed else None
    try:
        # All that computes runs on the stream's thread, from the first weight on: see CpuStream.
        parts = cast(Parts, stream.submit(functools.partial(make_parts, plan, device, drafter_of)).wait())
        log.info("weights are loaded: %.0f MiB", parts.num_bytes / 2**20)
        if compiling is None:
            return _build_eager(parts, stream, known)
        return _build_bucketed(parts, stream, compiling)
    except Exception:
        if compiling is not None:
            compiling.stop()
        stream.close()
        raise


@torch.inference_mode()
def make_parts(plan: EnginePlan, device: torch.device, drafter_of: DrafterOf = no_drafter) -> Parts:
    model, vocab_size = load_planned(plan, device), plan.spec.vocab_size
    drafter = drafter_of(plan, model, device)
    queries = 0 if plan.speculation is None else 1 + plan.speculation.num_speculative_tokens
    lanes = most_samples(plan.max_num_seqs, queries > 0) if plan.attention_backend != "torch" else 0
    features = default_features(vocab_size, lanes, device, mask_places(max(queries - 1, 0)))
    pipeline = Pipeline(features, vocab_size, device)
    slots = plan.steps_in_flight + 1
    table = RowTable(
        max_num_seqs=plan.max_num_seqs,
        max_model_len=plan.max_model_len,
        block_size=plan.block_size,
        device=device,
        columns=(*pipeline.columns, *(() if drafter is None else drafter.columns)),
        features=(*pipeline.names, LOGPROBS),
        flush_slots=slots,
    )
    records = OutDoor(slots, table.num_rows, device, queries)
    return Parts(plan, device, model, pipeline, table, records, drafter)


def _build_eager(parts: Parts, stream: Stream, known: MemoryPlan | None) -> BuiltRunner:
    attention = parts.attention()
    shared, verifier = (parts.table, parts.model, attention, parts.pipeline), parts.verifier(attention)
    if verifier is not None and parts.device.type != "cpu":
        raise ValueError("--attention-backend=torch: on CUDA speculation needs a backend of Triton's")
    tick = EagerTick(*shared) if verifier is None else EagerDraftTick(*shared, verifier)
    runner = parts.runner(tick, stream)
    if known is not None:
        stream.submit(lambda: attention.allocate(known.num_blocks)).wait()
        return parts.built(runner, known)
    memory = plan_eager_memory(
        parts.plan,
        parts.num_bytes,
        attention.bytes_per_block(),
        lambda blocks: stream.submit(lambda: attention.allocate(blocks)).wait(),
        lambda tokens: runner.step(_padding_plan(runner.table.padding_row, tokens)).wait(),
    )
    return parts.built(runner, memory)


@dataclass(frozen=True, slots=True)
class Bucketed:
    """What a bucketed runner has beside Parts."""

    attention: AttentionBackend
    shapes: Shapes
    tick: BucketTick


def make_bucketed(parts: Parts) -> Bucketed:
    """The KV pool is not there yet."""
    plan = parts.plan
    attention = parts.attention()
    verifier = parts.verifier(attention)
    shapes = Shapes(
        _ending_in(plan.max_num_seqs, plan.graph_sizes),
        _ending_in(plan.max_num_batched_tokens, plan.token_buckets),
        parts.pipeline.stage_of,
        min(plan.max_logprobs, GRAPH_LOGPROBS),
        0 if plan.speculation is None else plan.speculation.num_speculative_tokens,
        plan.speculation is not None and plan.speculation.uneven,
    )
    shared = (
        parts.table,
        parts.model,
        attention,
        parts.pipeline,
        shapes,
        parts.records.commit_ring,
        plan.max_num_batched_tokens,
        plan.spec.hidden_size,
    )
    tick = BucketTick(*shared) if verifier is None else BucketDraftTick(*shared, verifier)
    return Bucketed(attention, shapes, tick)


def _build_bucketed(parts: Parts, stream: Stream, compiling: Compiling) -> BuiltRunner:
    @torch.inference_mode()
    def prepare() -> tuple[BucketTick, MemoryPlan]:
        made = make_bucketed(parts)
        shapes = made.shapes.all()
        memory = warm_up(parts.plan, made.attention, made.tick, shapes, compiling, parts.device)
        return made.tick, memory

    tick, memory = cast(tuple[BucketTick, MemoryPlan], stream.submit(prepare).wait())
    return parts.built(parts.runner(tick, stream), memory)


def _ending_in(most: int, buckets: Sequence[int]) -> tuple[int, ...]:
    """Buckets of which the last is `most`; powers of two where none are given (eager steps)."""
    buckets = buckets or [1 << bit for bit in range(most.bit_length())]
    return (*(size for size in buckets if size < most), most)


def _padding_plan(row: int, tokens: int) -> StepPlan:
    one = np.ones(1, np.int32)
    return StepPlan(
        step=-1,
        lane_row=one * row,
        lane_generation=one * 0,
        lane_query_len=one * tokens,
        lane_samples=np.ones(1, np.bool_),
        num_decode_lanes=0,
        lanes_changed=True,
        len_bound=tokens,
    )
