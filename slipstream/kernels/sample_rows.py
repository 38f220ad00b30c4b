"""One token a lane, by its row's own columns: greedy, temperature, min_p, top_k, top_p and Gumbel noise.

A scan of the logits (sample_scan.py), then a program a lane that ends greedy rows, plain draws, and every
truncated row whose choice lies among its few highest chunks of 32 tokens: the K-th highest chunk maximum is
at most the K-th highest logit, so chunks below it hold none of the top K. What is wider than that (top_p or
min_p over a flat distribution) is left to sample_wide.py. The reference is the eager path of
sampling/pipeline.py.

Legend: N sampling lanes, V vocabulary, C pieces, D chunks, L listed chunks, K candidates.
"""

from __future__ import annotations

from typing import Any

import torch

from slipstream.kernels.backend import (
    Arg,
    jit,
    jit_with,
    next_power_of_2,
    pdl_begin,
    pdl_options,
    tl,
    use_triton,
)
from slipstream.kernels.noise import PURPOSE_TOKEN, lane_key
from slipstream.kernels.sample_scan import CHUNK, RowParams, row_rules, scan_rows
from slipstream.kernels.sample_wide import sample_wide
from slipstream.kernels.search import (
    FAR,
    LOWEST,
    distance_bits,
    draw_among,
    farthest_bits,
    first_highest,
    last_kept,
)

Tensor = torch.Tensor

# A small top_k is cut out of so many tokens at least, as docs/sampling.md states it.
SMALL_TOP_K, SMALL_CANDIDATES = 64, 128
# Other rows get the tokens of so many chunks, and may list so many where chunks are equal.
FEW_CHUNKS, LISTED = 512, 1024
CANDIDATES = 2048


