"""What a CUDA engine does before its first step: try shapes, size the KV pool, capture graphs. Runs on the
stream's thread, and may wait for the device."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from slipstream.attention.protocol import AttentionBackend
from slipstream.config.plan import EnginePlan
from slipstream.runner.bucket_tick import BucketTick
from slipstream.runner.memory import MemoryPlan, settle, size_kv_pool
from slipstream.runner.memory_cuda import CudaMemory
from slipstream.runner.shapes import Shape

# The pool while shapes are tried, before it has its size.
TRIAL_BLOCKS = 2


def warm_up(
    plan: EnginePlan,
    attention: AttentionBackend,
    tick: BucketTick,
    shapes: Sequence[Shape],
    device: torch.device,
) -> MemoryPlan:
    """shapes: the largest first. Raises ValueError where not one request fits beside what was measured."""
    attention.allocate(TRIAL_BLOCKS)
    tick.point_all_lanes_nowhere()
    memory = CudaMemory(device)
    largest = max(shapes, key=lambda shape: (shape.tokens, shape.num_logprobs))

    def try_largest() -> None:
        tick.graphs.run(largest)
        torch.cuda.synchronize(device)

    memory.profile(try_largest)
    captured = shapes if plan.graph_sizes else ()
    if captured:
        tick.graphs.try_kinds(captured)
        trials = (shapes[0], shapes[len(shapes) // 2], shapes[-1])
        pool = torch.cuda.graph_pool_handle()
        captures = [functools.partial(tick.graphs.captured, shape, pool) for shape in trials]
        memory.try_graphs(captures, len(captured))
    planned = size_kv_pool(plan, memory.measured(plan), attention.bytes_per_block())
    attention.allocate(planned.num_blocks)
    _, taken = memory.taken_by(lambda: tick.graphs.capture(captured))
    try_largest()
    tick.begin()
    torch.cuda.synchronize(device)
    return settle(planned, taken, memory.used())
