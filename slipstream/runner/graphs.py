"""CUDA graphs of whole steps, one a shape, sharing one memory pool: the largest is captured first, and what
it no longer needs serves the others. A shape without a graph runs eagerly, the same body.

Where steps are captured they have run before: kernels are compiled, libraries have their handles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from slipstream.runner.shapes import Shape
from slipstream.runner.tick import Scores

Pool = Any  # torch's handle of a pool of graph memory
Body = Callable[[Shape], Scores | None]
T = TypeVar("T")
Captured = tuple[torch.cuda.CUDAGraph, Scores | None]


class Graphs:
    """body: launches a step's kernels on the current stream; what it returns stays where it is for as long
    as the graph lives."""

    def __init__(self, body: Body, device: torch.device) -> None:
        self._body = body
        self._device = device
        self._graphs: dict[Shape, Captured] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, shape: Shape) -> bool:
        return shape in self._graphs

    def run(self, shape: Shape) -> Scores | None:
        """On the stream."""
        found = self._graphs.get(shape)
        if found is None:
            return self._body(shape)
        graph, scores = found
        graph.replay()
        return scores

    def try_all(self, shapes: Iterable[Shape]) -> None:
        """Run every shape once, on the stream, whose lanes must point nowhere: kernels are loaded, libraries
        get their handles."""
        for shape in shapes:
            self._body(shape)

    def captured(self, shape: Shape, pool: Pool) -> Captured:
        """A graph of the step, made on the current stream; its memory comes from the pool."""
        return self._record(lambda: self._body(shape), pool)

    def capture(self, shapes: Iterable[Shape]) -> None:
        """Graphs for these shapes, the largest first."""
        shapes = list(shapes)
        pool = torch.cuda.graph_pool_handle() if shapes else None
        for shape in shapes:
            self._graphs[shape] = self.captured(shape, pool)

    def capture_one(self, launch: Callable[[], None]) -> Callable[[], None]:
        """What launches the same again, as a graph; it takes no memory."""
        replay: Callable[[], None] = self._record(launch, None)[0].replay
        return replay

    def _record(self, launch: Callable[[], T], pool: Pool) -> tuple[torch.cuda.CUDAGraph, T]:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            result = launch()
        return graph, result
