"""Builds the old runner from an EnginePlan: model, attention, sampling on the CPU; profile step; KV pool."""

from __future__ import annotations

import dataclasses
import functools
import logging
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from slipstream.attention.protocol import AttentionBackend
from slipstream.config.plan import EnginePlan
from slipstream.contracts.request import EngineRequest
from slipstream.contracts.sampling_params import SamplingParams
from slipstream.contracts.step import Admission, StepPlan
from slipstream.loading.from_plan import load_planned, make_attention
from slipstream.rows.stream import CpuStream
from slipstream.runner.memory import MemoryPlan
from slipstream.runner.memory_eager import plan_eager_memory
from slipstream.runner_v1.batch import NULL_BLOCK
from slipstream.runner_v1.drafts import ModuleProposer, Proposer
from slipstream.runner_v1.lookup import NgramProposer, SuffixProposer
from slipstream.runner_v1.request import BASE_COLUMNS
from slipstream.runner_v1.runner import FinishedStep, OldModelRunner
from slipstream.sampling.pipeline import Pipeline, default_features
from slipstream.speculation.build import build_drafter
from slipstream.speculation.protocol import Drafter

log = logging.getLogger("slipstream.runner_v1")

PROFILE_ROW = 0
LOOKUPS = {"ngram": NgramProposer, "suffix": SuffixProposer}


@dataclass(frozen=True, slots=True)
class BuiltRunner:
    """A runner ready for its first plan. memory.num_blocks counts the null block."""

    runner: OldModelRunner | OnComputeThread
    memory: MemoryPlan
    linear_name: str
    linear_reason: str


@dataclass(frozen=True, slots=True)
class OnComputeThread:
    """A runner on a CPU. Whoever steps waits for the thread on which everything of this process computes
    (see CpuStream): beside a newer runner, two would slow each other down."""

    runner: OldModelRunner
    stream: CpuStream

    def step(self, plan: StepPlan) -> FinishedStep:
        return cast(FinishedStep, self.stream.submit(functools.partial(self.runner.step, plan)).wait())

    def close(self) -> None:
        self.runner.close()
        self.stream.close()


def build_runner(plan: EnginePlan) -> BuiltRunner:
    """Load, profile, size, allocate. Raises ValueError where the plan cannot be honoured."""
    if plan.device == "cuda":
        return _build(plan)
    stream = CpuStream()
    built = cast(BuiltRunner, stream.submit(functools.partial(_build, plan)).wait())
    return dataclasses.replace(built, runner=OnComputeThread(cast(OldModelRunner, built.runner), stream))


@torch.inference_mode()
def _build(plan: EnginePlan) -> BuiltRunner:
    assert plan.steps_in_flight == 1, "resolve() gives this runner one step at a time"
    device, vocab_size = torch.device(plan.device), plan.spec.vocab_size
    model = load_planned(plan, device)
    drafter = None if _on_host(plan) else build_drafter(plan, model, device)
    num_bytes = model.num_bytes + (0 if drafter is None else drafter.num_bytes)
    log.info("weights are loaded: %.0f MiB", num_bytes / 2**20)
    attention = make_attention(plan, model, device, () if drafter is None else drafter.layers)
    pipeline = Pipeline(default_features(vocab_size), vocab_size, torch.device("cpu"))
    runner = OldModelRunner(
        model=model,
        attention=attention,
        pipeline=pipeline,
        block_size=plan.block_size,
        vocab_size=vocab_size,
        device=device,
        proposer=_proposer(plan, drafter, attention, pipeline, device),
        chances=() if plan.speculation is None else plan.speculation.acceptance,
    )

    def profile(tokens: int) -> None:
        runner.step(_profile_plan(tokens, plan.block_size))
        runner.close()

    memory = plan_eager_memory(
        plan, num_bytes, attention.bytes_per_block(), attention.allocate, profile
    )
    return BuiltRunner(runner, memory, model.linear_name, model.linear_reason)


def _on_host(plan: EnginePlan) -> bool:
    return plan.speculation is not None and plan.speculation.method in LOOKUPS


def _proposer(
    plan: EnginePlan, drafter: Drafter | None, attention: AttentionBackend, pipeline: Pipeline,
    device: torch.device,
) -> Proposer:  # fmt: skip
    config = plan.speculation
    if config is None:
        return Proposer()
    if drafter is None:
        return LOOKUPS[config.method](config)
    columns, rows = (*BASE_COLUMNS, *pipeline.columns), plan.max_num_seqs + 1
    return ModuleProposer(drafter, attention, columns, rows, plan.max_model_len, plan.block_size, device)


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
