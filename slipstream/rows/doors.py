"""The two doors between host and device. In: staged writes, packed, which one kernel takes from host memory.
Out: a packed record a step.

A buffer is reused only after the event of its last reader (its ticket): queue depth is never trusted.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch

from slipstream.kernels.commit import CommitRecord, CommitRing
from slipstream.kernels.scatter import Packer, Room, scatter_writes, span_room
from slipstream.rows.stream import Ticket

Array = np.ndarray
Tensor = torch.Tensor
T = TypeVar("T")


class Ring(Generic[T]):
    """Buffers taken in turn; take() waits for the last reader of the buffer it hands out."""

    def __init__(self, make: Callable[[], T], slots: int) -> None:
        self.items = [make() for _ in range(slots)]
        self._tickets: list[Ticket | None] = [None] * slots
        self._next = 0

    def take(self) -> tuple[int, T]:
        """A free buffer and the slot to give its ticket to."""
        slot = self._next
        self._next = (slot + 1) % len(self.items)
        ticket = self._tickets[slot]
        if ticket is not None:
            ticket.wait()
            self._tickets[slot] = None
        return slot, self.items[slot]

    def give_ticket(self, slot: int, event: Ticket) -> None:
        self._tickets[slot] = event

    def reset(self) -> None:
        """Nothing is in flight: the next to be taken is the first."""
        self._tickets, self._next = [None] * len(self.items), 0


class PackedWrites(Packer):
    """Staged writes, in memory that is pinned for a CUDA device. replay: their scatter as a CUDA graph, if
    somebody has captured it."""

    def __init__(self, room: Room, pinned: bool) -> None:
        self._packed = torch.zeros(room.size, dtype=torch.int32, pin_memory=pinned)
        super().__init__(self._packed.numpy(), room)
        self.replay: Callable[[], None] | None = None

    def scatter(self, arena: Tensor) -> None:
        """Runs on the stream: what stands here then."""
        scatter_writes(arena, self._packed, self.room)


@dataclass(slots=True)
class StagedWrites:
    """What one flush staged: buffers of the ring, valid until the event given to `done_by`."""

    ring: Ring[list[PackedWrites]]
    slot: int
    buffers: list[PackedWrites]

    def apply(self, arena: Tensor) -> None:
        """Runs on the stream."""
        if not self.replay():
            for buffer in self.buffers:
                buffer.scatter(arena)

    def replay(self) -> bool:
        """The same by a graph; False, and nothing is done, where there is none."""
        replay = self.buffers[0].replay
        if replay is None or len(self.buffers) > 1:
            return False
        replay()
        return True

    def done_by(self, event: Ticket) -> None:
        self.ring.give_ticket(self.slot, event)


class InDoor:
    """Collects writes on the host between flushes. No place is written twice in one flush: the order is not
    kept. room: of a buffer. What it cannot hold goes into another, for this flush alone.

    Not thread-safe: the engine's thread owns it.
    """

    def __init__(self, slots: int, pinned: bool, room: Room) -> None:
        self._ring = Ring(lambda: [PackedWrites(room, pinned)], slots)
        self._pinned, self._room = pinned, room
        self._slot = 0
        self._open: list[PackedWrites] = []  # all but the last are full

    def span(self, dst: int, values: Array) -> None:
        """Stage int32 values for arena[dst : dst + len(values)]."""
        if len(values) and not (self._open and self._open[-1].add_span(dst, values)):
            self._another(span_room(len(values))).add_span(dst, values)

    def cells(self, dst: Array, values: Array) -> None:
        """Stage single words: arena[dst[i]] = values[i]; integers, values int32."""
        if len(values) and not (self._open and self._open[-1].add_cells(dst, values)):
            self._another(Room(len(values), 0, 0)).add_cells(dst, values)

    def _another(self, needed: Room) -> PackedWrites:
        """A buffer that has so much room: the slot's own, or behind those that are full."""
        if not self._open:
            self._slot, self._open = self._ring.take()
            del self._open[1:]
            self._open[0].clear()
            if all(map(operator.le, needed, self._room)):
                return self._open[0]
        self._open.append(PackedWrites(Room(*map(max, needed, self._room)), self._pinned))
        return self._open[-1]

    def flush(self) -> StagedWrites | None:
        """What was staged, None if nothing was. The caller gives the ticket of the step that applies it."""
        buffers, self._open = self._open, []
        for buffer in buffers:
            buffer.seal()
        return StagedWrites(self._ring, self._slot, buffers) if buffers else None

    def launch(self, arena: Tensor) -> None:
        """On the stream, before anything is staged: a scatter of nothing, so that its kernel is there."""
        self._ring.items[0][0].scatter(arena)

    def capture(self, arena: Tensor, capture: Callable[[Callable[[], None]], Callable[[], None]]) -> None:
        """capture: makes a graph of what a function launches, and returns what replays it."""
        for buffer, *_ in self._ring.items:
            buffer.replay = capture(functools.partial(buffer.scatter, arena))

    def reset(self) -> None:
        """Nothing is in flight, and what was staged is forgotten."""
        self._ring.reset()
        self._open = []


@dataclass(slots=True)
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
