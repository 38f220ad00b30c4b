"""The memory plan of a runner without graphs: one step measured, the pool sized and allocated."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from slipstream.config.plan import EnginePlan
from slipstream.runner.memory import MemoryPlan, size_kv_pool
from slipstream.runner.memory_cpu import measure_peak, measured_cpu
from slipstream.runner.memory_cuda import CudaMemory
from slipstream.runner.shapes import all_samples

log = logging.getLogger("slipstream.runner")

# Tokens of the CPU profile step; activations grow in proportion to tokens, so the measure is scaled up to the
# largest step. (A whole step of 512 tokens costs a second at start.)
PROFILE_TOKENS = 128


def plan_eager_memory(
    plan: EnginePlan,
    weights: int,
    bytes_per_block: int,
    allocate: Callable[[int], object],
    step: Callable[[int], object],
) -> MemoryPlan:
    """weights: bytes, loaded already. allocate(blocks) makes the KV pool; step(tokens) runs a step of one
    lane of so many tokens to its end, in a pool of the null block alone. Raises ValueError where not one
    request fits."""
    allocate(1)
    tokens = min(plan.max_num_batched_tokens, plan.max_model_len - 1)  # one more is sampled
    if plan.device == "cpu":
        tokens = min(PROFILE_TOKENS, tokens)
        peak = measure_peak(lambda: step(tokens))
        drafts = 0 if plan.speculation is None else plan.speculation.num_speculative_tokens
        logits = 4 * plan.spec.vocab_size * all_samples(plan.max_num_seqs, drafts)
        measured = measured_cpu(plan, weights, peak // tokens * plan.max_num_batched_tokens + logits)
    else:
        memory_of = CudaMemory(torch.device(plan.device))
        memory_of.profile(lambda: step(tokens))
        measured = memory_of.measured(plan)
    memory = size_kv_pool(plan, measured, bytes_per_block)
    allocate(memory.num_blocks)
    log.info("memory: %s", memory.describe())
    return memory
