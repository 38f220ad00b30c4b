"""What a CUDA device's memory is spent on, from torch's allocator and from the driver. Bytes.

Graphs hold the addresses of the KV pool, so the pool comes first and is sized with an estimate of them:

    memory = CudaMemory(device)                   # weights, tables and a pool of few blocks are there
    memory.profile(step)                          # the largest step that no graph will hold, waited for
    memory.try_graphs([largest, another], count)  # captured, measured, dropped
    planned = size_kv_pool(plan, memory.measured(plan), bytes_per_block)
    allocate the pool
    graphs, taken = memory.taken_by(capture_all)
    step()                                        # once more: the allocator keeps what it needs
    planned = settle(planned, taken, memory.used())
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from slipstream.config.plan import EnginePlan
from slipstream.runner.memory import Measured, estimate_graphs

T = TypeVar("T")

# Lanes that ask for logprobs, and scored prompts (in chunks of this many tokens), need float32 copies of
# logits that the profile step, which asks for neither, does not show.
SPARE_ROWS = 256
SPARE_COPIES = 2


class CudaMemory:
    """Measures one device, in the order above. Weights are what the allocator holds at construction."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._weights = torch.cuda.memory_allocated(device)
        self._activations = self._cached = self._graphs = 0

    def used(self) -> int:
        """What the driver counts as used, whoever uses it."""
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def profile(self, step: Callable[[], object]) -> None:
        """step runs the largest eager step to its end; its peak over the weights becomes the activations.
        Not called where every step is a graph: activations lie in the graphs' memory then."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        step()
        self._activations = torch.cuda.max_memory_allocated(self._device) - self._weights
        reserved = torch.cuda.memory_reserved(self._device)
        # Given back, so that the pool is not cut out of it, and counted: the next such step takes it again.
        torch.cuda.empty_cache()
        self._cached = reserved - torch.cuda.memory_reserved(self._device)

    def try_graphs(self, captures: Sequence[Callable[[], object]], count: int) -> None:
        """captures: the largest graph, then others of the same pool; each returns what keeps its graph and
        its tensors alive, and nothing else may. count: graphs there will be."""
        tried = [self.taken_by(capture) for capture in captures]
        self._graphs = estimate_graphs([taken for _, taken in tried], count)
        del tried
        gc.collect()
        torch.cuda.empty_cache()

    def taken_by(self, work: Callable[[], T]) -> tuple[T, int]:
        """What work returns, and the bytes by which it raised the driver's count for good."""
        torch.cuda.empty_cache()
        before = self.used()
        result = work()
        torch.cuda.empty_cache()
        return result, max(0, self.used() - before)

    def measured(self, plan: EnginePlan) -> Measured:
        """Everything but the pool. Call it with nothing else on the device than will be there for good."""
        _, capacity = torch.cuda.mem_get_info(self._device)
        torch.cuda.empty_cache()
        other = self.used() + self._cached - self._weights - self._activations
        rows = max(plan.max_num_seqs, SPARE_ROWS)
        return Measured(
            weights=self._weights,
            activations=self._activations,
            graphs=self._graphs,
            other=other,
            spare=SPARE_COPIES * rows * plan.spec.vocab_size * torch.float32.itemsize,
            allowed=int(capacity * plan.args.gpu_memory_utilization),
            capacity=capacity,
        )
