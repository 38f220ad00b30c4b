"""Staged-write scatter: words from host memory, each to its place in a flat arena.

They come packed: int32 [HEAD + 2 C] with their count in the first word, from HEAD on places, from HEAD + C
on words. A GPU's kernel reads that where it is, in pinned memory, so that one launch does all, and a CUDA
graph of the launch applies whatever stands there when it is replayed.
"""

from __future__ import annotations

import torch

from slipstream.kernels.backend import Arg, ceil_div, jit_with, pdl_begin, pdl_options, tl, use_triton

Tensor = torch.Tensor

HEAD = 32
WORDS = 512
# Enough for the bus from host memory, which is the limit.
MOST_PROGRAMS = 32


def scatter_words(arena: Tensor, packed: Tensor) -> None:
    """arena[place_C[i]] = word_C[i] for i < count. arena: int32, flat; no place may occur twice."""
    if any(each.dtype != torch.int32 or each.dim() != 1 for each in (arena, packed)):
        raise ValueError("arena and packed words must be flat int32 tensors")
    if not use_triton(arena):
        scatter_words_reference(arena, packed)
        return
    most = (packed.shape[0] - HEAD) // 2
    _scatter_kernel[(min(ceil_div(most, WORDS), MOST_PROGRAMS),)](
        arena, packed, most, HEAD=HEAD, WORDS=WORDS, **pdl_options(arena), num_warps=4
    )


def scatter_words_reference(arena: Tensor, packed: Tensor) -> None:
    """The same in torch operations."""
    most, count = (packed.shape[0] - HEAD) // 2, int(packed[0])
    place_N, word_N = (packed[first : first + count] for first in (HEAD, HEAD + most))
    arena.index_copy_(0, place_N.to(arena.device).long(), word_N.to(arena.device))


@jit_with(do_not_specialize=("most",))
def _scatter_kernel(
    arena: Arg, packed: Arg, most: Arg, HEAD: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr
) -> None:
    first = tl.program_id(0) * WORDS
    pdl_begin(PDL)
    # .cv: the host has written anew what an earlier launch may have read.
    count = tl.load(packed, cache_modifier=".cv")
    for begin in range(first, count, tl.num_programs(0) * WORDS):
        at = begin + tl.arange(0, WORDS)
        inside = at < count
        place = tl.load(packed + HEAD + at, mask=inside, other=0, cache_modifier=".cv")
        word = tl.load(packed + HEAD + most + at, mask=inside, other=0, cache_modifier=".cv")
        tl.store(arena + place, word, mask=inside)
