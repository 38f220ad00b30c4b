"""The highest logit of a row over a large vocabulary, and whether the row is finite, in one pass.

Pieces of a row are reduced side by side, then merged: two small kernels, the second over a few dozen numbers.

Legend: N sampling lanes, V vocabulary, C pieces of a row.
"""

from __future__ import annotations

import torch

from slipstream.kernels.backend import (
    Arg,
    ceil_div,
    jit,
    next_power_of_2,
    pdl_begin,
    pdl_options,
    tl,
    use_triton,
)
from slipstream.kernels.candidates import first_argmax

Tensor = torch.Tensor

PIECE = 4096


def choose_greedy(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    """The token of the highest logit, lowest id where equal: int32 [N], and bool [N], False where a row holds
    NaN or an infinity; the token is 0 there. logits: float32 or bfloat16, any stride of rows."""
    if logits_NV.dim() != 2 or logits_NV.stride(1) != 1:
        raise ValueError("logits must be [N, V], a row's elements adjacent")
    if not use_triton(logits_NV):
        return choose_greedy_reference(logits_NV)
    lanes, vocab = logits_NV.shape
    pieces, device = ceil_div(vocab, PIECE), logits_NV.device
    best_NC, sum_NC = (torch.empty(lanes, pieces, dtype=torch.float32, device=device) for _ in range(2))
    id_NC = torch.empty(lanes, pieces, dtype=torch.int32, device=device)
    token_N = torch.empty(lanes, dtype=torch.int32, device=device)
    ok_N = torch.empty(lanes, dtype=torch.bool, device=device)
    if lanes:
        _pieces_kernel[(pieces, lanes)](
            logits_NV, best_NC, id_NC, sum_NC, logits_NV.stride(0), VOCAB=vocab, PIECES=pieces, PIECE=PIECE,
            **pdl_options(logits_NV), num_warps=4,
        )
        _merge_kernel[(lanes,)](
            best_NC, id_NC, sum_NC, token_N, ok_N, PIECES=pieces, PAD=next_power_of_2(pieces),
            **pdl_options(logits_NV), num_warps=1,
        )
    return token_N, ok_N


def choose_greedy_reference(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    """The same in torch operations."""
    ok_N = logits_NV.float().sum(1).isfinite()
    return (first_argmax(logits_NV)[1] * ok_N).int(), ok_N


@jit
def _pieces_kernel(
    logits: Arg, best: Arg, ids: Arg, sums: Arg, stride: Arg,
    VOCAB: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr, PDL: tl.constexpr,
) -> None:
    piece, lane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = piece * PIECE + tl.arange(0, PIECE)
    pdl_begin(PDL)
    value = tl.load(logits + lane * stride + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    top = tl.max(value, 0)
    # The first place of the maximum; past the vocabulary nothing is a place.
    place = tl.where((value == top) & (token < VOCAB), token, VOCAB)
    to = lane * PIECES + piece
    tl.store(best + to, top)
    tl.store(ids + to, tl.min(place, 0))
    tl.store(sums + to, tl.sum(tl.where(token < VOCAB, value, 0.0), 0))


@jit
def _merge_kernel(
    best: Arg, ids: Arg, sums: Arg, token: Arg, ok: Arg,
    PIECES: tl.constexpr, PAD: tl.constexpr, PDL: tl.constexpr,
) -> None:
    lane = tl.program_id(0)
    piece = tl.arange(0, PAD)
    inside = piece < PIECES
    pdl_begin(PDL)
    value = tl.load(best + lane * PIECES + piece, mask=inside, other=float("-inf"))
    total = tl.sum(tl.load(sums + lane * PIECES + piece, mask=inside, other=0.0), 0)
    place = tl.load(ids + lane * PIECES + piece, mask=inside & (value == tl.max(value, 0)), other=2147483647)
    # An infinity or NaN makes the sum one, and infinity - infinity is NaN.
    finite = (total - total) == 0.0
    tl.store(token + lane, tl.where(finite, tl.min(place, 0), 0))
    tl.store(ok + lane, finite)