def sample_rows(
    logits_NV: Tensor, row_N: Tensor, length_N: Tensor, params: RowParams, sum_NC: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """token int32 [N] and ok bool [N], False where raw logits are not finite, no token is legal, or the row
    is not alive; the token is 0 there.

    logits: float32 or bfloat16 [N, V], a row's elements adjacent, never changed; row: int64; length: int32,
    the token's position. sum: sums of pieces of the raw logits (copy_rows), where logits have been edited.
    Raises ValueError for other shapes, and where there is no Triton.
    """
    if logits_NV.dim() != 2 or logits_NV.stride(1) != 1 or not use_triton(logits_NV):
        raise ValueError("logits must be [N, V], a row's elements adjacent, where Triton runs")
    lanes, vocab = logits_NV.shape
    if row_N.shape != (lanes,) or length_N.shape != (lanes,) or not row_N.is_contiguous():
        raise ValueError("every lane needs its row and length")
    device = logits_NV.device
    token_N = torch.empty(lanes, dtype=torch.int32, device=device)
    ok_N = torch.empty(lanes, dtype=torch.bool, device=device)
    if not lanes:
        return token_N, ok_N
    length_N = length_N.contiguous()
    scan = scan_rows(logits_NV, row_N, length_N, params, sum_NC)
    list_NL = torch.empty(lanes, LISTED, dtype=torch.int32, device=device)
    bits_NK, id_NK = torch.empty(2, lanes, CANDIDATES, dtype=torch.int32, device=device).unbind()
    wide_N = torch.empty(lanes, dtype=torch.int32, device=device)
    _pick_kernel[(lanes,)](
        logits_NV, row_N, length_N, *params.columns(), params.stride,
        scan.best_NC, scan.id_NC, scan.sum_NC, scan.score_NC, scan.mass_NC, scan.chunk_ND,
        list_NL, bits_NK, id_NK, token_N, ok_N, wide_N, logits_NV.stride(0), VOCAB=vocab,
        PIECES=scan.pieces, PIECES_PAD=next_power_of_2(scan.pieces), CHUNKS=scan.chunks,
        CHUNKS_PAD=next_power_of_2(scan.chunks), CHUNK=CHUNK, LISTED=LISTED, CANDIDATES=CANDIDATES,
        FEW_CHUNKS=FEW_CHUNKS, SMALL_TOP_K=SMALL_TOP_K, SMALL_CANDIDATES=SMALL_CANDIDATES,
        PURPOSE=PURPOSE_TOKEN, **pdl_options(logits_NV), num_warps=8, maxnreg=128,
    )  # fmt: skip
    sample_wide(logits_NV, row_N, length_N, params, scan, wide_N, bits_NK, id_NK, token_N)
    return token_N, ok_N


@jit_with(do_not_specialize=("row_stride",))
def _pick_kernel(
    logits: Arg, rows: Arg, lengths: Arg, alive: Arg, temperatures: Arg, top_ks: Arg, top_ps: Arg,
    min_ps: Arg, seeds_lo: Arg, seeds_hi: Arg, row_stride: Arg,
    best: Arg, ids: Arg, sums: Arg, scores: Arg, masses: Arg, chunk_best: Arg,
    listed: Arg, bits_out: Arg, ids_out: Arg, token_out: Arg, ok_out: Arg, wide_out: Arg, stride: Arg,
    VOCAB: tl.constexpr, PIECES: tl.constexpr, PIECES_PAD: tl.constexpr, CHUNKS: tl.constexpr,
    CHUNKS_PAD: tl.constexpr, CHUNK: tl.constexpr, LISTED: tl.constexpr, CANDIDATES: tl.constexpr,
    FEW_CHUNKS: tl.constexpr, SMALL_TOP_K: tl.constexpr, SMALL_CANDIDATES: tl.constexpr,
    PURPOSE: tl.constexpr, PDL: tl.constexpr,
) -> None:
    lane = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, PIECES_PAD)
    inside = piece < PIECES
    at = lane * PIECES + piece
    pdl_begin(PDL)
    row = tl.load(rows + lane)
    live = tl.load(alive + row * row_stride) != 0
    inside = inside & live
    top = tl.load(best + at, mask=inside, other=float("-inf"))
    total = tl.sum(tl.load(sums + at, mask=inside, other=0.0), 0)
    highest = tl.max(top, 0)
    # An infinity or NaN makes the sum one, and infinity - infinity is NaN.
    ok = live & ((total - total) == 0.0) & (highest > float("-inf"))
    temperature, top_k, top_p, min_p = row_rules(
        row, temperatures, top_ks, top_ps, min_ps, row_stride, VOCAB
    )
    greedy = temperature == 0.0
    # An edit may have made a logit overflow: greedy rows take it, for others no distribution is left.
    ok = ok & (greedy | ((highest - highest) == 0.0))
    tl.store(ok_out + lane, ok)
    tl.store(token_out + lane, 0)
    tl.store(wide_out + lane, 0)
    if ok == 0:
        return
    if greedy | ((top_k == 0) & (top_p >= 1.0) & (min_p <= 0.0)):
        value = top
        if temperature > 0.0:
            score = tl.load(scores + at, mask=inside, other=float("-inf"))
            value = tl.where(inside, score - (highest - tl.maximum(top, LOWEST)) / temperature, score)
        tl.store(token_out + lane, first_highest(value, tl.load(ids + at, mask=inside, other=FAR)))
    else:
        cold = 1.0 / temperature
        mass = tl.load(masses + at, mask=inside & (top_k == 0), other=0.0)
        mass = tl.sum(mass * tl.exp((tl.maximum(top, LOWEST) - highest) * cold), 0)
        key0, key1 = lane_key(
            tl.load(seeds_lo + row * row_stride), tl.load(seeds_hi + row * row_stride),
            tl.load(lengths + lane), PURPOSE,
        )
        chosen = _pick_among_few(
            logits + lane * stride, chunk_best + lane * CHUNKS, listed + lane * LISTED,
            bits_out + lane * CANDIDATES, ids_out + lane * CANDIDATES, highest, cold, mass, top_k, top_p,
            min_p, key0, key1, VOCAB, CHUNKS, CHUNKS_PAD, CHUNK, LISTED, CANDIDATES, FEW_CHUNKS, SMALL_TOP_K,
            SMALL_CANDIDATES,
        )
        tl.store(token_out + lane, tl.maximum(chosen, 0))
        tl.store(wide_out + lane, (chosen < 0).to(tl.int32))


@jit
def _pick_among_few(
    logits: Arg, chunk_best: Arg, listed: Arg, bits_out: Arg, ids_out: Arg, highest: Arg, cold: Arg,
    mass: Arg, top_k: Arg, top_p: Arg, min_p: Arg, key0: Arg, key1: Arg,
    VOCAB: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr, CHUNK: tl.constexpr,
    LISTED: tl.constexpr, CANDIDATES: tl.constexpr, FEW_CHUNKS: tl.constexpr, SMALL_TOP_K: tl.constexpr,
    SMALL_CANDIDATES: tl.constexpr,
) -> Any:
    """The token, or -1 where the candidates do not suffice. mass: the row's whole weight, used where top_p is
    alone."""
    cut, complete, count = _list_chunks(
        chunk_best, listed, highest, cold, top_k, farthest_bits(min_p),
        CHUNKS, CHUNKS_PAD, LISTED, FEW_CHUNKS, SMALL_TOP_K, SMALL_CANDIDATES,
    )
    found = _collect(
        logits, listed, tl.minimum(count, LISTED), bits_out, ids_out, highest, cold, cut, top_k,
        VOCAB, CHUNK, CANDIDATES, SMALL_TOP_K, SMALL_CANDIDATES,
    )
    tl.debug_barrier()
    place = tl.arange(0, CANDIDATES)
    bits = tl.load(bits_out + place, mask=place < found, other=FAR)
    token = tl.load(ids_out + place, mask=place < found, other=0)
    weight = tl.where(bits < FAR, tl.exp(-bits.to(tl.float32, bitcast=True)), 0.0)
    # With min_p on, the weight that top_p is a part of is known only where all that min_p leaves is here.
    reached = (min_p <= 0.0) & (top_p < 1.0) & (tl.sum(weight, 0) >= top_p * mass)
    enough = complete | tl.where(top_k > 0, found >= top_k, reached)
    chosen = count * 0 - 1
    if enough & (count <= LISTED) & (found <= CANDIDATES):
        target = tl.where(complete | (top_k > 0), -1.0, top_p * mass)
        chosen = draw_among(bits, token, top_k, top_p, target, key0, key1)
    return chosen


