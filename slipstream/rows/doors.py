"""The two doors between host and device. In: staged writes, packed, one copy, one kernel. Out: a packed
record a step.

A buffer is reused only after the event of its last reader (its ticket): queue depth is never trusted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np
import torch

from slipstream.kernels.spans import scatter_spans
from slipstream.rows.stream import Ticket

Array = np.ndarray
Tensor = torch.Tensor
T = TypeVar("T")


class Ring(Generic[T]):
    """Buffers taken in turn; take() waits for the last reader of the buffer it hands out."""

    def __init__(self, make: Callable[[], T], slots: int) -> None:
        self._items = [make() for _ in range(slots)]
        self._tickets: list[Ticket | None] = [None] * slots
        self._next = 0

    def take(self) -> tuple[int, T]:
        """A free buffer and the slot to give its ticket to."""
        slot = self._next
        self._next = (slot + 1) % len(self._items)
        ticket = self._tickets[slot]
        if ticket is not None:
            ticket.wait()
            self._tickets[slot] = None
        return slot, self._items[slot]

    def replace(self, slot: int, item: T) -> None:
        self._items[slot] = item

    def give_ticket(self, slot: int, event: Ticket) -> None:
        self._tickets[slot] = event


class Payload:
    """One packed set of staged writes in host memory. On a CUDA device the buffer is pinned."""

    def __init__(self, words: int, spans: int, pinned: bool) -> None:
        self.data = torch.empty(words, dtype=torch.int32, pin_memory=pinned)
        self.index = torch.empty(2 * spans + 1, dtype=torch.int64, pin_memory=pinned)
        self.data_host: Array = self.data.numpy()
        self.index_host: Array = self.index.numpy()


class StagedWrites:
    """What one flush packed: views of a ring buffer, valid until the event given to `done_by`."""

    __slots__ = ("_ring", "_slot", "num_spans", "num_words", "payload")

    def __init__(
        self, ring: Ring[Payload], slot: int, payload: Payload, num_spans: int, num_words: int
    ) -> None:
        self._ring, self._slot, self.payload = ring, slot, payload
        self.num_spans, self.num_words = num_spans, num_words

    def apply(self, arena: Tensor) -> None:
        """Runs on the stream: one copy, one kernel."""
        if self.num_spans == 0:
            return
        data = self.payload.data[: self.num_words].to(arena.device, non_blocking=True)
        index = self.payload.index[: 2 * self.num_spans + 1].to(arena.device, non_blocking=True)
        scatter_spans(arena, data, index[: self.num_spans], index[self.num_spans :])

    def done_by(self, event: Ticket) -> None:
        self._ring.give_ticket(self._slot, event)


class InDoor:
    """Collects spans on the host between flushes. Spans of one flush never overlap: their order is not kept.

    Not thread-safe: the engine's thread owns it.
    """

    def __init__(self, slots: int, pinned: bool, words: int = 1 << 16, spans: int = 1 << 10) -> None:
        self._ring = Ring(lambda: Payload(words, spans, pinned), slots)
        self._pinned = pinned
        self._dst: list[Array] = []
        self._length: list[Array] = []
        self._data: list[Array] = []

    def span(self, dst: int, values: Array) -> None:
        """Stage int32 values for arena[dst : dst + len(values)]."""
        if len(values):
            self._dst.append(np.array([dst], np.int64))
            self._length.append(np.array([len(values)], np.int64))
            self._data.append(values)

    def cells(self, dst: Array, values: Array) -> None:
        """Stage single words: arena[dst[i]] = values[i]; dst int64, values int32."""
        if len(values):
            self._dst.append(dst)
            self._length.append(np.ones(len(dst), np.int64))
            self._data.append(values)

    def flush(self) -> StagedWrites:
        """Pack what was staged. The caller gives the ticket of the step that applies it."""
        slot, payload = self._ring.take()
        if not self._dst:
            return StagedWrites(self._ring, slot, payload, 0, 0)
        dst, length = np.concatenate(self._dst), np.concatenate(self._length)
        num_spans, num_words = len(dst), int(length.sum())
        if num_words > len(payload.data_host) or 2 * num_spans + 1 > len(payload.index_host):
            payload = Payload(2 * num_words, 2 * num_spans, self._pinned)
            self._ring.replace(slot, payload)
        np.concatenate(self._data, out=payload.data_host[:num_words])
        payload.index_host[:num_spans] = dst
        payload.index_host[num_spans] = 0
        np.cumsum(length, out=payload.index_host[num_spans + 1 : 2 * num_spans + 1])
        for staged in (self._dst, self._length, self._data):
            staged.clear()
        return StagedWrites(self._ring, slot, payload, num_spans, num_words)


class OutRecord:
    """One step's record in host memory: int32 [3, lanes] (tokens appended, finish code, token)."""

    def __init__(self, max_lanes: int, pinned: bool) -> None:
        self.data = torch.zeros(3, max_lanes, dtype=torch.int32, pin_memory=pinned)
        self.host: Array = self.data.numpy()

    def write(self, count_L: Tensor, finish_L: Tensor, token_L: Tensor) -> None:
        """Runs on the stream."""
        lanes = count_L.shape[0]
        for line, values in enumerate((count_L, finish_L, token_L)):
            self.data[line, :lanes].copy_(values, non_blocking=True)

    def read(self, lanes: int) -> Array:
        """Runs on the host after the step's event: a copy, so that the record can be reused at once."""
        return self.host[:, :lanes].copy()


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros whose pages a CPU takes only as they are written: a large pool costs nothing at start."""
    if device.type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    memory = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(memory).view(dtype).view(*shape)


def from_host(values: Array, device: torch.device) -> Tensor:
    """A rare list of numbers (blocks to clear) on the device; not for what every step needs."""
    return torch.from_numpy(values).to(device)


def to_host(tensor: Tensor) -> Array:
    """A large and rare result (logprobs) as NumPy, after the event of the step that made it."""
    return tensor.cpu().numpy()
