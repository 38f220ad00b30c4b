"""The two doors between host and device. In: staged writes, packed, which one kernel takes from host memory.
Out: a packed record a step.

A buffer is reused only after the event of its last reader (its ticket): queue depth is never trusted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch

from slipstream.kernels.commit import CommitRecord, CommitRing
from slipstream.kernels.scatter import HEAD, scatter_words
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


class PackedWords:
    """What kernels/scatter.py reads, and the host's views of it: count_1, place and word, int32 arrays of 1,
    C and C numbers, C = most. replay: the scatter as a CUDA graph, if somebody has captured it."""

    def __init__(self, most: int, pinned: bool) -> None:
        self.packed = torch.zeros(HEAD + 2 * most, dtype=torch.int32, pin_memory=pinned)
        host = self.packed.numpy()
        self.count_1, self.place, self.word = host[:1], host[HEAD : HEAD + most], host[HEAD + most :]
        self.replay: Callable[[], None] | None = None

    def grown(self, filled: int, needed: int) -> PackedWords:
        """Room for `needed` and as many again, with the first `filled` of these."""
        larger = PackedWords(2 * needed, self.packed.is_pinned())
        larger.place[:filled], larger.word[:filled] = self.place[:filled], self.word[:filled]
        return larger

    def scatter(self, arena: Tensor) -> None:
        """Runs on the stream: what stands here then."""
        scatter_words(arena, self.packed)


@dataclass(slots=True)
class StagedWrites:
    """What one flush staged: a buffer of the ring, valid until the event given to `done_by`."""

    ring: Ring[PackedWords]
    slot: int
    words: PackedWords

    def apply(self, arena: Tensor) -> None:
        """Runs on the stream."""
        if not self.replay():
            self.words.scatter(arena)

    def replay(self) -> bool:
        """The same by a graph; False, and nothing is done, where there is none."""
        if self.words.replay is not None:
            self.words.replay()
        return self.words.replay is not None

    def done_by(self, event: Ticket) -> None:
        self.ring.give_ticket(self.slot, event)


class InDoor:
    """Collects words on the host between flushes. No place is written twice in one flush: the order is not
    kept.

    Not thread-safe: the engine's thread owns it.
    """

    def __init__(self, slots: int, pinned: bool, most: int = 1 << 16) -> None:
        self._buffers = [PackedWords(most, pinned) for _ in range(slots)]
        self._ring = Ring(iter(self._buffers).__next__, slots)
        self._slot, self._words, self._count = 0, self._buffers[0], 0

    def span(self, dst: int, values: Array) -> None:
        """Stage int32 values for arena[dst : dst + len(values)]."""
        self.cells(np.arange(dst, dst + len(values), dtype=np.int32), values)

    def cells(self, dst: Array, values: Array) -> None:
        """Stage single words: arena[dst[i]] = values[i]; integers, values int32."""
        if not len(values):
            return
        if not self._count:
            self._slot, self._words = self._ring.take()
        first, self._count = self._count, self._count + len(values)
        if self._count > len(self._words.place):
            self._words = self._words.grown(first, self._count)
            self._ring.replace(self._slot, self._words)
        self._words.place[first : self._count] = dst
        self._words.word[first : self._count] = values

    def flush(self) -> StagedWrites | None:
        """What was staged, None if nothing was. The caller gives the ticket of the step that applies it."""
        if not self._count:
            return None
        self._words.count_1[0], self._count = self._count, 0
        return StagedWrites(self._ring, self._slot, self._words)

    def launch(self, arena: Tensor) -> None:
        """On the stream, before anything is staged: a scatter of nothing, so that its kernel is there."""
        self._buffers[0].scatter(arena)

    def capture(self, arena: Tensor, capture: Callable[[Callable[[], None]], Callable[[], None]]) -> None:
        """capture: makes a graph of what a function launches, and returns what replays it."""
        for words in self._buffers:
            words.replay = capture(functools.partial(words.scatter, arena))

    def reset(self) -> None:
        """Nothing is in flight, and what was staged is forgotten."""
        self._ring.reset()
        self._count = 0


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
