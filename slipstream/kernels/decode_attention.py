"""Paged decode attention: one query a lane, the heads of a KV group packed, split over KV on a fixed grid.

All lengths and block tables come from device memory, so one captured launch serves any lengths. A lane's keys
are cut into at most `splits` pieces, whose least size follows from all lanes' lengths (see DecodeConfig);
programs of pieces that a short lane does not need return at once.

`decode_from_qkv` also does the work of write_qkv, so that a decode layer needs no kernel before attention.

Legend: T tokens, L lanes, R rows, B blocks a row, H query heads, G KV heads, X = H + 2 G, D head size.
"""

from __future__ import annotations

from typing import Any

import torch

from slipstream.kernels.attention_common import MIN_ROWS, LayerAttention, attend_reference, score_factors
from slipstream.kernels.backend import (
    FEW_LANES,
    Arg,
    jit,
    jit_with,
    next_power_of_2,
    pdl_begin,
    pdl_options,
    tl,
    use_triton,
)
from slipstream.kernels.decode_config import DecodeConfig, DecodeScratch
from slipstream.kernels.decode_piece import attend_piece, tile_span
from slipstream.kernels.lane_order import order_lanes
from slipstream.kernels.paged import PagedLanes, PagedPool
from slipstream.kernels.qkv_write import HeadPrep, check_qkv, write_qkv_reference

Tensor = torch.Tensor


def decode_attention(
    q_THD: Tensor,
    lanes: PagedLanes,
    pool: PagedPool,
    shape: LayerAttention,
    config: DecodeConfig,
    scratch: DecodeScratch,
    out_THD: Tensor,
    order_L: Tensor | None = None,
) -> None:
    """Attention of lanes with one token over keys that are all in the pool; writes their rows of out_THD.

    order_L: order_lanes of the lanes' lengths, for an ordered config; made here unless given. It is read
    before the preceding kernel has ended, so that kernel must not be the one that writes it.
    """
    lanes.check()
    pool.check(shape.num_kv_heads, shape.head_dim)
    if q_THD.shape[1:] != (shape.num_heads, shape.head_dim) or q_THD.stride(2) != 1:
        raise ValueError("q must be [T, H, D], the elements of a head adjacent")
    if not use_triton(q_THD):
        decode_attention_reference(q_THD, lanes, pool, shape, out_THD)
        return
    _launch(q_THD, None, None, lanes, pool, shape, config, scratch, out_THD, order_L)


def decode_attention_reference(
    q_THD: Tensor, lanes: PagedLanes, pool: PagedPool, shape: LayerAttention, out_THD: Tensor
) -> None:
    """The same in torch operations."""
    lane_L = torch.arange(lanes.row_L.shape[0], device=q_THD.device)
    token_L = lane_L
    if lanes.query_start_L1 is not None:
        lane_L = lane_L[lanes.query_start_L1.diff() == 1]
        token_L = lanes.query_start_L1[lane_L].long()
    position_L = lanes.length_L[lane_L].long() - 1
    out_THD[token_L] = attend_reference(
        q_THD[token_L], lane_L, position_L, lanes.row_L, lanes.blocks_RB, pool, shape
    )


def decode_from_qkv(
    qkv_LXD: Tensor,
    slot_L: Tensor,
    prep: HeadPrep,
    lanes: PagedLanes,
    pool: PagedPool,
    shape: LayerAttention,
    config: DecodeConfig,
    scratch: DecodeScratch,
    order_L: Tensor | None = None,
) -> Tensor:
    """write_qkv and decode_attention in one, one token a lane: returns [L, H, D] in qkv's type.

    The token's position is its lane's length - 1; its K and V go to slot_L (int64), and count whatever the
    slot: a dead lane (length 1, null slot) sees itself alone. order_L: as for decode_attention.
    """
    lanes.check()
    check_qkv(qkv_LXD, shape.num_kv_heads, prep, pool)
    if qkv_LXD.shape[0] != lanes.row_L.shape[0] or slot_L.shape != lanes.row_L.shape:
        raise ValueError("every lane needs one token and a slot")
    if not use_triton(qkv_LXD):
        return decode_from_qkv_reference(qkv_LXD, slot_L, prep, lanes, pool, shape)
    out_LHD = qkv_LXD.new_empty(qkv_LXD.shape[0], shape.num_heads, shape.head_dim)
    _launch(qkv_LXD, slot_L, prep, lanes, pool, shape, config, scratch, out_LHD, order_L)
    return out_LHD