@jit
def _list_chunks(
    chunk_best: Arg, listed: Arg, highest: Arg, cold: Arg, top_k: Arg, farthest: Arg,
    CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr, LISTED: tl.constexpr, FEW_CHUNKS: tl.constexpr,
    SMALL_TOP_K: tl.constexpr, SMALL_CANDIDATES: tl.constexpr,
) -> Any:
    """List, in order, the chunks that hold every token within `cut`, or of a small top_k's equal ones the
    first. Returns cut (bits), whether no token beyond it could be drawn, and how many chunks there are."""
    chunk = tl.arange(0, CHUNKS_PAD)
    value = tl.load(chunk_best + chunk, mask=chunk < CHUNKS, other=float("-inf"))
    bits = tl.where(chunk < CHUNKS, distance_bits(value, highest, cold), FAR)
    small = (top_k > 0) & (top_k <= SMALL_TOP_K)
    wanted = tl.where((top_k > 0) & (top_k <= FEW_CHUNKS), top_k, FEW_CHUNKS)
    last = last_kept(bits, tl.full([CHUNKS_PAD], 1.0, tl.float32), wanted.to(tl.float32))
    cut = tl.minimum(last, farthest)
    equal = bits == cut
    first = tl.cumsum(equal.to(tl.int32), 0) <= SMALL_CANDIDATES
    chosen = (bits < cut) | (equal & (first | (small == 0)))
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(listed + place, chunk, mask=chosen & (place < LISTED))
    return cut, farthest <= last, tl.sum(chosen.to(tl.int32), 0)


@jit
def _collect(
    logits: Arg, listed: Arg, count: Arg, bits_out: Arg, ids_out: Arg, highest: Arg, cold: Arg, cut: Arg,
    top_k: Arg, VOCAB: tl.constexpr, CHUNK: tl.constexpr, CANDIDATES: tl.constexpr,
    SMALL_TOP_K: tl.constexpr, SMALL_CANDIDATES: tl.constexpr,
) -> Any:
    """Write the listed chunks' tokens within `cut`, in order of their ids, as far as there is room; of a
    small top_k's equal ones no more than fill up SMALL_CANDIDATES. Returns how many there are."""
    tl.debug_barrier()
    place = tl.arange(0, CANDIDATES)
    small = (top_k > 0) & (top_k <= SMALL_TOP_K)
    nearer, equals, found = count * 0, count * 0, count * 0
    for begin in range(0, tl.where(small, count * CHUNK, 0), CANDIDATES):
        _, bits = _listed_tokens(logits, listed, begin + place, count, highest, cold, VOCAB, CHUNK)
        nearer += tl.sum((bits < cut).to(tl.int32), 0)
    room = tl.where(nearer < top_k, SMALL_CANDIDATES - nearer, 0)
    for begin in range(0, count * CHUNK, CANDIDATES):
        token, bits = _listed_tokens(logits, listed, begin + place, count, highest, cold, VOCAB, CHUNK)
        equal = bits == cut
        rank = equals + tl.cumsum(equal.to(tl.int32), 0)
        chosen = (bits < cut) | (equal & ((rank <= room) | (small == 0)))
        to = found + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(bits_out + to, bits, mask=chosen & (to < CANDIDATES))
        tl.store(ids_out + to, token, mask=chosen & (to < CANDIDATES))
        equals += tl.sum(equal.to(tl.int32), 0)
        found += tl.sum(chosen.to(tl.int32), 0)
    return found


@jit
def _listed_tokens(
    logits: Arg, listed: Arg, place: Arg, count: Arg, highest: Arg, cold: Arg,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr,
) -> Any:
    """Ids and distance bits at places of the listed chunks laid end to end; FAR where there is none."""
    chunk = tl.load(listed + place // CHUNK, mask=place < count * CHUNK, other=0)
    token = chunk * CHUNK + place % CHUNK
    inside = (place < count * CHUNK) & (token < VOCAB)
    value = tl.load(logits + token, mask=inside, other=float("-inf")).to(tl.float32)
    return token, tl.where(inside, distance_bits(value, highest, cold), FAR)
