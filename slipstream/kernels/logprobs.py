"""Log-probabilities of the raw distribution: of given tokens, their rank, and the most likely ones.

On CUDA the distribution is never written: pieces of a row are reduced side by side to maximum, sum of
exponentials, rank and the maxima of chunks of 32 tokens; one program a row merges them and finds the top
tokens, chunk after chunk.

Legend: N rows of logits, b a block of them, V vocabulary, K top tokens, C pieces, D chunks.
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
from slipstream.kernels.candidates import CHUNK, top_candidates
from slipstream.kernels.lanes import LANES_AT_ONCE

Tensor = torch.Tensor

PIECE = 4096
# The top tokens are found one after the other; more of them than this are left to torch.
MOST_TOP = 64
LOWEST = tl.constexpr(-3.4028234663852886e38)


def token_logprobs(logits_NV: Tensor, token_N: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """logits: float32, or bfloat16 where Triton runs; token: int32 or int64 [N]; num_top: K, at least 0.

    Returns ids int32 [N, 1 + K] (the token, then the top K in order, lower id first where equal), values
    float32 [N, 1 + K], and rank int32 [N]: 1 + the number of tokens that are more likely.
    """
    if logits_NV.dim() != 2 or token_N.shape != logits_NV.shape[:1]:
        raise ValueError("logits must be [N, V], tokens [N]")
    if use_triton(logits_NV) and num_top <= MOST_TOP and logits_NV.stride(1) == 1:
        return _launch(logits_NV, token_N.contiguous(), min(num_top, logits_NV.shape[1]))
    logits_NV = logits_NV.float()
    # A block at a time: the temporaries of log-sum-exp and rank never reach the size of the logits.
    blocks = [slice(first, first + LANES_AT_ONCE) for first in range(0, len(token_N), LANES_AT_ONCE)]
    scores = [token_logprobs_reference(logits_NV[b], token_N[b].long(), num_top) for b in blocks]
    ids, values, rank = (torch.cat(parts) for parts in zip(*scores, strict=True))
    return ids, values, rank


def token_logprobs_reference(
    logits_bV: Tensor, token_b: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor]:
    """In torch operations, on one block."""
    id_b1 = token_b.unsqueeze(1)
    value_b1 = logits_bV.gather(1, id_b1)
    rank_b = (logits_bV > value_b1).sum(1, dtype=torch.int32) + 1
    # Relative to the highest, so that large logits cost no digits.
    highest_b1 = logits_bV.amax(1, keepdim=True)
    total_b1 = (logits_bV - highest_b1).exp_().sum(1, keepdim=True).log_()
    if num_top:
        top_bK, top_id_bK = top_candidates(logits_bV, num_top)
        value_b1, id_b1 = torch.cat((value_b1, top_bK), 1), torch.cat((id_b1, top_id_bK), 1)
    return id_b1.int(), value_b1 - highest_b1 - total_b1, rank_b


def _launch(logits_NV: Tensor, token_N: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    lanes, vocab = logits_NV.shape
    pieces, chunks, device = ceil_div(vocab, PIECE), ceil_div(vocab, CHUNK), logits_NV.device
    best_NC, sum_NC = torch.empty(2, lanes, pieces, dtype=torch.float32, device=device).unbind()
    above_NC = torch.empty(lanes, pieces, dtype=torch.int32, device=device)
    chunk_ND = torch.empty(lanes, chunks if num_top else 0, dtype=torch.float32, device=device)
    ids = torch.empty(lanes, 1 + num_top, dtype=torch.int32, device=device)
    values = torch.empty(lanes, 1 + num_top, dtype=torch.float32, device=device)
    rank_N = torch.empty(lanes, dtype=torch.int32, device=device)
    if lanes:
        _pieces_kernel[(pieces, lanes)](
            logits_NV, token_N, best_NC, sum_NC, above_NC, chunk_ND, logits_NV.stride(0), VOCAB=vocab,
            PIECES=pieces, CHUNKS=chunks, PIECE=PIECE, CHUNK=CHUNK, TOP=num_top > 0,
            **pdl_options(logits_NV), num_warps=8,
        )  # fmt: skip
        _merge_kernel[(lanes,)](
            logits_NV, token_N, best_NC, sum_NC, above_NC, chunk_ND, ids, values, rank_N, logits_NV.stride(0),
            VOCAB=vocab, PIECES=pieces, PIECES_PAD=next_power_of_2(pieces), CHUNKS=chunks,
            CHUNKS_PAD=next_power_of_2(chunks), CHUNK=CHUNK, TOP=num_top,
            **pdl_options(logits_NV), num_warps=8,
        )  # fmt: skip
    return ids, values, rank_N


@jit
def _pieces_kernel(
    logits: Arg, tokens: Arg, best: Arg, sums: Arg, aboves: Arg, chunk_best: Arg, stride: Arg,
    VOCAB: tl.constexpr, PIECES: tl.constexpr, CHUNKS: tl.constexpr, PIECE: tl.constexpr,
    CHUNK: tl.constexpr, TOP: tl.constexpr, PDL: tl.constexpr,
) -> None:
    piece, lane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = piece * PIECE + tl.arange(0, PIECE)
    pdl_begin(PDL)
    value = tl.load(logits + lane * stride + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    own = tl.load(logits + lane * stride + tl.load(tokens + lane)).to(tl.float32)
    top = tl.max(value, 0)
    to = lane * PIECES + piece
    tl.store(best + to, top)
    # Where all of a piece is -inf, -inf - -inf would be NaN.
    tl.store(sums + to, tl.sum(tl.exp(value - tl.maximum(top, LOWEST)), 0))
    tl.store(aboves + to, tl.sum((value > own).to(tl.int32), 0))
    if TOP:
        chunk = piece * (PIECE // CHUNK) + tl.arange(0, PIECE // CHUNK)
        highest = tl.max(tl.reshape(value, (PIECE // CHUNK, CHUNK)), 1)
        tl.store(chunk_best + lane * CHUNKS + chunk, highest, mask=chunk < CHUNKS)


@jit
def _merge_kernel(
    logits: Arg, tokens: Arg, best: Arg, sums: Arg, aboves: Arg, chunk_best: Arg, ids: Arg, values: Arg,
    rank: Arg, stride: Arg,
    VOCAB: tl.constexpr, PIECES: tl.constexpr, PIECES_PAD: tl.constexpr, CHUNKS: tl.constexpr,
    CHUNKS_PAD: tl.constexpr, CHUNK: tl.constexpr, TOP: tl.constexpr, PDL: tl.constexpr,
) -> None:
    lane = tl.program_id(0).to(tl.int64)
    piece, chunk, member = tl.arange(0, PIECES_PAD), tl.arange(0, CHUNKS_PAD), tl.arange(0, CHUNK)
    at, inside = lane * PIECES + piece, piece < PIECES
    pdl_begin(PDL)
    top = tl.load(best + at, mask=inside, other=float("-inf"))
    highest = tl.max(top, 0)
    total = tl.load(sums + at, mask=inside, other=0.0) * tl.exp(tl.maximum(top, LOWEST) - highest)
    log_total = tl.log(tl.sum(total, 0))
    tl.store(rank + lane, 1 + tl.sum(tl.load(aboves + at, mask=inside, other=0), 0))
    own, to = tl.load(tokens + lane).to(tl.int32), lane * (1 + TOP)
    logits += lane * stride
    tl.store(ids + to, own)
    tl.store(values + to, tl.load(logits + own).to(tl.float32) - highest - log_total)
    if TOP > 0:
        left = tl.load(chunk_best + lane * CHUNKS + chunk, mask=chunk < CHUNKS, other=float("-inf"))
        last_value, last = highest, own * 0 - 1
        for place in range(1, TOP + 1):
            value = tl.max(left, 0)
            # Equal maxima: the lower chunk has the lower ids. (Clamped, for rows of NaN.)
            first = tl.minimum(tl.min(tl.where(left == value, chunk, CHUNKS_PAD), 0), CHUNKS - 1)
            token = first * CHUNK + member
            of_chunk = tl.load(logits + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
            # Taken in order, so what is not taken comes after the last one taken.
            open_ = (of_chunk < last_value) | ((of_chunk == last_value) & (token > last))
            found = tl.min(tl.where(open_ & (of_chunk == value) & (token < VOCAB), token, VOCAB - 1), 0)
            tl.store(ids + to + place, found)
            tl.store(values + to + place, value - highest - log_total)
            rest = (of_chunk < value) | ((of_chunk == value) & (token > found))
            rest_best = tl.max(tl.where(rest & (token < VOCAB), of_chunk, float("-inf")), 0)
            left = tl.where(chunk == first, rest_best, left)
            last_value, last = value, found
