"""One token a lane, by its row's own columns: greedy, temperature, min_p, top_k, top_p and Gumbel noise.

A scan of the logits (sample_scan.py), then a program a lane that picks the token:

- Rows without top_k have their best noisy token among the whole vocabulary. It is the choice if top_p and
  min_p keep it; where that is not plain from its own weight, sample_wide.py weighs the tokens above it.
- Rows with top_k have it among their highest chunks of 32 tokens: the K-th highest chunk maximum is at most
  the K-th highest logit, so chunks below it hold none of the top K. A large top_k is left to sample_wide.py.

The reference is the eager path of sampling/pipeline.py.

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
from slipstream.kernels.noise import PURPOSE_TOKEN, fast_exp2, lane_key, mix_word, token_cost
from slipstream.kernels.sample_scan import CHUNK, PIECE, RowParams, row_rules, scan_rows
from slipstream.kernels.sample_wide import BEST_TO_WEIGH, LARGE_TOP_K, sample_wide
from slipstream.kernels.search import (
    FAR,
    LOG2_E,
    LOWEST,
    bracket,
    distance_bits,
    draw_among,
    draw_among_few,
    farthest_bits,
    first_lowest,
    nth_of_few,
)

Tensor = torch.Tensor

# A small top_k is cut out of so many tokens at least, as docs/sampling.md states it.
SMALL_TOP_K, SMALL_CANDIDATES = 64, 128
# The most chunks listed, tokens collected from them, and with them the largest top_k that is not wide.
LISTED, CANDIDATES = 1024, 2048


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
        scan.best_NC, scan.sum_NC, scan.score_NC, scan.mass_NC, scan.chunk_ND,
        list_NL, bits_NK, id_NK, token_N, ok_N, wide_N, logits_NV.stride(0), VOCAB=vocab,
        PIECES=scan.pieces, PIECES_PAD=next_power_of_2(scan.pieces), PIECE=PIECE, CHUNKS=scan.chunks,
        CHUNKS_PAD=next_power_of_2(scan.chunks), CHUNK=CHUNK, LISTED=LISTED, CANDIDATES=CANDIDATES,
        SMALL_TOP_K=SMALL_TOP_K, SMALL_CANDIDATES=SMALL_CANDIDATES, BEST_TO_WEIGH=BEST_TO_WEIGH,
        LARGE_TOP_K=LARGE_TOP_K, PURPOSE=PURPOSE_TOKEN, **pdl_options(logits_NV), num_warps=8, maxnreg=128,
    )  # fmt: skip
    sample_wide(logits_NV, row_N, length_N, params, scan, wide_N, token_N)
    return token_N, ok_N


@jit_with(do_not_specialize=("row_stride",))
def _pick_kernel(
    logits: Arg, rows: Arg, lengths: Arg, alive: Arg, temperatures: Arg, top_ks: Arg, top_ps: Arg,
    min_ps: Arg, seeds_lo: Arg, seeds_hi: Arg, row_stride: Arg,
    best: Arg, sums: Arg, scores: Arg, masses: Arg, chunk_best: Arg,
    listed: Arg, bits_out: Arg, ids_out: Arg, token_out: Arg, ok_out: Arg, wide_out: Arg, stride: Arg,
    VOCAB: tl.constexpr, PIECES: tl.constexpr, PIECES_PAD: tl.constexpr, PIECE: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr, CHUNK: tl.constexpr, LISTED: tl.constexpr,
    CANDIDATES: tl.constexpr, SMALL_TOP_K: tl.constexpr, SMALL_CANDIDATES: tl.constexpr,
    BEST_TO_WEIGH: tl.constexpr, LARGE_TOP_K: tl.constexpr, PURPOSE: tl.constexpr, PDL: tl.constexpr,
) -> None:
    lane = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, PIECES_PAD)
    at = lane * PIECES + piece
    pdl_begin(PDL)
    row = tl.load(rows + lane)
    live = tl.load(alive + row * row_stride) != 0
    inside = piece < tl.where(live, PIECES, 0)
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
    if ok == 0:
        tl.store(token_out + lane, 0)
        tl.store(wide_out + lane, 0)
        return
    logits += lane * stride
    chosen, wide = top_k * 0, top_k * 0
    if greedy:
        chosen = _first_highest(logits, top, highest, VOCAB, PIECES_PAD, PIECE)
    else:
        cold = 1.0 / temperature
        key0, key1 = lane_key(
            tl.load(seeds_lo + row * row_stride), tl.load(seeds_hi + row * row_stride),
            tl.load(lengths + lane), PURPOSE,
        )
        if top_k == 0:
            score = tl.load(scores + at, mask=inside, other=float("inf"))
            mass = tl.load(masses + at, mask=inside, other=0.0)
            chosen, kept = _pick_of_all(
                logits, top, score, mass, highest, cold, top_p, min_p, key0, key1, VOCAB, PIECES_PAD, PIECE
            )
            wide = tl.where(kept, 0, BEST_TO_WEIGH)
        else:
            chosen = _pick_of_top(
                logits, chunk_best + lane * CHUNKS, listed + lane * LISTED, bits_out + lane * CANDIDATES,
                ids_out + lane * CANDIDATES, distance_bits(top, highest, cold), highest, cold, top_k, top_p,
                min_p, key0, key1, VOCAB, CHUNKS, CHUNKS_PAD, CHUNK, LISTED, CANDIDATES, SMALL_TOP_K,
                SMALL_CANDIDATES,
            )  # fmt: skip
            wide = tl.where(chosen < 0, LARGE_TOP_K, 0)
    tl.store(token_out + lane, chosen)
    tl.store(wide_out + lane, wide)


@jit
def _first_highest(
    logits: Arg, top_C: Arg, highest: Arg, VOCAB: tl.constexpr, PIECES_PAD: tl.constexpr, PIECE: tl.constexpr
) -> Any:
    """The first token that has the highest logit. top: of each piece."""
    piece = tl.min(tl.where(top_C == highest, tl.arange(0, PIECES_PAD), FAR), 0)
    token = piece * PIECE + tl.arange(0, PIECE)
    value = tl.load(logits + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    return tl.min(tl.where(value == highest, token, FAR), 0)


@jit
def _pick_of_all(
    logits: Arg, top_C: Arg, score_C: Arg, mass_C: Arg, highest: Arg, cold: Arg, top_p: Arg, min_p: Arg,
    key0: Arg, key1: Arg, VOCAB: tl.constexpr, PIECES_PAD: tl.constexpr, PIECE: tl.constexpr,
) -> Any:
    """The best noisy token, and whether it is plain that top_p and min_p keep it. mass: anything where top_p
    is off."""
    below_C = (highest - tl.maximum(top_C, LOWEST)) * (cold * LOG2_E)
    mass = tl.sum(mass_C * fast_exp2(-below_C), 0)
    piece = first_lowest(score_C + below_C, tl.arange(0, PIECES_PAD))
    token = piece * PIECE + tl.arange(0, PIECE)
    value = tl.load(logits + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    cost = token_cost(mix_word(token.to(tl.uint32)), key0, key1)
    noisy = cost * fast_exp2((highest - value) * (cold * LOG2_E))
    chosen = tl.minimum(first_lowest(noisy, token), VOCAB - 1)
    bits = distance_bits(tl.max(tl.where(token == chosen, value, float("-inf")), 0), highest, cold)
    weight = tl.exp(-bits.to(tl.float32, bitcast=True))
    # All above it weigh at most mass - weight; the margin is for the rounding of sums.
    kept = (top_p >= 1.0) | (weight > (1.0001 - top_p) * mass)
    return chosen, (bits == 0) | (kept & (bits <= farthest_bits(min_p)))


@jit
def _pick_of_top(
    logits: Arg, chunk_best: Arg, listed: Arg, bits_out: Arg, ids_out: Arg, piece_bits: Arg, highest: Arg,
    cold: Arg, top_k: Arg, top_p: Arg, min_p: Arg, key0: Arg, key1: Arg,
    VOCAB: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr, CHUNK: tl.constexpr,
    LISTED: tl.constexpr, CANDIDATES: tl.constexpr, SMALL_TOP_K: tl.constexpr,
    SMALL_CANDIDATES: tl.constexpr,
) -> Any:
    """The token, or -1 where the candidates do not suffice. piece_bits: distances of the pieces' highest."""
    chosen = top_k * 0 - 1
    if top_k <= LISTED:
        small = top_k <= SMALL_TOP_K
        cut, count = _list_chunks(
            chunk_best, listed, piece_bits, highest, cold, top_k, small, farthest_bits(min_p),
            CHUNKS, CHUNKS_PAD, CHUNK, LISTED, CANDIDATES, SMALL_CANDIDATES,
        )  # fmt: skip
        tl.debug_barrier()
        place = tl.arange(0, CANDIDATES)
        if count * CHUNK <= CANDIDATES:
            token, bits = _listed_tokens(logits, listed, place, count, highest, cold, VOCAB, CHUNK)
            bits = tl.where(bits <= cut, bits, FAR)
            found = count * CHUNK
        else:
            found = _collect(
                logits, listed, tl.minimum(count, LISTED), bits_out, ids_out, highest, cold, cut, small,
                VOCAB, CHUNK, CANDIDATES, SMALL_CANDIDATES,
            )
            tl.debug_barrier()
            bits = tl.load(bits_out + place, mask=place < found, other=FAR)
            token = tl.load(ids_out + place, mask=place < found, other=0)
            tl.debug_barrier()
        if (count <= LISTED) & (found <= CANDIDATES):
            if small:
                few = tl.arange(0, SMALL_CANDIDATES)
                kept = _keep_few(bits, token, bits_out, ids_out, cut, top_k, SMALL_CANDIDATES)
                tl.debug_barrier()
                few_bits = tl.load(bits_out + few, mask=few < kept, other=FAR)
                few_token = tl.load(ids_out + few, mask=few < kept, other=0)
                chosen = draw_among_few(few_bits, few_token, top_k, top_p, key0, key1)
            else:
                chosen = draw_among(bits, token, top_k, top_p, key0, key1)
    return chosen


