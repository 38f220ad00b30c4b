"""Builds the old runner from an EnginePlan: model, attention, sampling on the CPU; profile step; KV pool."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch

from slipstream.config.plan import EnginePlan
from slipstream.contracts.request import EngineRequest
from slipstream.contracts.sampling_params import SamplingParams
from slipstream.contracts.step import Admission, StepPlan
from slipstream.loading.from_plan import load_planned, make_attention
from slipstream.runner.memory import MemoryPlan
from slipstream.runner.memory_eager import plan_eager_memory
from slipstream.runner_v1.batch import NULL_BLOCK
from slipstream.runner_v1.runner import OldModelRunner
from slipstream.sampling.pipeline import Pipeline, default_features

log = logging.getLogger("slipstream.runner_v1")

PROFILE_ROW = 0


@dataclass(frozen=True, slots=True)
class BuiltRunner:
    """A runner ready for its first plan. memory.num_blocks counts the null block."""

    runner: OldModelRunner
    memory: MemoryPlan
    linear_name: str
    linear_reason: str


@torch.inference_mode()
def build_runner(plan: EnginePlan) -> BuiltRunner:
    """Load, profile, size, allocate. Call it on the thread that will step: torch keeps a team of threads for
    each thread that computes. Raises ValueError where the plan cannot be honoured."""
    assert plan.steps_in_flight == 1, "resolve() gives this runner one step at a time"
    device, vocab_size = torch.device(plan.device), plan.spec.vocab_size
    model = load_planned(plan, device)
    log.info("weights are loaded: %.0f MiB", model.num_bytes / 2**20)
    attention = make_attention(plan, model, device)
    pipeline = Pipeline(default_features(vocab_size), vocab_size, torch.device("cpu"))
    runner = OldModelRunner(
        model=model,
        attention=attention,
        pipeline=pipeline,
        block_size=plan.block_size,
        vocab_size=vocab_size,
        device=device,
    )

    def profile(tokens: int) -> None:
        runner.step(_profile_plan(tokens, plan.block_size))
        runner.close()

    memory = plan_eager_memory(
        plan, model.num_bytes, attention.bytes_per_block(), attention.allocate, profile
    )
    return BuiltRunner(runner, memory, model.linear_name, model.linear_reason)


def _profile_plan(tokens: int, block_size: int) -> StepPlan:
    """A prompt of so many tokens, all in the null block."""
    one, zeros = np.ones(1, np.int32), np.zeros(tokens, np.int32)
    request = EngineRequest(
        key=-1,
        prompt_token_ids=zeros,
        params=SamplingParams(max_tokens=1),
        seed=0,
        end_token_ids=(),
        max_len=tokens + 1,
    )
    blocks = np.full(-(-tokens // block_size), NULL_BLOCK, np.int32)
    return StepPlan(
        step=-1,
        lane_row=one * PROFILE_ROW,
        lane_generation=one * 0,
        lane_query_len=one * tokens,
        lane_samples=np.ones(1, np.bool_),
        num_decode_lanes=0,
        lanes_changed=True,
        len_bound=tokens,
        admissions=[Admission(PROFILE_ROW, 0, request, zeros, 0, blocks)],
    )
