"""Requests as the scheduler keeps them, and the queue of those that wait for a row."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from slipstream.contracts.request import EngineRequest

Array = np.ndarray


@dataclass(slots=True, eq=False)
class Entry:
    """A live request. A preempted one waits again with its old place in the order, so before later ones.

    order: (priority, arrival, sequence number); the lowest is served first and preempted last. tokens: int32,
    prompt and everything delivered, as of the last time it waited. chain: the root and digests of its full
    blocks (see prefix.py). scored: first prompt position whose logprobs were not delivered yet. """

    request: EngineRequest
    order: tuple[int, float, int]
    tokens: Array
    chain: list[bytes] = field(default_factory=list)
    row: int = -1
    waiting: bool = False
    admitted_before: bool = False
    scored: int = 0


class WaitingQueue:
    """A heap by order. Entries that leave from its middle stay as dead weight until they surface."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, int], Entry]] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, entry: Entry) -> None:
        entry.waiting = True
        heapq.heappush(self._heap, (entry.order, entry))
        self._size += 1

    def peek(self) -> Entry | None:
        while self._heap and not self._heap[0][1].waiting:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Entry:
        """The entry that peek() showed."""
        _, entry = heapq.heappop(self._heap)
        entry.waiting = False
        self._size -= 1
        return entry

    def discard(self, entry: Entry) -> None:
        """The entry leaves for good."""
        entry.waiting = False
        self._size -= 1
        if len(self._heap) > 2 * self._size + 64:
            self._heap = [item for item in self._heap if item[1].waiting]
            heapq.heapify(self._heap)
