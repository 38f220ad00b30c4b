"""Builds a runner from an EnginePlan: model, table, attention, sampling, stream; profile step; KV pool."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from slipstream.attention.paged_torch import PagedTorchAttention
from slipstream.config.plan import EnginePlan
from slipstream.contracts.step import StepPlan
from slipstream.loading import load_model
from slipstream.models.base import Model
from slipstream.rows.stream import CpuStream, CudaStream, Stream
from slipstream.rows.table import RowTable
from slipstream.runner.lanes import LOGPROBS
from slipstream.runner.memory import MemoryPlan, size_kv_pool
from slipstream.runner.memory_cpu import measure_peak, measured_cpu
from slipstream.runner.runner import ModelRunner
from slipstream.sampling.pipeline import Pipeline, default_features

log = logging.getLogger("slipstream.runner")

# Tokens of the CPU profile step; activations grow in proportion to tokens, so the measure is scaled up to the
# largest step. (A whole step of 512 tokens costs a second at start.)
PROFILE_TOKENS = 128


@dataclass(frozen=True, slots=True)
class BuiltRunner:
    """A runner ready for its first plan. memory.num_blocks counts the null block."""

    runner: ModelRunner
    memory: MemoryPlan
    linear_name: str
    linear_reason: str


def build_runner(plan: EnginePlan) -> BuiltRunner:
    """Load, profile, size, allocate. Raises ValueError where the plan cannot be honoured."""
    device = torch.device(plan.device)
    stream: Stream = CudaStream(device) if device.type == "cuda" else CpuStream()
    try:
        return _build_on(stream, plan, device)
    except Exception:
        stream.close()
        raise


def _build_on(stream: Stream, plan: EnginePlan, device: torch.device) -> BuiltRunner:
    # Torch keeps a team of OpenMP threads for every thread that computes, be it a fill with zeros. Two teams
    # outnumber the cores, and then their waits sleep instead of spinning: steps took 1.8 times as long. So
    # all that computes runs on the stream's thread, from the first weight on.
    parts = cast(_Parts, stream.submit(functools.partial(_make_parts, plan, device)).wait())
    model, attention = parts.model, parts.attention
    runner = ModelRunner(
        table=parts.table,
        model=model,
        attention=attention,
        pipeline=parts.pipeline,
        stream=stream,
        steps_in_flight=plan.steps_in_flight,
        vocab_size=plan.spec.vocab_size,
    )
    activations = _profile(runner, attention, plan)
    measured = measured_cpu(plan, model.num_bytes, activations)
    memory = size_kv_pool(plan, measured, attention.bytes_per_block())
    attention.allocate(memory.num_blocks)
    log.info("memory: %s", memory.describe())
    return BuiltRunner(runner, memory, model.linear_name, model.linear_reason)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a runner is made of."""

    model: Model
    pipeline: Pipeline
    table: RowTable
    attention: PagedTorchAttention


def _make_parts(plan: EnginePlan, device: torch.device) -> _Parts:
    args, vocab_size = plan.args, plan.spec.vocab_size
    model = load_model(
        args.model,
        plan.spec,
        dtype=getattr(torch, plan.dtype),
        device=device,
        load_format=args.load_format,
        seed=args.seed,
    )
    pipeline = Pipeline(default_features(vocab_size), vocab_size, device)
    table = RowTable(
        max_num_seqs=plan.max_num_seqs,
        max_model_len=plan.max_model_len,
        block_size=plan.block_size,
        device=device,
        columns=pipeline.columns,
        features=(*pipeline.names, LOGPROBS),
        flush_slots=plan.steps_in_flight + 1,
    )
    attention = PagedTorchAttention(model.attention, plan.block_size, model.activation_dtype, device)
    return _Parts(model, pipeline, table, attention)


def _profile(runner: ModelRunner, attention: PagedTorchAttention, plan: EnginePlan) -> int:
    """Activation bytes of the largest step: a plan over the padding row, as real as any other."""
    attention.allocate(1)
    tokens = min(PROFILE_TOKENS, plan.max_num_batched_tokens, plan.max_model_len)
    peak = measure_peak(lambda: _discard(runner, _padding_plan(runner.table.padding_row, tokens)))
    per_token = peak / tokens
    logits = 4 * plan.spec.vocab_size * plan.max_num_seqs
    return int(per_token * plan.max_num_batched_tokens) + logits


def _discard(runner: ModelRunner, plan: StepPlan) -> None:
    runner.step(plan).wait()


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
