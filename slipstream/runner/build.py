"""Builds a runner from an EnginePlan: model, table, attention, sampling, stream; profile step; KV pool."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch

from slipstream.attention.paged_torch import PagedTorchAttention
from slipstream.config.plan import EnginePlan
from slipstream.contracts.step import StepPlan
from slipstream.loading import load_model
from slipstream.rows.stream import CpuStream, CudaStream
from slipstream.rows.table import RowTable
from slipstream.runner.lanes import LOGPROBS
from slipstream.runner.memory import PROFILE_TOKENS, MemoryPlan, measure_peak, size_kv_pool
from slipstream.runner.runner import ModelRunner
from slipstream.sampling.pipeline import Pipeline, default_features

log = logging.getLogger("slipstream.runner")


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
    dtype = getattr(torch, plan.dtype)
    model = load_model(
        plan.args.model,
        plan.spec,
        dtype=dtype,
        device=device,
        load_format=plan.args.load_format,
        seed=plan.args.seed,
    )
    vocab_size = plan.spec.vocab_size
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
    runner = ModelRunner(
        table=table,
        model=model,
        attention=attention,
        pipeline=pipeline,
        stream=CudaStream(device) if device.type == "cuda" else CpuStream(),
        steps_in_flight=plan.steps_in_flight,
        vocab_size=vocab_size,
    )
    activations = _profile(runner, attention, plan)
    memory = size_kv_pool(plan, model.num_bytes, activations, attention.bytes_per_block())
    attention.allocate(memory.num_blocks)
    log.info("memory: %s", memory.describe())
    return BuiltRunner(runner, memory, model.linear_name, model.linear_reason)


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