@jit
def _list_chunks(
    chunk_best: Arg, listed: Arg, piece_bits: Arg, highest: Arg, cold: Arg, top_k: Arg, small: Arg,
    farthest: Arg, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr, CHUNK: tl.constexpr,
    LISTED: tl.constexpr, CANDIDATES: tl.constexpr, SMALL_CANDIDATES: tl.constexpr,
) -> Any:
    """List, in order, chunks that hold every token within `cut`, a little wider than the top k, or of a small
    top_k's equal ones the first. Returns cut (bits) and how many chunks there are."""
    chunk = tl.arange(0, CHUNKS_PAD)
    value = tl.load(chunk_best + chunk, mask=chunk < CHUNKS, other=float("-inf"))
    bits = tl.where(chunk < CHUNKS, distance_bits(value, highest, cold), FAR)
    enough = tl.where(small, CANDIDATES // CHUNK, tl.minimum(top_k + top_k // 4, LISTED))
    # Each piece's highest is some chunk's: the K-th of those bounds the K-th chunk from below.
    within, _ = bracket(bits, top_k, enough, nth_of_few(piece_bits, top_k))
    cut = tl.minimum(within, farthest)
    chosen = bits <= cut
    if small & (tl.sum(chosen.to(tl.int32), 0) > enough):
        # Then cut is the K-th chunk's itself, and beyond so many equal ones none has a place.
        equal = bits == cut
        chosen = (bits < cut) | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= SMALL_CANDIDATES))
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(listed + place, chunk, mask=chosen & (place < LISTED))
    return cut, tl.sum(chosen.to(tl.int32), 0)


