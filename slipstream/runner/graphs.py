"""CUDA graphs. Those of whole steps, one a shape, share a memory pool: the largest is captured first, and
what it no longer needs serves the others.

What is captured has run before: kernels are compiled, libraries have their handles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from slipstream.runner.shapes import Shape

Pool = Any  # torch's handle of a pool of graph memory
T = TypeVar("T")
Captured = tuple[torch.cuda.CUDAGraph, T]


def captured(launch: Callable[[], T], device: torch.device, pool: Pool = None) -> Captured[T]:
    """A graph of what launch puts on the current stream, and what it returned: that stays where it is for as
    long as the graph lives."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        result = launch()
    return graph, result


def capture_all(
    shapes: Sequence[Shape], body: Callable[[Shape], T], device: torch.device
) -> dict[Shape, Captured[T]]:
    """Of each of these shapes, the largest first."""
    pool = torch.cuda.graph_pool_handle() if shapes else None
    return {shape: captured(functools.partial(body, shape), device, pool) for shape in shapes}
