"""Staged-write scatter: copies spans of a packed payload to their places in a flat arena.

arena[dst_S[s] + i] = payload_N[start_S1[s] + i] for i < start_S1[s + 1] - start_S1[s]; spans never overlap.
"""

from __future__ import annotations

import torch

from slipstream.kernels.backend import Arg, ceil_div, jit_with, pdl_begin, pdl_options, tl, use_triton

Tensor = torch.Tensor

WORDS = 512


def scatter_spans(arena: Tensor, payload_N: Tensor, dst_S: Tensor, start_S1: Tensor) -> None:
    """arena, payload_N: int32, flat; dst_S: int32 [S]; start_S1: int32 [S + 1], rising, from 0 to N."""
    if any(each.dtype != torch.int32 or each.dim() != 1 for each in (arena, payload_N, dst_S, start_S1)):
        raise ValueError("arena, payload, dst and start must be flat int32 tensors")
    if start_S1.shape[0] != dst_S.shape[0] + 1:
        raise ValueError("start needs one entry more than dst")
    if not use_triton(arena):
        scatter_spans_reference(arena, payload_N, dst_S, start_S1)
        return
    words, spans = payload_N.shape[0], dst_S.shape[0]
    if words:
        _scatter_kernel[(ceil_div(words, WORDS),)](
            arena, payload_N, dst_S, start_S1, words, spans, spans.bit_length(), WORDS=WORDS,
            **pdl_options(arena), num_warps=4,
        )


def scatter_spans_reference(arena: Tensor, payload_N: Tensor, dst_S: Tensor, start_S1: Tensor) -> None:
    """The same in torch operations."""
    count = payload_N.shape[0]
    shift_S = dst_S.long() - start_S1[:-1]
    index_N = torch.repeat_interleave(shift_S, start_S1.diff(), output_size=count)
    arena.index_copy_(0, index_N.add_(torch.arange(count, device=arena.device)), payload_N)


@jit_with(
    do_not_specialize=("words", "spans", "steps"),
    do_not_specialize_on_alignment=("payload", "dst", "start"),
)
def _scatter_kernel(
    arena: Arg, payload: Arg, dst: Arg, start: Arg, words: Arg, spans: Arg, steps: Arg,
    WORDS: tl.constexpr, PDL: tl.constexpr,
) -> None:
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    inside = word < words
    pdl_begin(PDL)
    # Binary search for the span of each word: start[low] <= word < start[high] throughout.
    low = tl.zeros([WORDS], tl.int32)
    high = low + spans
    for _ in range(steps):
        middle = (low + high) // 2
        right = tl.load(start + middle, mask=inside, other=0) <= word
        low, high = tl.where(right, middle, low), tl.where(right, high, middle)
    to = tl.load(dst + low, mask=inside, other=0) + word - tl.load(start + low, mask=inside, other=0)
    tl.store(arena + to, tl.load(payload + word, mask=inside, other=0), mask=inside)
