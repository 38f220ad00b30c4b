"""Truncated rows whose token is not settled yet: what top_p and min_p keep of a flat row, and a large top_k.

Whatever truncation keeps is a beginning of the tokens in order of their logits. So the best noisy token of
all is the draw if it is kept, and it is kept if the tokens above it weigh less than top_p asks for; if it is
not, then the best of those above it comes next. With top_p 0.95 the first is kept in 19 of 20 draws, and no
threshold is searched. Programs side by side take the first turn; further ones are for a program a row, as is
the search for the K-th logit of a large top_k: a pass counts the tokens within several distances at once.

Legend: N sampling lanes, V vocabulary, C pieces, S spans of tokens, P pivots, B a block of tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from slipstream.kernels.backend import (
    Arg,
    ceil_div,
    jit,
    jit_with,
    next_power_of_2,
    pdl_begin,
    pdl_options,
    tl,
)
from slipstream.kernels.noise import PURPOSE_TOKEN, fast_exp2, lane_key, mix_word, token_cost
from slipstream.kernels.sample_scan import RowParams, Scan, row_rules
from slipstream.kernels.search import FAR, LOG2_E, farthest_bits, first_lowest

Tensor = torch.Tensor

# Why a lane is wide: its best noisy token has to be weighed, or its top_k has yet to be found.
BEST_TO_WEIGH, LARGE_TOP_K = 1, 2
SPAN, SPAN_BLOCK = 8192, 1024
BLOCK, PIVOTS = 4096, 8
# 8**11 is over 2**31: from 32 nats down to 2**-26, the resolution that docs/sampling.md states.
MOST_PASSES = 11


def sample_wide(
    logits_NV: Tensor,
    row_N: Tensor,
    length_N: Tensor,
    params: RowParams,
    scan: Scan,
    wide_N: Tensor,
    token_N: Tensor,
) -> None:
    """Write token_N of the lanes where wide (int32) is not 0; they must hold finite rows with a legal token,
    and where wide is BEST_TO_WEIGH their best noisy token."""
    lanes, vocab = logits_NV.shape
    spans = ceil_div(vocab, SPAN)
    floats_NS = torch.empty(3, lanes, spans, dtype=torch.float32, device=logits_NV.device).unbind()
    id_NS = torch.empty(lanes, spans, dtype=torch.int32, device=logits_NV.device)
    shared = (
        logits_NV, row_N, length_N, *params.columns(), params.stride, scan.best_NC, wide_N, token_N,
        *floats_NS, id_NS, logits_NV.stride(0),
    )  # fmt: skip
    sizes = {
        "VOCAB": vocab, "PIECES": scan.pieces, "PIECES_PAD": next_power_of_2(scan.pieces), "SPANS": spans,
        "PURPOSE": PURPOSE_TOKEN, "BEST_TO_WEIGH": BEST_TO_WEIGH, **pdl_options(logits_NV),
    }  # fmt: skip
    _span_kernel[(spans, lanes)](*shared, SPAN=SPAN, BLOCK=SPAN_BLOCK, **sizes, num_warps=4, maxnreg=80)
    _settle_kernel[(lanes,)](
        *shared, SPANS_PAD=next_power_of_2(spans), BLOCK=BLOCK, PIVOTS=PIVOTS, MOST_PASSES=MOST_PASSES,
        **sizes, num_warps=16,
    )  # fmt: skip


@jit_with(do_not_specialize=("row_stride",))
def _span_kernel(
    logits: Arg, rows: Arg, lengths: Arg, alive: Arg, temperatures: Arg, top_ks: Arg, top_ps: Arg,
    min_ps: Arg, seeds_lo: Arg, seeds_hi: Arg, row_stride: Arg,
    best: Arg, wide: Arg, token_out: Arg, totals: Arg, befores: Arg, costs: Arg, ids: Arg, stride: Arg,
    VOCAB: tl.constexpr, PIECES: tl.constexpr, PIECES_PAD: tl.constexpr, SPANS: tl.constexpr,
    SPAN: tl.constexpr, BLOCK: tl.constexpr, BEST_TO_WEIGH: tl.constexpr, PURPOSE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    span, lane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    pdl_begin(PDL)
    if tl.load(wide + lane) != BEST_TO_WEIGH:
        return
    row = tl.load(rows + lane)
    highest, cold, within, _, _, key0, key1 = _wide_rules(
        row, lane, lengths, temperatures, top_ks, top_ps, min_ps, seeds_lo, seeds_hi, row_stride, best,
        VOCAB, PIECES, PIECES_PAD, PURPOSE,
    )
    logits += lane * stride
    nearer = _distances(logits, tl.load(token_out + lane), highest, cold, VOCAB)
    total, before, cost, token = _weigh(
        logits, span * SPAN, span * SPAN + SPAN, highest, cold, within, nearer, key0, key1, VOCAB, BLOCK, True
    )
    to = lane * SPANS + span
    tl.store(totals + to, total)
    tl.store(befores + to, before)
    tl.store(costs + to, cost)
    tl.store(ids + to, token)


@jit_with(do_not_specialize=("row_stride",))
def _settle_kernel(
    logits: Arg, rows: Arg, lengths: Arg, alive: Arg, temperatures: Arg, top_ks: Arg, top_ps: Arg,
    min_ps: Arg, seeds_lo: Arg, seeds_hi: Arg, row_stride: Arg,
    best: Arg, wide: Arg, token_out: Arg, totals: Arg, befores: Arg, costs: Arg, ids: Arg, stride: Arg,
    VOCAB: tl.constexpr, PIECES: tl.constexpr, PIECES_PAD: tl.constexpr, SPANS: tl.constexpr,
    SPANS_PAD: tl.constexpr, BLOCK: tl.constexpr, PIVOTS: tl.constexpr, MOST_PASSES: tl.constexpr,
    BEST_TO_WEIGH: tl.constexpr, PURPOSE: tl.constexpr, PDL: tl.constexpr,
) -> None:
    lane = tl.program_id(0).to(tl.int64)
    pdl_begin(PDL)
    why = tl.load(wide + lane)
    if why == 0:
        return
    row = tl.load(rows + lane)
    highest, cold, within, top_k, top_p, key0, key1 = _wide_rules(
        row, lane, lengths, temperatures, top_ks, top_ps, min_ps, seeds_lo, seeds_hi, row_stride, best,
        VOCAB, PIECES, PIECES_PAD, PURPOSE,
    )
    logits += lane * stride
    if why == BEST_TO_WEIGH:
        span = tl.arange(0, SPANS_PAD)
        inside, at = span < SPANS, lane * SPANS + span
        total = tl.sum(tl.load(totals + at, mask=inside, other=0.0), 0)
        before = tl.sum(tl.load(befores + at, mask=inside, other=0.0), 0)
        cost = tl.load(costs + at, mask=inside, other=float("inf"))
        token = tl.load(token_out + lane)
        distance = _distances(logits, token, highest, cold, VOCAB)
        kept = (distance <= within) & ((top_p >= 1.0) | (before < top_p * total))
        token = tl.where(kept, token, first_lowest(cost, tl.load(ids + at, mask=inside, other=FAR)))
    else:
        within = _narrow(logits, highest, cold, within, top_k, VOCAB, BLOCK // 2, PIVOTS, MOST_PASSES)
        total, _, _, token = _weigh(
            logits, 0, VOCAB, highest, cold, within, float("inf"), key0, key1, VOCAB, BLOCK, True
        )
        kept = top_k == 0
    kept = kept | (top_p >= 1.0)
    while kept == 0:
        nearer = _distances(logits, token, highest, cold, VOCAB)
        before = _weigh(
            logits, 0, VOCAB, highest, cold, within, nearer, key0, key1, VOCAB, BLOCK, False
        )[1]
        # The highest has nothing before it, so that an end comes whatever the sums.
        kept = (before < top_p * total) | (nearer <= 0.0)
        if kept == 0:
            token = _weigh(
                logits, 0, VOCAB, highest, cold, within, nearer, key0, key1, VOCAB, BLOCK, True
            )[3]
    tl.store(token_out + lane, token)


@jit
def _wide_rules(
    row: Arg, lane: Arg, lengths: Arg, temperatures: Arg, top_ks: Arg, top_ps: Arg, min_ps: Arg,
    seeds_lo: Arg, seeds_hi: Arg, row_stride: Arg, best: Arg,
    VOCAB: tl.constexpr, PIECES: tl.constexpr, PIECES_PAD: tl.constexpr, PURPOSE: tl.constexpr,
) -> Any:
    """The highest logit, 1 / temperature, the distance that min_p allows, top_k, top_p, the noise's key."""
    piece = tl.arange(0, PIECES_PAD)
    temperature, top_k, top_p, min_p = row_rules(
        row, temperatures, top_ks, top_ps, min_ps, row_stride, VOCAB
    )
    top = tl.load(best + lane * PIECES + piece, mask=piece < PIECES, other=float("-inf"))
    within = farthest_bits(min_p).to(tl.float32, bitcast=True)
    key0, key1 = lane_key(
        tl.load(seeds_lo + row * row_stride), tl.load(seeds_hi + row * row_stride),
        tl.load(lengths + lane), PURPOSE,
    )
    return tl.max(top, 0), 1.0 / temperature, within, top_k, top_p, key0, key1


