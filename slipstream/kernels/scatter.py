"""Staged-write scatter: what the host wants written, from host memory to its places in a flat arena.

It comes packed in one int32 buffer: single words with their places, and spans, cut into chunks. A GPU's
kernel reads the buffer where it is, in pinned memory, so that one launch does all, and a CUDA graph of the
launch applies whatever stands there when it is replayed.

Legend: C single words, D chunks, W words of spans; each as many as there is room for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from slipstream.kernels.backend import Arg, ceil_div, jit_with, pdl_begin, pdl_options, tl, use_triton

Tensor = torch.Tensor

HEAD = 32
CHUNK = 8192
WORDS, SPAN_WORDS = 512, 2048  # at once
# Enough for the bus from host memory, which is the limit.
PROGRAMS = 64


class Room(NamedTuple):
    """How a packed buffer is cut: [HEAD + 2 C + 3 D + W], its first two words the counts of single words and
    of chunks."""

    cells: int
    chunks: int
    words: int

    @property
    def size(self) -> int:
        return HEAD + 2 * self.cells + 3 * self.chunks + self.words

    def split(self, packed: Any) -> tuple[Any, Any, Any]:
        """Views, of a tensor or an array: [2, C] place and word; [3, D] place, start among the words, length
        up to CHUNK; [W]."""
        first = HEAD + 2 * self.cells
        last = first + 3 * self.chunks
        return packed[HEAD:first].reshape(2, -1), packed[first:last].reshape(3, -1), packed[last:]


def span_room(length: int) -> Room:
    """What a span of so many words takes."""
    return Room(0, ceil_div(length, CHUNK), length)


class Packer:
    """The host's side of a packed buffer. host: int32, of the room's size. What does not fit leaves it as it
    was; nothing counts before it is sealed."""

    def __init__(self, host: np.ndarray, room: Room) -> None:
        self.room, self._counts = room, host[:2]
        (self._place, self._word), (self._dst, self._start, self._length), self._words = room.split(host)
        self.clear()

    def clear(self) -> None:
        self._num_cells = self._num_chunks = self._num_words = 0

    def add_cells(self, dst: np.ndarray, values: np.ndarray) -> bool:
        """Word values[i] for place dst[i]; False where there is no room for them."""
        first, end = self._num_cells, self._num_cells + len(values)
        if end > self.room.cells:
            return False
        self._place[first:end], self._word[first:end] = dst, values
        self._num_cells = end
        return True

    def add_span(self, dst: int, values: np.ndarray) -> bool:
        """Words for the places from dst on; False where there is no room for them."""
        first, chunk, room = self._num_words, self._num_chunks, self.room
        end = first + len(values)
        if end > room.words or chunk + span_room(len(values)).chunks > room.chunks:
            return False
        self._words[first:end] = values
        for start in range(first, end, CHUNK):
            self._dst[chunk], self._start[chunk] = dst + start - first, start
            self._length[chunk] = min(CHUNK, end - start)
            chunk += 1
        self._num_words, self._num_chunks = end, chunk
        return True

    def seal(self) -> None:
        """What was added is what the kernel writes from now on."""
        self._counts[:] = self._num_cells, self._num_chunks


def scatter_writes(arena: Tensor, packed: Tensor, room: Room) -> None:
    """Writes what is counted. arena, packed: int32, flat, packed in host memory; no place may occur twice."""
    if any(each.dtype != torch.int32 or each.dim() != 1 for each in (arena, packed)):
        raise ValueError("arena and packed writes must be flat int32 tensors")
    if len(packed) != room.size:
        raise ValueError("packed writes must have the size of their room")
    if not use_triton(arena):
        scatter_writes_reference(arena, packed, room)
        return
    _scatter_kernel[(PROGRAMS,)](
        arena, packed, room.cells, room.chunks, HEAD=HEAD, WORDS=WORDS, SPAN_WORDS=SPAN_WORDS,
        **pdl_options(arena), num_warps=4,
    )  # fmt: skip


def scatter_writes_reference(arena: Tensor, packed: Tensor, room: Room) -> None:
    """The same in torch operations."""
    cell_2C, chunk_3D, word_W = room.split(packed)
    cells, chunks = int(packed[0]), int(packed[1])
    place_C, word_C = cell_2C[:, :cells]
    place_D, start_D, length_D = chunk_3D[:, :chunks]
    # Chunks lie in the order of their words.
    shift_W = torch.repeat_interleave(place_D - start_D, length_D)
    span_W = shift_W + torch.arange(len(shift_W), dtype=torch.int32)
    place_N, word_N = torch.cat((place_C, span_W)), torch.cat((word_C, word_W[: len(span_W)]))
    arena.index_copy_(0, place_N.to(arena.device).long(), word_N.to(arena.device))


@jit_with(do_not_specialize=("cells_room", "chunks_room"))
def _scatter_kernel(
    arena: Arg, packed: Arg, cells_room: Arg, chunks_room: Arg,
    HEAD: tl.constexpr, WORDS: tl.constexpr, SPAN_WORDS: tl.constexpr, PDL: tl.constexpr,
) -> None:
    program, programs = tl.program_id(0), tl.num_programs(0)
    pdl_begin(PDL)
    # .cv: the host has written anew what an earlier launch may have read.
    cells = tl.load(packed, cache_modifier=".cv")
    chunks = tl.load(packed + 1, cache_modifier=".cv")
    places = packed + HEAD
    for first in range(program * WORDS, cells, programs * WORDS):
        at = first + tl.arange(0, WORDS)
        inside = at < cells
        place = tl.load(places + at, mask=inside, other=0, cache_modifier=".cv")
        word = tl.load(places + cells_room + at, mask=inside, other=0, cache_modifier=".cv")
        tl.store(arena + place, word, mask=inside)
    chunk_places = places + 2 * cells_room
    words = chunk_places + 3 * chunks_room
    for chunk in range(program, chunks, programs):
        place = tl.load(chunk_places + chunk, cache_modifier=".cv")
        start = tl.load(chunk_places + chunks_room + chunk, cache_modifier=".cv")
        length = tl.load(chunk_places + 2 * chunks_room + chunk, cache_modifier=".cv")
        for first in range(0, length, SPAN_WORDS):
            at = first + tl.arange(0, SPAN_WORDS)
            word = tl.load(words + start + at, mask=at < length, other=0, cache_modifier=".cv")
            tl.store(arena + place + at, word, mask=at < length)
