"""Memory plan: measure weights and the largest step, then size the KV pool from what is left.

Bytes throughout. On a CPU the measure is the process's resident peak over a profile step.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slipstream.config.plan import EnginePlan

log = logging.getLogger("slipstream.memory")

CLEAR_REFS = Path("/proc/self/clear_refs")
STATUS = Path("/proc/self/status")
# Tokens of the CPU profile step; activations grow in proportion to tokens, so the measure is scaled up to the
# largest step. (A whole step of 512 tokens costs a second at start.)
PROFILE_TOKENS = 128
# The pool of a CPU shares memory with everything else there: unless asked, it takes no more than this.
CPU_KV_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """weights, activations: measured; kv: num_blocks * bytes_per_block; total: what utilisation allows."""

    weights: int
    activations: int
    kv: int
    num_blocks: int
    total: int

    def describe(self) -> str:
        parts = (
            f"{name} {getattr(self, name) / 2**20:,.0f} MiB" for name in ("weights", "activations", "kv")
        )
        return ", ".join(parts) + f" ({self.num_blocks} blocks), of {self.total / 2**20:,.0f} MiB allowed"


def total_memory() -> int:
    """Bytes of memory of the machine (MemTotal)."""
    return _kib(Path("/proc/meminfo"), "MemTotal")


def available_memory() -> int:
    """Bytes that can be had without swapping (MemAvailable)."""
    return _kib(Path("/proc/meminfo"), "MemAvailable")


def measure_peak(work: Callable[[], None]) -> int:
    """Bytes by which the process's resident memory grew at most while work ran."""
    CLEAR_REFS.write_text("5")  # resets VmHWM to the present size
    before = _kib(STATUS, "VmRSS")
    work()
    return max(0, _kib(STATUS, "VmHWM") - before)


def size_kv_pool(plan: EnginePlan, weights: int, activations: int, bytes_per_block: int) -> MemoryPlan:
    """Blocks for the pool, the null block included. Raises ValueError naming the flag where not one request
    fits."""
    total = int(available_memory() * plan.args.gpu_memory_utilization) + weights
    if plan.num_blocks is not None:
        blocks = plan.num_blocks
    elif plan.args.kv_cache_memory_bytes is not None:
        blocks = plan.args.kv_cache_memory_bytes // bytes_per_block
    else:
        most = plan.max_num_seqs * -(-plan.max_model_len // plan.block_size) + 1
        left = total - weights - activations
        if plan.device == "cpu":
            left = min(left, CPU_KV_BYTES)
        blocks = min(most, left // bytes_per_block)
    if blocks < 2:
        mib = f"weights {weights / 2**20:,.0f} MiB and activations {activations / 2**20:,.0f} MiB"
        raise ValueError(
            f"--gpu-memory-utilization={plan.args.gpu_memory_utilization}: {mib} leave no room for KV blocks "
            f"of {bytes_per_block} bytes; raise it, or lower --max-num-batched-tokens"
        )
    return MemoryPlan(weights, activations, blocks * bytes_per_block, blocks, total)


def _kib(path: Path, name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB", path.read_text(), re.MULTILINE)
    if match is None:
        raise RuntimeError(f"{path} does not tell {name}")
    return int(match[1]) * 1024
