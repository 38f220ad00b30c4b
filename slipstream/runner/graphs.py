"""CUDA graphs of whole steps, one a shape, sharing one memory pool: the largest is captured first, and what
it no longer needs serves the others. A shape without a graph runs eagerly, the same body.

Where steps are captured they have run before: kernels are compiled, libraries have their handles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from slipstream.runner.shapes import Shape
from slipstream.runner.tick import Scores

Pool = Any  # torch's handle of a pool of graph memory
Body = Callable[[Shape], Scores | None]
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

    def replay(self, shape: Shape) -> bool:
        """On the stream; False, and nothing is done, where there is no graph of this shape."""
        found = self._graphs.get(shape)
        if found is not None:
            found[0].replay()
        return found is not None

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
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            scores = self._body(shape)
        return graph, scores

    def capture(self, shapes: Iterable[Shape]) -> None:
        """Graphs for these shapes, the largest first."""
        shapes = list(shapes)
        pool = torch.cuda.graph_pool_handle() if shapes else None
        for shape in shapes:
            self._graphs[shape] = self.captured(shape, pool)