@jit
def _collect(
    logits: Arg, listed: Arg, count: Arg, bits_out: Arg, ids_out: Arg, highest: Arg, cold: Arg, cut: Arg,
    small: Arg, VOCAB: tl.constexpr, CHUNK: tl.constexpr, CANDIDATES: tl.constexpr,
    SMALL_CANDIDATES: tl.constexpr,
) -> Any:
    """Write the listed chunks' tokens within `cut`, in order of their ids, as far as there is room; of a
    small top_k's equal ones no more than SMALL_CANDIDATES. Returns how many there are."""
    place = tl.arange(0, CANDIDATES)
    equals, found = count * 0, count * 0
    for begin in range(0, count * CHUNK, CANDIDATES):
        token, bits = _listed_tokens(logits, listed, begin + place, count, highest, cold, VOCAB, CHUNK)
        equal = bits == cut
        rank = equals + tl.cumsum(equal.to(tl.int32), 0)
        chosen = (bits < cut) | (equal & (rank <= tl.where(small, SMALL_CANDIDATES, VOCAB)))
        to = found + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(bits_out + to, bits, mask=chosen & (to < CANDIDATES))
        tl.store(ids_out + to, token, mask=chosen & (to < CANDIDATES))
        equals += tl.sum(equal.to(tl.int32), 0)
        found += tl.sum(chosen.to(tl.int32), 0)
    return found


@jit
def _keep_few(
    bits: Arg, token: Arg, bits_out: Arg, ids_out: Arg, cut: Arg, top_k: Arg, SMALL_CANDIDATES: tl.constexpr
) -> Any:
    """Write SMALL_CANDIDATES tokens at most, in order of their ids: all above the K-th, and of those equal to
    it the first. Returns how many."""
    last, count = bracket(bits, top_k, SMALL_CANDIDATES, cut)
    chosen = bits <= last
    if count > SMALL_CANDIDATES:
        equal = bits == last
        room = SMALL_CANDIDATES - tl.sum((bits < last).to(tl.int32), 0)
        chosen = (bits < last) | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= room))
    to = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(bits_out + to, bits, mask=chosen)
    tl.store(ids_out + to, token, mask=chosen)
    return tl.sum(chosen.to(tl.int32), 0)


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
