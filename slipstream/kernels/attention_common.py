"""What the two attention kernels share: one layer's shape, score scaling, and one step of the online softmax.

Scores live in base 2: exp2(s * log2 e) = exp(s). A row's maximum starts at a finite floor, so a tile in which
nothing is seen changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from slipstream.kernels.backend import Arg, jit, tl

Tensor = torch.Tensor

FLOOR = tl.constexpr(-1.0e30)
# tl.dot takes no fewer rows.
MIN_ROWS = 16
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """One layer's shape. scale multiplies q.k; window is the count of keys seen, itself included, or None;
    soft_cap: scores become cap * tanh(score / cap), or None."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads


@jit
def block_and_place(tile: Arg, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr) -> Any:
    """Which of a row's blocks a tile's keys are in, and where in them."""
    key = tl.arange(0, TILE)
    if TILE % BLOCK_SIZE == 0:  # the place is then the same in every tile
        return tile * (TILE // BLOCK_SIZE) + key // BLOCK_SIZE, key % BLOCK_SIZE
    key += tile * TILE
    return key // BLOCK_SIZE, key % BLOCK_SIZE


@jit
def blocks_of_tile(
    block_row: Arg, tile: Arg, length: Arg, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr
) -> Any:
    """The blocks [TILE] that a tile's keys are in; length: keys of the row."""
    here, _ = block_and_place(tile, TILE, BLOCK_SIZE)
    return tl.load(block_row + here, mask=tile * TILE + tl.arange(0, TILE) < length, other=0)


@jit
def capped_scores(raw: Arg, scale: Arg, soft_cap: Arg, CAPPED: tl.constexpr) -> Any:
    """q.k as softmax_step takes it: in base 2 where capped, else as it is."""
    if CAPPED:
        # cap * tanh(x / cap) = cap - 2 cap / (exp(2 x / cap) + 1), times log2 e
        return soft_cap * (1.0 - 2.0 / (tl.exp(raw * scale) + 1.0))
    return raw


@jit
def softmax_step(score: Arg, scale: Arg, top: Arg, total: Arg, CAPPED: tl.constexpr) -> Any:
    """Weights of one tile [rows, keys], the factor for what was summed before, and the new top and total.
    Scaling is part of the exponent's multiply-add."""
    if CAPPED:
        new_top = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - new_top[:, None])
    else:
        new_top = tl.maximum(top, tl.max(score, 1) * scale)
        weight = tl.exp2(score * scale - new_top[:, None])
    factor = tl.exp2(top - new_top)
    return weight, factor, new_top, total * factor + tl.sum(weight, 1)


def score_factors(shape: LayerAttention) -> tuple[float, float]:
    """The scale (log2 e in it, unless capped) and soft_cap of the functions above."""
    if shape.soft_cap is None:
        return shape.scale * LOG2_E, 0.0
    return 2.0 * shape.scale / shape.soft_cap, shape.soft_cap * LOG2_E


def attend_reference(
    q_THD: Tensor, lane_T: Tensor, position_T: Tensor, row_L: Tensor, blocks_RB: Tensor, pool: Any, shape: Any
) -> Tensor:
    """Each query over its row's keys up to its own position, in float32. Gathers all of them: for tests."""
    out_THD = torch.zeros(q_THD.shape, dtype=torch.float32, device=q_THD.device)
    for token, (lane, position) in enumerate(zip(lane_T, position_T, strict=True)):
        block_B = blocks_RB[row_L[lane], : position // pool.block_size + 1].long()
        k_SGD, v_SGD = (
            each[block_B].transpose(1, 2).flatten(0, 1)[: position + 1].float() * factor
            for each, factor in ((pool.keys, pool.k_scale), (pool.values, pool.v_scale))
        )
        first = 0 if shape.window is None else max(0, int(position) + 1 - shape.window)
        q_GQD = q_THD[token].reshape(shape.num_kv_heads, shape.group, -1).float()
        score_GQS = torch.einsum("gqd,sgd->gqs", q_GQD, k_SGD[first:]) * shape.scale
        if shape.soft_cap is not None:
            score_GQS = torch.tanh(score_GQS / shape.soft_cap) * shape.soft_cap
        out_THD[token] = torch.einsum("gqs,sgd->gqd", score_GQS.softmax(-1), v_SGD[first:]).flatten(0, 1)
    return out_THD.to(q_THD.dtype)
