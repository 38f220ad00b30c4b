"""Truncated rows whose choice does not lie among a few tokens: one program reads the row several times.

A pass adds up, for several distances at once, how many tokens lie within each, or how much weight, and goes
on between the two around the target. It ends as soon as no more tokens are within the farther one than
registers hold, or only equal ones are in between. Then comes the draw, among few tokens or all that stay.

Legend: N sampling lanes, V vocabulary, C pieces, K candidates, P pivots, B a block of tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from slipstream.kernels.backend import Arg, jit, jit_with, next_power_of_2, pdl_begin, pdl_options, tl
from slipstream.kernels.noise import PURPOSE_TOKEN, lane_key, mix_word, token_cost
from slipstream.kernels.sample_scan import RowParams, Scan, row_rules
from slipstream.kernels.search import FAR, distance_bits, draw_among, farthest_bits

Tensor = torch.Tensor

BLOCK, PIVOTS = 2048, 8
# 8**11 is over 2**31: from 32 nats down to 2**-26, the resolution that docs/sampling.md states.
MOST_PASSES = 11


def sample_wide(
    logits_NV: Tensor,
    row_N: Tensor,
    length_N: Tensor,
    params: RowParams,
    scan: Scan,
    wide_N: Tensor,
    bits_NK: Tensor,
    id_NK: Tensor,
    token_N: Tensor,
) -> None:
    """Write token_N of the lanes where wide (int32) is not 0; they must hold finite rows with a legal token.
    bits, id: scratch, int32, for the candidates of one lane each."""
    lanes, vocab = logits_NV.shape
    _wide_kernel[(lanes,)](
        logits_NV, row_N, length_N, *params.columns(), params.stride, scan.best_NC, wide_N, bits_NK, id_NK,
        token_N, logits_NV.stride(0), VOCAB=vocab, PIECES=scan.pieces,
        PIECES_PAD=next_power_of_2(scan.pieces), CANDIDATES=bits_NK.shape[1], BLOCK=BLOCK, PIVOTS=PIVOTS,
        MOST_PASSES=MOST_PASSES, PURPOSE=PURPOSE_TOKEN, **pdl_options(logits_NV), num_warps=8,
    )  # fmt: skip


@jit_with(do_not_specialize=("row_stride",))
def _wide_kernel(
    logits: Arg, rows: Arg, lengths: Arg, alive: Arg, temperatures: Arg, top_ks: Arg, top_ps: Arg,
    min_ps: Arg, seeds_lo: Arg, seeds_hi: Arg, row_stride: Arg,
    best: Arg, wide: Arg, bits_out: Arg, ids_out: Arg, token_out: Arg, stride: Arg,
    VOCAB: tl.constexpr, PIECES: tl.constexpr, PIECES_PAD: tl.constexpr, CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr, PIVOTS: tl.constexpr, MOST_PASSES: tl.constexpr, PURPOSE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    lane = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, PIECES_PAD)
    pdl_begin(PDL)
    if tl.load(wide + lane) == 0:
        return
    row = tl.load(rows + lane)
    temperature, top_k, top_p, min_p = row_rules(
        row, temperatures, top_ks, top_ps, min_ps, row_stride, VOCAB
    )
    top = tl.load(best + lane * PIECES + piece, mask=piece < PIECES, other=float("-inf"))
    highest, cold = tl.max(top, 0), 1.0 / temperature
    logits += lane * stride
    within = farthest_bits(min_p).to(tl.float32, bitcast=True)
    count, target = top_k * 0 + VOCAB, top_p * 0.0 - 1.0
    if top_k > 0:
        within, count, _ = _narrow(
            logits, highest, cold, within, top_k.to(tl.float32), VOCAB, CANDIDATES, BLOCK, PIVOTS,
            MOST_PASSES, False,
        )
    if (top_p < 1.0) & (count > CANDIDATES):
        within, count, target = _narrow(
            logits, highest, cold, within, top_p, VOCAB, CANDIDATES, BLOCK, PIVOTS, MOST_PASSES, True
        )
        # Whatever top_k keeps, it is within: what is left to do is top_p's.
        top_k = top_k * 0
    key0, key1 = lane_key(
        tl.load(seeds_lo + row * row_stride), tl.load(seeds_hi + row * row_stride),
        tl.load(lengths + lane), PURPOSE,
    )
    if count <= CANDIDATES:
        bits_out += lane * CANDIDATES
        ids_out += lane * CANDIDATES
        _collect_within(logits, bits_out, ids_out, highest, cold, within, VOCAB, CANDIDATES, BLOCK)
        place = tl.arange(0, CANDIDATES)
        bits = tl.load(bits_out + place, mask=place < count, other=FAR)
        token = tl.load(ids_out + place, mask=place < count, other=0)
        tl.store(token_out + lane, draw_among(bits, token, top_k, top_p, target, key0, key1))
    else:
        chosen = _draw_within(logits, highest, cold, within, key0, key1, VOCAB, BLOCK)
        tl.store(token_out + lane, chosen)


@jit
def _distances(logits: Arg, token_B: Arg, highest: Arg, cold: Arg, VOCAB: tl.constexpr) -> Any:
    """Distances of a block of tokens; infinite past the vocabulary."""
    value_B = tl.load(logits + token_B, mask=token_B < VOCAB, other=float("-inf")).to(tl.float32)
    return (highest - value_B) * cold


@jit
def _narrow(
    logits: Arg, highest: Arg, cold: Arg, within: Arg, wanted: Arg, VOCAB: tl.constexpr,
    CANDIDATES: tl.constexpr, BLOCK: tl.constexpr, PIVOTS: tl.constexpr, MOST_PASSES: tl.constexpr,
    BY_WEIGHT: tl.constexpr,
) -> Any:
    """The distance within which `wanted` tokens lie, or (BY_WEIGHT) the part `wanted` of the weight within
    `within`. Where no more than CANDIDATES tokens lie within a farther one, that one will do.

    Returns the distance, how many tokens are within it (over CANDIDATES: any number), and the target.
    """
    pivot = tl.arange(0, PIVOTS)
    beyond, target, count = within * 0.0 - 1e-6, wanted * 1.0, tl.sum(pivot, 0) * 0
    passes, going = count * 0, count == 0
    while going:
        reach = tl.where(pivot == PIVOTS - 1, within, beyond + (within - beyond) * ((pivot + 1) / PIVOTS))
        total, count, nearest, farthest = _measure(
            logits, highest, cold, reach, beyond, within, VOCAB, BLOCK, PIVOTS, BY_WEIGHT
        )
        whole = tl.sum(tl.where(pivot == PIVOTS - 1, total, 0.0), 0)
        if BY_WEIGHT:
            target = tl.where(passes == 0, wanted * whole, target)
        place = tl.min(tl.where(total >= target, pivot, PIVOTS - 1), 0)
        settled = nearest >= farthest
        going = (count > CANDIDATES) & (settled == 0) & (whole >= target) & (passes < MOST_PASSES)
        beyond = tl.maximum(beyond, tl.max(tl.where(pivot < place, reach, -1.0), 0))
        halved = tl.sum(tl.where(pivot == place, reach, 0.0), 0)
        within = tl.where(going, halved, tl.where(settled, farthest, within))
        passes += 1
    return within, count, target


@jit
def _measure(
    logits: Arg, highest: Arg, cold: Arg, reach_P: Arg, beyond: Arg, within: Arg, VOCAB: tl.constexpr,
    BLOCK: tl.constexpr, PIVOTS: tl.constexpr, BY_WEIGHT: tl.constexpr,
) -> Any:
    """One pass: the number or weight of tokens within each of reach, float32 [P]; the number within `within`,
    and the nearest and farthest distance between beyond and within."""
    place = tl.arange(0, BLOCK)
    total_PB = tl.zeros([PIVOTS, BLOCK], tl.float32)
    count_B = tl.zeros([BLOCK], tl.int32)
    nearest_B = tl.full([BLOCK], float("inf"), tl.float32)
    farthest_B = tl.full([BLOCK], -1.0, tl.float32)
    for begin in range(0, VOCAB, BLOCK):
        distance_B = _distances(logits, begin + place, highest, cold, VOCAB)
        inside_B = distance_B <= within
        weight_B = tl.exp(-distance_B) if BY_WEIGHT else inside_B.to(tl.float32)
        total_PB += tl.where(distance_B[None, :] <= reach_P[:, None], weight_B[None, :], 0.0)
        count_B += inside_B.to(tl.int32)
        nearest_B = tl.minimum(nearest_B, tl.where(distance_B > beyond, distance_B, float("inf")))
        farthest_B = tl.maximum(farthest_B, tl.where(inside_B, distance_B, -1.0))
    return tl.sum(total_PB, 1), tl.sum(count_B, 0), tl.min(nearest_B, 0), tl.max(farthest_B, 0)


@jit
def _collect_within(
    logits: Arg, bits_out: Arg, ids_out: Arg, highest: Arg, cold: Arg, within: Arg,
    VOCAB: tl.constexpr, CANDIDATES: tl.constexpr, BLOCK: tl.constexpr,
) -> None:
    """Write the tokens within a distance, in order of their ids; they must be at most CANDIDATES."""
    place = tl.arange(0, BLOCK)
    found = tl.sum(place, 0) * 0
    for begin in range(0, VOCAB, BLOCK):
        token = begin + place
        chosen = _distances(logits, token, highest, cold, VOCAB) <= within
        to = found + tl.cumsum(chosen.to(tl.int32), 0) - 1
        value = tl.load(logits + token, mask=chosen, other=0.0).to(tl.float32)
        tl.store(bits_out + to, distance_bits(value, highest, cold), mask=chosen & (to < CANDIDATES))
        tl.store(ids_out + to, token, mask=chosen & (to < CANDIDATES))
        found += tl.sum(chosen.to(tl.int32), 0)
    tl.debug_barrier()


@jit
def _draw_within(
    logits: Arg, highest: Arg, cold: Arg, within: Arg, key0: Arg, key1: Arg,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr,
) -> Any:
    """The best noisy token among all within a distance."""
    place = tl.arange(0, BLOCK)
    best_B, id_B = tl.full([BLOCK], -1.0, tl.float32), place
    for begin in range(0, VOCAB, BLOCK):
        token = begin + place
        distance_B = _distances(logits, token, highest, cold, VOCAB)
        ratio_B = tl.exp(-distance_B) / token_cost(mix_word(token.to(tl.uint32)), key0, key1)
        ratio_B = tl.where(distance_B <= within, ratio_B, -1.0)
        # Strictly better: of equal ones the first stays.
        id_B = tl.where(ratio_B > best_B, token, id_B)
        best_B = tl.maximum(best_B, ratio_B)
    return tl.min(tl.where(best_B == tl.max(best_B, 0), id_B, FAR), 0)
