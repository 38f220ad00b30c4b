"""Requests as the scheduler keeps them, and the queue of those that wait for a row."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from slipstream.contracts.request import EngineRequest

Array = np.ndarray


@dataclass(slots=True, eq=False)
class Entry:
    """A live request. A preempted one waits again with its old place in the order, so before later ones.

    order: (priority, arrival, sequence number); the lowest is served first and preempted last. tokens: int32,
    prompt and everything delivered, as of the last time it waited. chain: the root and digests of its full
    blocks (see prefix.py). scored: first prompt position whose logprobs were not delivered yet. first: the
    entry of its request's first sample, where that is another. """

    request: EngineRequest
    order: tuple[int, float, int]
    tokens: Array
    chain: list[bytes] = field(default_factory=list)
    row: int = -1
    waiting: bool = False
    admitted_before: bool = False
    scored: int = 0
    first: Entry | None = None

    @property
    def had_row(self) -> bool:
        """Whether it has waited long enough to be served, however late."""
        return self.admitted_before or (self.first is not None and self.first.admitted_before)


class WaitingQueue:
    """A heap by order. Entries that leave from its middle stay as dead weight until they surface.

    While it is held, those who wait, and those who come, are not to be had, but for who is let in. clock: a
    request's admit_by is a time of it."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, int], Entry]] = []
        self.clock: Callable[[], float] = time.monotonic
        self._deadlines: list[tuple[float, int, Entry]] = []  # a heap
        self._size = 0
        self._held: dict[int, Entry] | None = None  # by key
        self._let_in: set[int] = set()

    def __len__(self) -> int:
        return self._size

    def push(self, entry: Entry) -> None:
        entry.waiting = True
        self._size += 1
        key = entry.request.key
        if self._held is None or key in self._let_in:
            heapq.heappush(self._heap, (entry.order, entry))
        else:
            self._held[key] = entry
        if entry.request.admit_by < math.inf and not entry.had_row:
            heapq.heappush(self._deadlines, (entry.request.admit_by, entry.order[-1], entry))
            if len(self._deadlines) > 2 * self._size + 64:
                self._deadlines = [item for item in self._deadlines if item[2].waiting]
                heapq.heapify(self._deadlines)

    def overdue(self) -> list[int]:
        """Keys of those who must not be admitted any more, each once. Whoever has had a row is not one."""
        now, keys = self.clock() if self._deadlines else 0.0, list[int]()
        while self._deadlines and self._deadlines[0][0] <= now:
            entry = heapq.heappop(self._deadlines)[2]
            if entry.waiting and not entry.had_row:
                keys.append(entry.request.key)
        return keys

    def hold(self) -> None:
        """Nobody is to be had until let_in()."""
        waiting = {entry.request.key: entry for _, entry in self._heap if entry.waiting}
        self._held = waiting | (self._held or {})
        self._heap.clear()
        self._let_in.clear()

    def let_in(self, key: int) -> bool:
        """One of those who are held; False where there is no such."""
        entry = None if self._held is None else self._held.pop(key, None)
        if entry is None:
            return False
        self._let_in.add(key)
        heapq.heappush(self._heap, (entry.order, entry))
        return True

    def release(self) -> None:
        """Everybody is to be had again."""
        held, self._held = self._held or {}, None
        self._let_in.clear()
        for entry in held.values():
            heapq.heappush(self._heap, (entry.order, entry))

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
        if self._held is not None:
            self._held.pop(entry.request.key, None)
        if len(self._heap) > 2 * self._size + 64:
            self._heap = [item for item in self._heap if item[1].waiting]
            heapq.heapify(self._heap)
