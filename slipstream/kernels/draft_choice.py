"""The draft that a drafter's logits give: the highest, or the highest under the sampler's own noise.

The sampler takes argmax(logits / temperature - log(cost)), where cost is a hash of (seed, position, token). A
draft chosen with the same costs is the sampled token more often than one drawn anew, and for like enough
distributions more often than the likeliest token: at a distance TV of the two it is at least
(1 - TV) / (1 + TV) of the time (Daliri, Musco, Suresh 2025). What top_k, top_p and min_p cut off is not cut
here: a draft from there is one that is not taken.

Legend: L lanes, D tokens of the drafter's vocabulary, C pieces of a row, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    use_triton,
)
from slipstream.kernels.candidates import first_argmax
from slipstream.kernels.noise import (
    PURPOSE_TOKEN,
    fast_log2,
    gumbel_cost,
    lane_key,
    lane_keys,
    mix_word,
    token_cost,
)

Tensor = torch.Tensor

PIECE = 4096


@dataclass(frozen=True, slots=True)
class DraftNoise:
    """The sampler's noise. row_L: int64; position_L: int32, of the draft. temperature_R: float32, 0 for
    greedy rows; seed_lo_R, seed_hi_R: int32; the three of one stride."""

    row_L: Tensor
    position_L: Tensor
    temperature_R: Tensor
    seed_lo_R: Tensor
    seed_hi_R: Tensor


def choose_draft(
    logits_LD: Tensor, out_L: Tensor, ids_D: Tensor | None = None, noise: DraftNoise | None = None
) -> None:
    """A token a lane into out (int32, any stride), always one of the vocabulary. logits: any float type, a
    row's elements adjacent. ids: int32, the target's id of each token of the drafter's, None where they are
    the same. noise: None for the highest logit."""
    if logits_LD.dim() != 2 or logits_LD.stride(1) != 1 or out_L.shape != logits_LD.shape[:1]:
        raise ValueError("logits must be [L, D], a row's elements adjacent, and out [L]")
    if ids_D is not None and (ids_D.shape != logits_LD.shape[1:] or ids_D.dtype != torch.int32):
        raise ValueError("ids must be int32 [D]")
    if not use_triton(logits_LD):
        out_L.copy_(choose_draft_reference(logits_LD, ids_D, noise))
        return
    lanes, vocab = logits_LD.shape
    pieces, device = ceil_div(vocab, PIECE), logits_LD.device
    best_LC = torch.empty(lanes, pieces, dtype=torch.float32, device=device)
    place_LC = torch.empty(lanes, pieces, dtype=torch.int32, device=device)
    # Arguments that a variant does not read still need a pointer.
    ids = place_LC if ids_D is None else ids_D
    given = noise or DraftNoise(place_LC, place_LC, best_LC, place_LC, place_LC)
    _pieces_kernel[(pieces, lanes)](
        logits_LD, ids, given.row_L, given.position_L, given.temperature_R, given.seed_lo_R, given.seed_hi_R,
        best_LC, place_LC, logits_LD.stride(0), given.temperature_R.stride(0),
        VOCAB=vocab, PIECES=pieces, PIECE=PIECE, MAPPED=ids_D is not None,
        NOISY=noise is not None, PURPOSE=PURPOSE_TOKEN, **pdl_options(logits_LD), num_warps=4,
    )  # fmt: skip
    _merge_kernel[(lanes,)](
        best_LC, place_LC, ids, out_L, out_L.stride(0), VOCAB=vocab, PIECES=pieces,
        PAD=next_power_of_2(pieces), MAPPED=ids_D is not None, **pdl_options(logits_LD), num_warps=1,
    )  # fmt: skip


def choose_draft_reference(logits_LD: Tensor, ids_D: Tensor | None, noise: DraftNoise | None) -> Tensor:
    """The same in torch operations: int64 [L]."""
    score_LD = logits_LD.float()
    if ids_D is None:
        ids_D = torch.arange(logits_LD.shape[1], dtype=torch.int32, device=logits_LD.device)
    if noise is not None:
        seeds = noise.seed_lo_R[noise.row_L], noise.seed_hi_R[noise.row_L]
        key_2L = lane_keys(*seeds, noise.position_L, PURPOSE_TOKEN)
        heat_L1 = noise.temperature_R[noise.row_L].unsqueeze(1)
        noisy_LD = score_LD / torch.where(heat_L1 > 0, heat_L1, 1.0) - gumbel_cost(key_2L, ids_D).log_()
        score_LD = torch.where(heat_L1 > 0, noisy_LD, score_LD)
    return ids_D[first_argmax(score_LD)[1]].long()


@jit_with(do_not_specialize=("row_stride",))
def _pieces_kernel(
    logits: Arg, ids: Arg, rows: Arg, positions: Arg, temperatures: Arg, seeds_lo: Arg, seeds_hi: Arg,
    best: Arg, places: Arg, stride: Arg, row_stride: Arg,
    VOCAB: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr,
    MAPPED: tl.constexpr, NOISY: tl.constexpr, PURPOSE: tl.constexpr, PDL: tl.constexpr,
) -> None:
    piece, lane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = piece * PIECE + tl.arange(0, PIECE)
    inside = token < VOCAB
    name = tl.load(ids + token, mask=inside, other=0) if MAPPED else token  # a constant: before the wait
    pdl_begin(PDL)
    value = tl.load(logits + lane * stride + token, mask=inside, other=float("-inf")).to(tl.float32)
    if NOISY:
        at = tl.load(rows + lane) * row_stride
        temperature = tl.load(temperatures + at)
        if temperature > 0.0:
            position = tl.load(positions + lane)
            key0, key1 = lane_key(tl.load(seeds_lo + at), tl.load(seeds_hi + at), position, PURPOSE)
            cost = token_cost(mix_word(name.to(tl.uint32)), key0, key1)
            value = value / temperature - fast_log2(cost) * 0.6931471805599453
    value = tl.where(inside, value, float("-inf"))
    top = tl.max(value, 0)
    place = tl.where((value == top) & inside, token, VOCAB)
    tl.store(best + lane * PIECES + piece, top)
    tl.store(places + lane * PIECES + piece, tl.min(place, 0))


@jit
def _merge_kernel(
    best: Arg, places: Arg, ids: Arg, out: Arg, out_stride: Arg,
    VOCAB: tl.constexpr, PIECES: tl.constexpr, PAD: tl.constexpr, MAPPED: tl.constexpr, PDL: tl.constexpr,
) -> None:
    lane = tl.program_id(0)
    piece = tl.arange(0, PAD)
    inside = piece < PIECES
    pdl_begin(PDL)
    value = tl.load(best + lane * PIECES + piece, mask=inside, other=float("-inf"))
    place = tl.load(places + lane * PIECES + piece, mask=inside & (value == tl.max(value, 0)), other=VOCAB)
    # Where a row holds NaN nothing equals the maximum: any token will do, so long as it is one.
    chosen = tl.minimum(tl.min(place, 0), VOCAB - 1)
    tl.store(out + lane.to(tl.int64) * out_stride, tl.load(ids + chosen) if MAPPED else chosen)
