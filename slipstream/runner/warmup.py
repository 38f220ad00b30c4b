"""What a CUDA engine does before its first step: try shapes, size the KV pool, capture graphs. Runs on the
stream's thread, and may wait for the device."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from slipstream.attention.protocol import AttentionBackend
from slipstream.config.plan import EnginePlan
from slipstream.kernels.precompile import Known, Workers, list_launches
from slipstream.runner.bucket_tick import BucketTick
from slipstream.runner.memory import MemoryPlan, settle, size_kv_pool
from slipstream.runner.memory_cuda import CudaMemory
from slipstream.runner.shapes import FULL, Shape

log = logging.getLogger("slipstream.runner")

READ_BYTES = 16 << 20
# So many are compiled one after the other before workers have imported torch.
FEW_KERNELS = 8
# The pool while shapes are tried, before it has its size.
TRIAL_BLOCKS = 2


class Compiling:
    """Kernels that are new to this machine are compiled side by side. At a first start the workers import
    what they need while weights are loaded."""

    def __init__(self, device: torch.device) -> None:
        self._capability = torch.cuda.get_device_capability(device)
        self._known = Known()
        self._workers: Workers | None = None
        if not self._known:
            self._workers = Workers(self._capability)
            threading.Thread(target=read_libraries, daemon=True).start()

    def compile(self, trial: Callable[[], None], meanwhile: Callable[[], None]) -> None:
        """What trial launches. meanwhile: what this process can do while others compile."""
        missing = self._known.missing(list_launches(trial))
        if self._workers is None and len(missing) > FEW_KERNELS:
            self._workers = Workers(self._capability)
        if self._workers is not None:
            log.info("compiling %d kernels, once for this machine", len(missing))
            self._workers.compile(missing, meanwhile)
            log.info("kernels are compiled")
        self._known.add(missing)

    def stop(self) -> None:
        """After a failure."""
        if self._workers is not None:
            self._workers.stop()


def read_libraries() -> None:
    """cuBLAS finds each kernel in some hundred megabytes of file when it is first needed. From a cold disk
    that takes seconds in all, page by page; read from end to end beforehand, a fraction."""
    mapped = Path("/proc/self/maps").read_text().split()
    for file in sorted({word for word in mapped if "/libcublas" in word}):
        with open(file, "rb", buffering=0) as library:
            while library.read(READ_BYTES):
                pass


def multiply_once(plan: EnginePlan, device: torch.device) -> None:
    """cuBLAS reads some hundred megabytes from disk at its first product."""
    dtype = getattr(torch, plan.dtype)
    weight_NK = torch.zeros(plan.spec.intermediate_size, plan.spec.hidden_size, dtype=dtype, device=device)
    for rows in (64, 256, plan.max_num_batched_tokens):
        torch.nn.functional.linear(weight_NK.new_zeros(rows, plan.spec.hidden_size), weight_NK)


def warm_up(
    plan: EnginePlan,
    attention: AttentionBackend,
    tick: BucketTick,
    shapes: Sequence[Shape],
    compiling: Compiling,
    device: torch.device,
) -> MemoryPlan:
    """shapes: the largest first. Raises ValueError where not one request fits beside what was measured."""
    attention.allocate(TRIAL_BLOCKS)
    tick.point_all_lanes_nowhere()
    compiling.compile(lambda: tick.launch_each_kind(shapes), lambda: multiply_once(plan, device))
    memory = CudaMemory(device)
    captured = with_graphs(plan, shapes)
    # What others need lies in the graphs' memory; only these take activations beside them.
    eager = [shape for shape in shapes if shape not in captured]

    def try_largest(of: Sequence[Shape]) -> None:
        for shape in _largest(of):
            tick.launch(shape)
        torch.cuda.synchronize(device)

    if eager:
        memory.profile(lambda: try_largest(eager))
    if captured:
        tick.launch_each_kind(captured)
        trials = (captured[0], captured[len(captured) // 2], captured[-1])
        pool = torch.cuda.graph_pool_handle()
        captures = [functools.partial(tick.captured, shape, pool) for shape in trials]
        memory.try_graphs(captures, len(captured))
    log.info("every shape has run, the largest of %d tokens", max(shape.tokens for shape in shapes))
    planned = size_kv_pool(plan, memory.measured(plan), attention.bytes_per_block())
    attention.allocate(planned.num_blocks)
    _, taken = memory.taken_by(lambda: tick.capture(captured))
    log.info("captured %d graphs", len(tick.graphs))
    try_largest(shapes)
    tick.begin()
    torch.cuda.synchronize(device)
    return settle(planned, taken, memory.used())


def with_graphs(plan: EnginePlan, shapes: Sequence[Shape]) -> list[Shape]:
    """Shapes up to the plan's last sizes; steps beyond run eagerly."""
    lanes, tokens = (max(sizes, default=0) for sizes in (plan.graph_sizes, plan.token_buckets))
    return [s for s in shapes if (s.lanes <= lanes if s.decode else s.tokens <= tokens)]


def _largest(shapes: Sequence[Shape]) -> list[Shape]:
    """Of these shapes, those of the largest tensors: drafts make logits, and copies of them, larger than they
    are in the step of the most tokens."""
    largest = max(shapes, key=lambda shape: (shape.tokens, shape.num_logprobs))
    widest = max(shapes, key=lambda shape: (shape.stage == FULL, shape.samples, shape.num_logprobs))
    return [largest, widest] if widest.drafts else [largest]
