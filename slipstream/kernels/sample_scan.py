"""The one read of a step's logits that sampling makes: what each piece of a row has to say.

Of every piece: its highest logit and its sum (for finiteness); for rows with top_k the highest of every 32
tokens; for other sampled rows the best noisy score and, where top_p needs it, the weight, both relative to
the piece's highest. Which token is the highest or the best is left to the next kernel, which looks through
the one piece that wins.

A score is log2(noise cost) + distance / ln 2, and the least is the best: the order of logit / temperature +
Gumbel noise without a division.

Legend: N sampling lanes, V vocabulary, C pieces, D chunks of 32 tokens, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from slipstream.kernels.backend import Arg, ceil_div, jit, jit_with, pdl_begin, pdl_options, tl
from slipstream.kernels.noise import (
    PURPOSE_TOKEN,
    fast_exp2,
    fast_log2,
    lane_key,
    mix_word,
    token_cost,
)
from slipstream.kernels.search import LOG2_E, LOWEST

Tensor = torch.Tensor

PIECE, CHUNK = 2048, 32
# Lanes that share a program share the first half of the noise hash; few lanes want many programs.
LANES_TOGETHER = 4


@dataclass(frozen=True, slots=True)
class RowParams:
    """Scalar columns of the row table, [R], all of one stride: what the sampler reads of a row.

    alive, top_k, seed_lo, seed_hi: int32; temperature (0: greedy), top_p, min_p: float32.
    """

    alive_R: Tensor
    temperature_R: Tensor
    top_k_R: Tensor
    top_p_R: Tensor
    min_p_R: Tensor
    seed_lo_R: Tensor
    seed_hi_R: Tensor

    def columns(self) -> tuple[Tensor, ...]:
        """In the order in which kernels take them."""
        return (
            self.alive_R, self.temperature_R, self.top_k_R, self.top_p_R, self.min_p_R,
            self.seed_lo_R, self.seed_hi_R,
        )  # fmt: skip

    @property
    def stride(self) -> int:
        """Words from one row to the next. Raises ValueError where columns differ in it."""
        strides = {column.stride(0) for column in self.columns()}
        if len(strides) != 1:
            raise ValueError("the columns of a row must have one stride")
        return strides.pop()


class Scan:
    """What a scan found, float32. best, sum, score, mass: [N, C]; chunk: [N, D]."""

    def __init__(self, lanes: int, vocab: int, device: torch.device, sum_NC: Tensor | None) -> None:
        self.pieces, self.chunks = ceil_div(vocab, PIECE), ceil_div(vocab, CHUNK)
        floats = torch.empty(4, lanes, self.pieces, dtype=torch.float32, device=device)
        self.best_NC, self.score_NC, self.mass_NC, own_sum_NC = floats.unbind()
        self.sum_NC = own_sum_NC if sum_NC is None else sum_NC
        self.chunk_ND = torch.empty(lanes, self.chunks, dtype=torch.float32, device=device)


def scan_rows(
    logits_NV: Tensor, row_N: Tensor, length_N: Tensor, params: RowParams, sum_NC: Tensor | None
) -> Scan:
    """logits: float32 or bfloat16, a row's elements adjacent; row: int64; length: int32, the position of the
    token to be drawn. sum: sums of the pieces of the raw logits, where these are not."""
    lanes, vocab = logits_NV.shape
    scan = Scan(lanes, vocab, logits_NV.device, sum_NC)
    together = LANES_TOGETHER if lanes >= 64 else 1
    _scan_kernel[(scan.pieces, ceil_div(lanes, together))](
        logits_NV, row_N, length_N, *params.columns(), params.stride,
        scan.best_NC, scan.sum_NC, scan.score_NC, scan.mass_NC, scan.chunk_ND,
        lanes, logits_NV.stride(0), VOCAB=vocab, PIECES=scan.pieces, CHUNKS=scan.chunks, PIECE=PIECE,
        CHUNK=CHUNK, TOGETHER=together, SUMS=sum_NC is None, PURPOSE=PURPOSE_TOKEN,
        **pdl_options(logits_NV), num_warps=4, maxnreg=80,
    )  # fmt: skip
    return scan


@jit
def row_rules(
    row: Arg, temperature: Arg, top_k: Arg, top_p: Arg, min_p: Arg, stride: Arg, VOCAB: tl.constexpr
) -> Any:
    """temperature (0: greedy), top_k (0: off), top_p and min_p of a row."""
    at = row * stride
    k = tl.load(top_k + at)
    k = tl.where((k > 0) & (k < VOCAB), k, 0)
    return tl.load(temperature + at), k, tl.load(top_p + at), tl.load(min_p + at)


@jit_with(do_not_specialize=("lanes", "row_stride"))
def _scan_kernel(
    logits: Arg, rows: Arg, lengths: Arg, alive: Arg, temperatures: Arg, top_ks: Arg, top_ps: Arg,
    min_ps: Arg, seeds_lo: Arg, seeds_hi: Arg, row_stride: Arg,
    best: Arg, sums: Arg, scores: Arg, masses: Arg, chunk_best: Arg, lanes: Arg, stride: Arg,
    VOCAB: tl.constexpr, PIECES: tl.constexpr, CHUNKS: tl.constexpr, PIECE: tl.constexpr,
    CHUNK: tl.constexpr, TOGETHER: tl.constexpr, SUMS: tl.constexpr, PURPOSE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    piece = tl.program_id(0)
    first = (tl.program_id(1) * TOGETHER).to(tl.int64)
    token = piece * PIECE + tl.arange(0, PIECE)
    inside = token < VOCAB
    mixed = mix_word(token.to(tl.uint32))
    pdl_begin(PDL)
    ahead = tl.load(logits + first * stride + token, mask=inside, other=float("-inf"))
    row_ahead = tl.load(rows + first)
    end = tl.minimum(first + TOGETHER, lanes)
    for i in range(TOGETHER):
        lane, row, value = first + i, row_ahead, ahead.to(tl.float32)
        # The next lane's logits are under way while this one's are worked on.
        more = lane + 1 < end
        within = token < tl.where(more, VOCAB, 0)
        ahead = tl.load(logits + (lane + 1) * stride + token, mask=within, other=float("-inf"))
        row_ahead = tl.load(rows + lane + 1, mask=more, other=0)
        live = (tl.load(alive + row * row_stride) != 0) & (lane < lanes)
        temperature, top_k, top_p, _ = row_rules(
            row, temperatures, top_ks, top_ps, min_ps, row_stride, VOCAB
        )
        lo, hi = tl.load(seeds_lo + row * row_stride), tl.load(seeds_hi + row * row_stride)
        length = tl.load(lengths + lane, mask=live, other=0)
        top = tl.max(value, 0)
        to = lane * PIECES + piece
        if live:
            tl.store(best + to, top)
            if SUMS:
                tl.store(sums + to, tl.sum(tl.where(inside, value, 0.0), 0))
            if (temperature > 0.0) & (top_k > 0):
                highest = tl.max(tl.reshape(value, (PIECE // CHUNK, CHUNK)), 1)
                chunk = piece * (PIECE // CHUNK) + tl.arange(0, PIECE // CHUNK)
                tl.store(chunk_best + lane * CHUNKS + chunk, highest, mask=chunk < CHUNKS)
            elif temperature > 0.0:
                key0, key1 = lane_key(lo, hi, length, PURPOSE)
                # Where a piece has no legal token its highest is -inf, and -inf - -inf would be NaN.
                distance = (tl.maximum(top, LOWEST) - value) * (LOG2_E / temperature)
                cost = token_cost(mixed, key0, key1) * fast_exp2(distance)
                tl.store(scores + to, fast_log2(tl.min(cost, 0)))
                if top_p < 1.0:
                    tl.store(masses + to, tl.sum(fast_exp2(-distance), 0))
