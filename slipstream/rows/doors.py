"""The two doors between host and device. In: staged writes, packed, one copy, one kernel. Out: a packed
record a step.

A buffer is reused only after the event of its last reader (its ticket): queue depth is never trusted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch

from slipstream.kernels.commit import CommitRecord, CommitRing
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

    def reset(self) -> None:
        """Nothing is in flight: the next to be taken is the first."""
        self._tickets, self._next = [None] * len(self._items), 0


class Payload:
    """One packed set of staged writes in host memory, pinned on a CUDA device: dst of S spans, start of each
    and of the end, then the words."""

    def __init__(self, words: int, pinned: bool) -> None:
        self.data = torch.empty(words, dtype=torch.int32, pin_memory=pinned)
        self.host: Array = self.data.numpy()


@dataclass(slots=True)
class StagedWrites:
    """What one flush packed: views of a ring buffer, valid until the event given to `done_by`."""

    ring: Ring[Payload]
    slot: int
    payload: Payload
    num_spans: int
    num_words: int

    def apply(self, arena: Tensor) -> None:
        """Runs on the stream: one copy, one kernel."""
        if self.num_spans == 0:
            return
        first = 2 * self.num_spans + 1
        packed = self.payload.data[: first + self.num_words].to(arena.device, non_blocking=True)
        scatter_spans(arena, packed[first:], packed[: self.num_spans], packed[self.num_spans : first])

    def done_by(self, event: Ticket) -> None:
        self.ring.give_ticket(self.slot, event)


class InDoor:
    """Collects spans on the host between flushes. Spans of one flush never overlap: their order is not kept.

    Not thread-safe: the engine's thread owns it.
    """

    def __init__(self, slots: int, pinned: bool, words: int = 1 << 16) -> None:
        self._ring = Ring(lambda: Payload(words, pinned), slots)
        self._pinned = pinned
        self._dst: list[Array] = []
        self._length: list[Array] = []
        self._data: list[Array] = []

    def span(self, dst: int, values: Array) -> None:
        """Stage int32 values for arena[dst : dst + len(values)]."""
        if len(values):
            self._dst.append(np.array([dst], np.int64))
            self._length.append(np.array([len(values)], np.int32))
            self._data.append(values)

    def cells(self, dst: Array, values: Array) -> None:
        """Stage single words: arena[dst[i]] = values[i]; dst int64, values int32."""
        if len(values):
            self._dst.append(dst)
            self._length.append(np.ones(len(dst), np.int32))
            self._data.append(values)

    def flush(self) -> StagedWrites:
        """Pack what was staged. The caller gives the ticket of the step that applies it."""
        slot, payload = self._ring.take()
        if not self._dst:
            return StagedWrites(self._ring, slot, payload, 0, 0)
        length = np.concatenate(self._length)
        num_spans, num_words = len(length), int(length.sum())
        first = 2 * num_spans + 1
        if first + num_words > len(payload.host):
            payload = Payload(2 * (first + num_words), self._pinned)
            self._ring.replace(slot, payload)
        host = payload.host
        np.concatenate(self._dst, out=host[:num_spans], casting="same_kind")
        host[num_spans] = 0
        np.cumsum(length, out=host[num_spans + 1 : first])
        np.concatenate(self._data, out=host[first : first + num_words])
        for staged in (self._dst, self._length, self._data):
            staged.clear()
        return StagedWrites(self._ring, slot, payload, num_spans, num_words)

    def reset(self) -> None:
        """Nothing is in flight, and what was staged is forgotten."""
        self._ring.reset()
        self._dst, self._length, self._data = [], [], []


@dataclass(frozen=True, slots=True)
class HostRecord:
    """What the host learns of a step, int32: count_L, tokens appended; finish_L, codes; token_LQ, of which
    the first count are valid; drafted_L, drafts verified, or None where rows have none."""

    count_L: Array
    finish_L: Array
    token_LQ: Array
    drafted_L: Array | None


class OutRecord:
    """One step's record in host memory, int32 [X, lanes]: tokens appended, finish code, token; of an engine
    whose rows have drafts: tokens appended, finish code, drafts verified, then a line for each token."""

    def __init__(self, memory_XL: Tensor) -> None:
        self.memory_XL = memory_XL
        self.host: Array = memory_XL.numpy()

    def lines(self, lanes: int) -> CommitRecord:
        """Where commit writes."""
        return CommitRecord(*self.memory_XL[:, :lanes])

    def draft_lines(self, lanes: int) -> Tensor:
        """Where commit_drafts writes."""
        return self.memory_XL[:, :lanes]

    def read(self, lanes: int, drafts: int) -> HostRecord:
        """Runs on the host after the step's event: a copy, so that the record can be reused at once. drafts:
        most of a lane in this step."""
        if len(self.host) == 3:
            count_L, finish_L, token_L = self.host[:, :lanes].copy()
            return HostRecord(count_L, finish_L, token_L[:, None], None)
        lines = self.host[: 4 + drafts, :lanes].copy()
        return HostRecord(lines[0], lines[1], lines[3:].T, lines[2] if drafts else None)


class OutDoor:
    """Records taken in turn. On a CUDA device they are pinned, and commit's kernel stores into them: no copy.

    A captured step has one address for all its launches, so the device counts the turns itself
    (commit_ring); take() must be called once a step, in the order of the steps. queries: tokens that a lane
    may gain in a step, 0 where rows have no drafts.
    """

    def __init__(self, slots: int, max_lanes: int, device: torch.device, queries: int = 0) -> None:
        pinned = device.type == "cuda"
        memory_SXL = torch.zeros(slots, 3 + queries, max_lanes, dtype=torch.int32, pin_memory=pinned)
        self.commit_ring = CommitRing(memory_SXL, torch.zeros(2, dtype=torch.int32, device=device))
        records = iter(memory_SXL)
        self.ring = Ring(lambda: OutRecord(next(records)), slots)

    @torch.inference_mode()
    def reset(self) -> None:
        """Runs on the stream, with nothing in flight: host and device take the first record next."""
        self.ring.reset()
        self.commit_ring.turn_2.zero_()


def seen(tensor: Tensor) -> Array:
    """Runs on a CPU's stream, which is the device: the values as they are now, to size work by."""
    if tensor.device.type != "cpu":
        raise ValueError("a step on a GPU never waits to see what it has computed")
    return tensor.numpy()


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros whose pages a CPU takes only as they are written: a large pool costs nothing at start."""
    if device.type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    memory = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(memory).view(dtype).view(*shape)


def from_host(values: Array, device: torch.device) -> Tensor:
    """A rare list of numbers (blocks to clear) on the device, without waiting for it; not for what every step
    needs."""
    host = torch.from_numpy(values)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def leave(tensor: Tensor) -> Tensor:
    """Runs on the stream: a large and rare result (logprobs) on its way to the host. Read it, by numpy(),
    after the event of its step."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
