"""The memory plan: what was measured, and a KV pool of what that leaves. Bytes throughout.

memory_cpu.py and memory_cuda.py measure; nothing here asks a device.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.config.plan import EnginePlan

log = logging.getLogger("slipstream.memory")

MIB = 2**20
# 83 graphs of Qwen3-0.6B took 1.44 to 1.52 times what three of them promised: they share less than these do.
GRAPH_MARGIN = 1.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """All but the KV pool. activations: of the largest step; other: what the driver counts beside them
    (context, libraries, the allocator's loss, other processes); spare: to be left free for rare results;
    allowed: what the engine may take in all; capacity: what there is; most_kv: limit of an unasked-for
    pool."""

    weights: int
    activations: int
    allowed: int
    capacity: int
    graphs: int = 0
    other: int = 0
    spare: int = 0
    most_kv: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where memory goes. kv: num_blocks (the null block included) times bytes of a block."""

    weights: int
    activations: int
    graphs: int
    kv: int
    other: int
    num_blocks: int
    allowed: int

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.graphs + self.kv + self.other

    def describe(self) -> str:
        names = ("weights", "activations", "graphs", "kv", "other", "total")
        parts = ", ".join(f"{name} {getattr(self, name) / MIB:,.0f} MiB" for name in names)
        return f"{parts} ({self.num_blocks} blocks), of {self.allowed / MIB:,.0f} MiB allowed"

    def error(self, used: int) -> float:
        """How far the plan's total is off, as a share of what the driver reports used."""
        return (self.total - used) / used


def size_kv_pool(plan: EnginePlan, measured: Measured, bytes_per_block: int) -> MemoryPlan:
    """As many blocks as fit, but no more than all rows at full length can use. Raises ValueError naming the
    flag where not one request fits."""
    taken = measured.weights + measured.activations + measured.graphs + measured.other
    flag = f"--gpu-memory-utilization={plan.args.gpu_memory_utilization}"
    if plan.num_blocks is not None:
        flag, blocks = f"--num-gpu-blocks-override={plan.num_blocks}", plan.num_blocks
    elif plan.args.kv_cache_memory_bytes is not None:
        flag = f"--kv-cache-memory-bytes={plan.args.kv_cache_memory_bytes}"
        blocks = plan.args.kv_cache_memory_bytes // bytes_per_block
    else:
        left = measured.allowed - taken - measured.spare
        if measured.most_kv is not None:
            left = min(left, measured.most_kv)
        blocks = min(plan.max_num_seqs * _blocks_of(plan.max_model_len, plan) + 1, left // bytes_per_block)
    made = MemoryPlan(
        weights=measured.weights,
        activations=measured.activations,
        graphs=measured.graphs,
        kv=blocks * bytes_per_block,
        other=measured.other,
        num_blocks=blocks,
        allowed=measured.allowed,
    )
    if blocks < 2:
        raise ValueError(
            f"{flag}: no room for two KV blocks of {bytes_per_block / MIB:,.1f} MiB beside weights "
            f"{made.weights / MIB:,.0f}, activations {made.activations / MIB:,.0f}, graphs "
            f"{made.graphs / MIB:,.0f}, other {made.other / MIB:,.0f} of {made.allowed / MIB:,.0f} MiB "
            "allowed; raise it, or lower --max-num-batched-tokens or --max-num-seqs"
        )
    if made.total > measured.capacity:
        raise ValueError(
            f"{flag}: {made.describe()}, is more than the {measured.capacity / MIB:,.0f} MiB there are"
        )
    if blocks - 1 < _blocks_of(plan.max_model_len, plan):
        longest = (blocks - 1) * plan.block_size
        log.warning(
            "the KV pool holds %d tokens, so that no request can have --max-model-len=%d",
            longest,
            plan.max_model_len,
        )
    return made


def estimate_graphs(tried: Sequence[int], count: int) -> int:
    """Bytes that `count` graphs of one pool will take. tried: what the largest took, then what others took
    beside it."""
    if not tried or not count:
        return 0
    each = max(tried[1:], default=0)
    return int(GRAPH_MARGIN * (tried[0] + (count - 1) * each))


def settle(plan: MemoryPlan, graphs: int, used: int) -> MemoryPlan:
    """The plan with the bytes that the graphs took in the end, held against the driver's count in the
    log."""
    final = dataclasses.replace(plan, graphs=graphs)
    if graphs > plan.graphs:
        log.warning(
            "CUDA graphs took %.0f MiB, %.0f MiB more than was kept for them",
            graphs / MIB,
            (graphs - plan.graphs) / MIB,
        )
    log.info(
        "memory: %s; the driver reports %.0f MiB used, the plan says %+.2f%%",
        final.describe(),
        used / MIB,
        100 * final.error(used),
    )
    return final


def _blocks_of(tokens: int, plan: EnginePlan) -> int:
    return -(-tokens // plan.block_size)
