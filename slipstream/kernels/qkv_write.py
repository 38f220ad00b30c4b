"""From the fused projection to attention: q and k normalised by head and turned, K and V into their pages.

A head x of q or k becomes rotate(x / sqrt(mean(x^2) + eps) * weight); see layers/rotary.py for the table.

Legend: T tokens, H query heads, G KV heads, X = H + 2 G heads of the projection, D head size, P positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

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
from slipstream.kernels.paged import PagedPool, store_kv

Tensor = torch.Tensor

# Elements of one program: heads at a time times padded half head size.
ELEMENTS = 1024


@dataclass(frozen=True, slots=True)
class HeadPrep:
    """What happens to q and k before attention. rope_P2D: float32, cosines then signed sines of each
    position. norm_YD: float32, a row for each of the H + G heads (stride 0 will do), or None; eps: of the
    norm."""

    rope_P2D: Tensor
    norm_YD: Tensor | None = None
    eps: float = 0.0


def write_qkv(
    qkv_TXD: Tensor, position_T: Tensor, slot_T: Tensor, num_kv_heads: int, prep: HeadPrep, pool: PagedPool
) -> Tensor:
    """Returns the prepared q [T, H, D] in qkv's type; K and V go to their slots.

    qkv: heads of q, then k, then v; any strides of tokens and heads. position_T, slot_T: int64, read before
    the preceding kernel has ended.
    """
    check_qkv(qkv_TXD, num_kv_heads, prep, pool)
    if position_T.shape != qkv_TXD.shape[:1] or slot_T.shape != qkv_TXD.shape[:1]:
        raise ValueError("every token needs a position and a slot")
    if not use_triton(qkv_TXD):
        return write_qkv_reference(qkv_TXD, position_T, slot_T, num_kv_heads, prep, pool)
    tokens, heads, head_dim = qkv_TXD.shape
    q_THD = qkv_TXD.new_empty(tokens, heads - 2 * num_kv_heads, head_dim)
    half = next_power_of_2(head_dim // 2)
    at_once = min(next_power_of_2(heads), max(1, ELEMENTS // half))
    norm_YD = prep.rope_P2D if prep.norm_YD is None else prep.norm_YD
    if tokens:
        _write_kernel[(tokens, ceil_div(heads, at_once))](
            qkv_TXD,
            q_THD,
            pool.keys,
            pool.values,
            position_T,
            slot_T,
            prep.rope_P2D,
            norm_YD,
            prep.eps,
            1.0 / pool.k_scale,
            1.0 / pool.v_scale,
            qkv_TXD.stride(0),
            qkv_TXD.stride(1),
            prep.rope_P2D.stride(0),
            norm_YD.stride(0),
            QUERY_HEADS=q_THD.shape[1],
            KV_HEADS=num_kv_heads,
            HEAD=head_dim,
            HALF_PAD=half,
            HEADS=at_once,
            BLOCK_SIZE=pool.block_size,
            NORMED=prep.norm_YD is not None,
            **pdl_options(qkv_TXD),
            num_warps=4,
        )
    return q_THD


def write_qkv_reference(
    qkv_TXD: Tensor, position_T: Tensor, slot_T: Tensor, num_kv_heads: int, prep: HeadPrep, pool: PagedPool
) -> Tensor:
    """The same in torch operations, in float32 between."""
    qk_TYD, v_TGD = qkv_TXD[:, :-num_kv_heads].float(), qkv_TXD[:, -num_kv_heads:].float()
    if prep.norm_YD is not None:
        qk_TYD = F.rms_norm(qk_TYD, qk_TYD.shape[-1:], None, prep.eps) * prep.norm_YD
    cos_T1D, sin_T1D = prep.rope_P2D[position_T].unsqueeze(2).unbind(1)
    turned_TYD = qk_TYD * cos_T1D + qk_TYD.roll(qk_TYD.shape[-1] // 2, -1) * sin_T1D
    store_kv(turned_TYD[:, -num_kv_heads:], v_TGD, slot_T, pool)
    q_THD: Tensor = turned_TYD[:, :-num_kv_heads].to(qkv_TXD.dtype)
    return q_THD


def check_qkv(qkv_TXD: Tensor, num_kv_heads: int, prep: HeadPrep, pool: PagedPool) -> None:
    """Raises ValueError unless projection, tables and pool fit together."""
    if qkv_TXD.dim() != 3 or qkv_TXD.shape[1] <= 2 * num_kv_heads or qkv_TXD.stride(2) != 1:
        raise ValueError("qkv must be [T, H + 2 G, D], the elements of a head adjacent")
    head_dim = qkv_TXD.shape[2]
    pool.check(num_kv_heads, head_dim)
    rope = prep.rope_P2D
    if rope.shape[1:] != (2, head_dim) or rope.dtype != torch.float32 or rope.stride()[1:] != (head_dim, 1):
        raise ValueError("rope must be float32 [P, 2, D], each position's numbers adjacent")
    norm, shape = prep.norm_YD, (qkv_TXD.shape[1] - num_kv_heads, head_dim)
    if norm is not None and (norm.shape != shape or norm.dtype != torch.float32 or norm.stride(1) != 1):
        raise ValueError("norm must be float32 [H + G, D]")


@jit
def head_norm(low: Arg, high: Arg, weight_low: Arg, weight_high: Arg, eps: Arg, HEAD: tl.constexpr) -> Any:
    """RMS norm of heads given as two halves, float32 [heads, half]."""
    rstd = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / HEAD + eps)[:, None]
    return low * rstd * weight_low, high * rstd * weight_high


@jit
def rotate_halves(low: Arg, high: Arg, cos: Arg, sin: Arg) -> Any:
    """Dimension i turns with i + D/2. cos and sin: of the first half's dimensions; sin unsigned."""
    return low * cos - high * sin, high * cos + low * sin