@jit
def _distances(logits: Arg, token: Arg, highest: Arg, cold: Arg, VOCAB: tl.constexpr) -> Any:
    """Distances of tokens; infinite past the vocabulary."""
    value = tl.load(logits + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    return (highest - value) * cold


@jit
def _weigh(
    logits: Arg, begin: Arg, end: Arg, highest: Arg, cold: Arg, within: Arg, nearer: Arg, key0: Arg,
    key1: Arg, VOCAB: tl.constexpr, BLOCK: tl.constexpr, DRAW: tl.constexpr,
) -> Any:
    """Of the tokens begin to end (a block's multiple, or the vocabulary): the weight within `within`, and of
    those nearer than `nearer`; and, with DRAW, the least noise cost times exp(distance) of the latter, with
    its token."""
    place = tl.arange(0, BLOCK)
    total_B, before_B = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    best_B, id_B = tl.full([BLOCK], float("inf"), tl.float32), tl.full([BLOCK], FAR, tl.int32)
    ahead_B = _distances(logits, begin + place, highest, cold, VOCAB)
    for first in range(begin, end, BLOCK):
        token_B, distance_B = first + place, ahead_B
        ahead_B = _distances(logits, token_B + BLOCK, highest, cold, VOCAB)
        weight_B = tl.where(distance_B <= within, fast_exp2(distance_B * -LOG2_E), 0.0)
        legal_B = (distance_B <= within) & (distance_B < nearer)
        total_B += weight_B
        before_B += tl.where(legal_B, weight_B, 0.0)
        if DRAW:
            cost_B = token_cost(mix_word(token_B.to(tl.uint32)), key0, key1)
            cost_B = tl.where(legal_B, cost_B * fast_exp2(distance_B * LOG2_E), float("inf"))
            # Strictly better: of equal ones the first stays.
            id_B = tl.where(cost_B < best_B, token_B, id_B)
            best_B = tl.minimum(best_B, cost_B)
    return tl.sum(total_B, 0), tl.sum(before_B, 0), tl.min(best_B, 0), first_lowest(best_B, id_B)


@jit
def _narrow(
    logits: Arg, highest: Arg, cold: Arg, within: Arg, top_k: Arg, VOCAB: tl.constexpr,
    BLOCK: tl.constexpr, PIVOTS: tl.constexpr, MOST_PASSES: tl.constexpr,
) -> Any:
    """The distance within which top_k tokens lie, `within` where fewer lie within that."""
    pivot = tl.arange(0, PIVOTS)
    beyond, passes, going = within * 0.0 - 1e-6, top_k * 0, top_k > 0
    while going:
        reach = tl.where(pivot == PIVOTS - 1, within, beyond + (within - beyond) * ((pivot + 1) / PIVOTS))
        count, nearest, farthest = _count(logits, highest, cold, reach, beyond, within, VOCAB, BLOCK, PIVOTS)
        place = tl.min(tl.where(count >= top_k, pivot, PIVOTS - 1), 0)
        whole = tl.sum(tl.where(pivot == PIVOTS - 1, count, 0), 0)
        settled = nearest >= farthest
        passes += 1
        going = (settled == 0) & (whole >= top_k) & (passes < MOST_PASSES)
        beyond = tl.maximum(beyond, tl.max(tl.where(pivot < place, reach, -1.0), 0))
        halved = tl.sum(tl.where(pivot == place, reach, 0.0), 0)
        within = tl.where(going, halved, tl.where(settled, farthest, within))
    return within


@jit
def _count(
    logits: Arg, highest: Arg, cold: Arg, reach_P: Arg, beyond: Arg, within: Arg, VOCAB: tl.constexpr,
    BLOCK: tl.constexpr, PIVOTS: tl.constexpr,
) -> Any:
    """One pass: the number of tokens within each of reach, int32 [P], and the nearest and farthest distance
    between beyond and within."""
    place = tl.arange(0, BLOCK)
    count_PB = tl.zeros([PIVOTS, BLOCK], tl.int32)
    nearest_B = tl.full([BLOCK], float("inf"), tl.float32)
    farthest_B = tl.full([BLOCK], -1.0, tl.float32)
    for begin in range(0, VOCAB, BLOCK):
        distance_B = _distances(logits, begin + place, highest, cold, VOCAB)
        count_PB += (distance_B[None, :] <= reach_P[:, None]).to(tl.int32)
        nearest_B = tl.minimum(nearest_B, tl.where(distance_B > beyond, distance_B, float("inf")))
        farthest_B = tl.maximum(farthest_B, tl.where(distance_B <= within, distance_B, -1.0))
    return tl.sum(count_PB, 1), tl.min(nearest_B, 0), tl.max(farthest_B, 0)
