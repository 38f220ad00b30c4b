"""What a CPU's memory is and how much a step takes of it, from /proc. Bytes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from slipstream.config.plan import EnginePlan
from slipstream.runner.memory import Measured

CLEAR_REFS = Path("/proc/self/clear_refs")
STATUS = Path("/proc/self/status")
# The pool of a CPU shares memory with everything else there: unless asked, it takes no more than this.
CPU_KV_BYTES = 4 << 30


def total_memory() -> int:
    """Bytes of memory of the machine (MemTotal)."""
    return _kib(Path("/proc/meminfo"), "MemTotal")


def available_memory() -> int:
    """Bytes that can be had without swapping (MemAvailable)."""
    return _kib(Path("/proc/meminfo"), "MemAvailable")


def resident_memory() -> int:
    """Bytes of this process (VmRSS)."""
    return _kib(STATUS, "VmRSS")


def measure_peak(work: Callable[[], object]) -> int:
    """Bytes by which the process's resident memory grew at most while work ran."""
    CLEAR_REFS.write_text("5")  # resets VmHWM to the present size
    before = resident_memory()
    work()
    return max(0, _kib(STATUS, "VmHWM") - before)


def measured_cpu(plan: EnginePlan, weights: int, activations: int) -> Measured:
    """utilisation is a share of what can be had without swapping, the weights being there already."""
    available = available_memory()
    return Measured(
        weights=weights,
        activations=activations,
        allowed=int(available * plan.args.gpu_memory_utilization) + weights,
        capacity=total_memory(),
        most_kv=CPU_KV_BYTES,
    )


def _kib(path: Path, name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB", path.read_text(), re.MULTILINE)
    if match is None:
        raise RuntimeError(f"{path} does not tell {name}")
    return int(match[1]) * 1024