@jit
def _write_kernel(
    qkv: Arg, q: Arg, keys: Arg, values: Arg, positions: Arg, slots: Arg, rope: Arg, norm: Arg, eps: Arg,
    k_factor: Arg, v_factor: Arg, token_stride: Arg, head_stride: Arg, rope_stride: Arg, norm_stride: Arg,
    QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, HALF_PAD: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, NORMED: tl.constexpr, PDL: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF_PAD)[None, :]
    HALF: tl.constexpr = HEAD // 2
    in_half = column < HALF
    turns = head < QUERY_HEADS + KV_HEADS
    inside = in_half & (head < QUERY_HEADS + 2 * KV_HEADS)
    # Written several kernels ago, or constant.
    position, slot = tl.load(positions + token), tl.load(slots + token)
    angle = rope + position * rope_stride + column
    cos = tl.load(angle, mask=in_half, other=0.0)
    sin = tl.load(angle + HEAD + HALF, mask=in_half, other=0.0)
    if NORMED:
        weight = norm + head * norm_stride + column
        weight_low = tl.load(weight, mask=in_half & turns, other=0.0)
        weight_high = tl.load(weight + HALF, mask=in_half & turns, other=0.0)
    pdl_begin(PDL)
    source = qkv + token * token_stride + head * head_stride + column
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    place = (slot // BLOCK_SIZE * KV_HEADS * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD + column
    is_value = inside & (head >= QUERY_HEADS + KV_HEADS)
    to_value = values + place + (head - QUERY_HEADS - KV_HEADS) * BLOCK_SIZE * HEAD
    tl.store(to_value, (low * v_factor).to(values.dtype.element_ty), mask=is_value)
    tl.store(to_value + HALF, (high * v_factor).to(values.dtype.element_ty), mask=is_value)
    if NORMED:
        low, high = head_norm(low, high, weight_low, weight_high, eps, HEAD)
    low, high = rotate_halves(low, high, cos, sin)
    to_q = q + (token * QUERY_HEADS + head) * HEAD + column
    is_query = inside & (head < QUERY_HEADS)
    tl.store(to_q, low.to(q.dtype.element_ty), mask=is_query)
    tl.store(to_q + HALF, high.to(q.dtype.element_ty), mask=is_query)
    to_key = keys + place + (head - QUERY_HEADS) * BLOCK_SIZE * HEAD
    is_key = inside & turns & (head >= QUERY_HEADS)
    tl.store(to_key, (low * k_factor).to(keys.dtype.element_ty), mask=is_key)
    tl.store(to_key + HALF, (high * k_factor).to(keys.dtype.element_ty), mask=is_key)