def decode_from_qkv_reference(
    qkv_LXD: Tensor,
    slot_L: Tensor,
    prep: HeadPrep,
    lanes: PagedLanes,
    pool: PagedPool,
    shape: LayerAttention,
) -> Tensor:
    """The same in torch operations (which read the token's K and V from its slot)."""
    position_L = lanes.length_L.long() - 1
    q_LHD = write_qkv_reference(qkv_LXD, position_L, slot_L, shape.num_kv_heads, prep, pool)
    out_LHD = torch.empty_like(q_LHD)
    decode_attention_reference(q_LHD, lanes, pool, shape, out_LHD)
    return out_LHD


def _launch(
    source_TXD: Tensor,
    slot_L: Tensor | None,
    prep: HeadPrep | None,
    lanes: PagedLanes,
    pool: PagedPool,
    shape: LayerAttention,
    config: DecodeConfig,
    scratch: DecodeScratch,
    out_THD: Tensor,
    order_L: Tensor | None,
) -> None:
    count, kv_heads = lanes.row_L.shape[0], shape.num_kv_heads
    if count == 0:
        return
    if config.splits > 1 and not scratch.holds(count, shape, count * config.splits):
        raise ValueError(f"scratch is too small for {count} lanes in {config.splits} splits")
    if order_L is not None and (order_L.shape != lanes.row_L.shape or order_L.dtype != torch.int32):
        raise ValueError(f"order must be int32 [{count}]")
    pdl = pdl_options(out_THD)
    if order_L is None and config.ordered:
        order_L = order_lanes(lanes.length_L)
        pdl = dict.fromkeys(pdl, False)  # the order is read before the wait
    scale, soft_cap = score_factors(shape)
    rope = scratch.lse if prep is None else prep.rope_P2D
    norm = rope if prep is None or prep.norm_YD is None else prep.norm_YD
    query_start = lanes.length_L if lanes.query_start_L1 is None else lanes.query_start_L1
    _decode_kernel[(kv_heads, count, config.splits)](
        source_TXD, out_THD, pool.keys, pool.values,
        lanes.row_L, lanes.length_L, query_start, lanes.length_L if order_L is None else order_L,
        lanes.blocks_RB, lanes.row_L if slot_L is None else slot_L,
        rope, norm, scratch.acc, scratch.lse, scratch.counter,
        scale * pool.k_scale, soft_cap, 0.0 if prep is None else prep.eps,
        1.0 / pool.k_scale, 1.0 / pool.v_scale, pool.v_scale,
        source_TXD.stride(0), source_TXD.stride(1), out_THD.stride(0), out_THD.stride(1),
        lanes.blocks_RB.stride(0), rope.stride(0), norm.stride(0),
        KV_HEADS=kv_heads, GROUP=shape.group, ROWS=max(MIN_ROWS, next_power_of_2(shape.group)),
        HEAD=shape.head_dim, HALF_PAD=max(MIN_ROWS, next_power_of_2(shape.head_dim // 2)),
        BLOCK_SIZE=pool.block_size, TILE=config.tile, SPLITS=config.splits, MIN_TILES=config.min_tiles,
        PROGRAMS=config.programs, LANES=max(FEW_LANES, next_power_of_2(count)) if config.programs else 0,
        WINDOW=shape.window or 0, CAPPED=shape.soft_cap is not None, FROM_QKV=prep is not None,
        NORMED=prep is not None and prep.norm_YD is not None, MIXED=lanes.query_start_L1 is not None,
        ORDERED=config.ordered, EARLY=config.early, **pdl, num_warps=config.warps, num_stages=config.stages,
    )


@jit_with(do_not_specialize=("blocks_stride",))
def _decode_kernel(
    source: Arg, out: Arg, keys: Arg, values: Arg, rows: Arg, lengths: Arg, query_start: Arg, order: Arg,
    blocks: Arg, slots: Arg, rope: Arg, norm: Arg, partial_acc: Arg, partial_lse: Arg,
    counter: Arg, scale: Arg, soft_cap: Arg, eps: Arg, k_factor: Arg, v_factor: Arg, v_scale: Arg,
    token_stride: Arg, head_stride: Arg, out_token_stride: Arg, out_head_stride: Arg,
    blocks_stride: Arg, rope_stride: Arg, norm_stride: Arg,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD: tl.constexpr,
    HALF_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
    MIN_TILES: tl.constexpr, PROGRAMS: tl.constexpr, LANES: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, FROM_QKV: tl.constexpr, NORMED: tl.constexpr, MIXED: tl.constexpr,
    ORDERED: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
) -> None:
    kv_head = tl.program_id(0)
    lane, piece = tl.program_id(1).to(tl.int64), tl.program_id(2)
    if ORDERED:
        lane = tl.load(order + lane).to(tl.int64)
    least = _least_piece(lengths, KV_HEADS, TILE, MIN_TILES, WINDOW, PROGRAMS, LANES)
    token, length, begin, end, pieces = _cut(
        lane, piece, lengths, query_start, least, TILE, SPLITS, WINDOW, FROM_QKV, MIXED
    )
    if piece < pieces:
        attend_piece(
            lane, token, tl.load(rows + lane), length, begin, end, piece, pieces, kv_head, source, out,
            keys, values, blocks, slots, rope, norm, partial_acc, partial_lse, counter, scale, soft_cap,
            eps, k_factor, v_factor, v_scale, token_stride, head_stride, out_token_stride, out_head_stride,
            blocks_stride, rope_stride, norm_stride, KV_HEADS, GROUP, ROWS, HEAD, HALF_PAD, BLOCK_SIZE,
            TILE, SPLITS, WINDOW, CAPPED, FROM_QKV, NORMED, EARLY, PDL,
        )
    elif MIXED:
        # There may be no lane with one token. A kernel of which nobody waits may end before its predecessor,
        # whose results its successor counts on.
        pdl_begin(PDL)


@jit
def _least_piece(
    lengths: Arg, KV_HEADS: tl.constexpr, TILE: tl.constexpr, MIN_TILES: tl.constexpr,
    WINDOW: tl.constexpr, PROGRAMS: tl.constexpr, LANES: tl.constexpr,
) -> Any:
    """In tiles. Lanes with more than one token count as well: a long step hides what that costs."""
    least = MIN_TILES
    if PROGRAMS:
        lane = tl.arange(0, LANES)
        length = tl.load(lengths + lane, mask=lane < tl.num_programs(1), other=0)
        if WINDOW:
            length = tl.minimum(length, WINDOW)
        least = tl.maximum(least, tl.cdiv(tl.sum(tl.cdiv(length, TILE)) * KV_HEADS, PROGRAMS))
    return least


@jit
def _cut(
    lane: Arg, piece: Arg, lengths: Arg, query_start: Arg, least: Arg,
    TILE: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, FROM_QKV: tl.constexpr,
    MIXED: tl.constexpr,
) -> Any:
    """A lane's token and length, the tiles of one of its pieces, and the count of these: 0 where it has
    other than one token."""
    token, count = lane, 1
    if MIXED:
        token = tl.load(query_start + lane).to(tl.int64)
        count = tl.load(query_start + lane + 1) - token
    length = tl.load(lengths + lane)
    _, _, first, last = tile_span(length, TILE, WINDOW, FROM_QKV)
    size = tl.maximum(tl.cdiv(last - first, SPLITS), least)
    pieces = tl.where(count == 1, tl.maximum(tl.cdiv(last - first, size), 1), 0)
    begin = first + piece * size
    return token, length, begin, tl.minimum(begin + size, last), pieces
