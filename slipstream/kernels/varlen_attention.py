"""Paged attention of lanes with any number of tokens: prefill, chunks of it, and steps mixed with decode.

Work comes in tiles of one lane's queries, listed on the device once a step (`list_tiles`), so a captured grid
serves any lengths: tokens // tile + lanes programs a KV head, of which those without work return at once.

A query's result does not depend on its neighbours: keys come in tiles of fixed places, in order, and a tile
in which a query sees nothing changes nothing, bit for bit.

Legend: T tokens, L lanes, X tiles, R rows, B blocks a row, H query heads, G KV heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from slipstream.kernels.attention_common import (
    FLOOR,
    MIN_ROWS,
    LayerAttention,
    attend_reference,
    base2_scores,
    score_factors,
    softmax_step,
)
from slipstream.kernels.backend import (
    FEW_LANES,
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
from slipstream.kernels.paged import PagedLanes, PagedPool

Tensor = torch.Tensor

LIST_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class VarlenConfig:
    """rows: queries of a tile times heads of a group, at least the group; tile: keys of one loop step."""

    rows: int
    tile: int
    warps: int
    stages: int

    def queries(self, shape: LayerAttention) -> int:
        """Queries of a tile."""
        return self.rows // shape.group


def choose_varlen(shape: LayerAttention, dtype: torch.dtype, all_lanes: bool = False) -> VarlenConfig:
    """Tiles that shared memory holds (227 KiB on Hopper). all_lanes: decode lanes, which fill two or three
    rows of a tile, come this way too."""
    least = max(MIN_ROWS, next_power_of_2(shape.group))
    if dtype.itemsize > 2:  # no tensor cores: small tiles, for registers' sake
        return VarlenConfig(rows=least, tile=32, warps=4, stages=2)
    if all_lanes:
        return VarlenConfig(rows=max(64, least), tile=32, warps=4, stages=3)
    if shape.head_dim <= 128:
        return VarlenConfig(rows=max(128, least), tile=64, warps=8, stages=3)
    return VarlenConfig(rows=max(64, least), tile=32, warps=8, stages=3)


@dataclass(frozen=True, slots=True)
class QueryTiles:
    """int32 [X] each: a tile's lane, -1 where there is no work, and its first query within the lane."""

    lane_X: Tensor
    first_X: Tensor


def list_tiles(query_start_L1: Tensor, num_tokens: int, queries: int, least: int = 2) -> QueryTiles:
    """The tiles of `queries` tokens of every lane that has at least `least`. query_start_L1: int32; X is
    num_tokens // queries + L, enough for any lengths that add up to num_tokens."""
    if query_start_L1.dim() != 1 or query_start_L1.dtype != torch.int32 or queries < 1:
        raise ValueError("query_start must be int32 [L + 1], queries at least 1")
    if not use_triton(query_start_L1):
        return list_tiles_reference(query_start_L1, num_tokens, queries, least)
    lanes = query_start_L1.shape[0] - 1
    count = num_tokens // queries + lanes
    lane_X, first_X = query_start_L1.new_empty(count), query_start_L1.new_empty(count)
    _list_kernel[(ceil_div(count, LIST_AT_ONCE),)](
        query_start_L1, lane_X, first_X, lanes, count,
        QUERIES=queries, LEAST=least, LANES=max(FEW_LANES, next_power_of_2(lanes)), TILES=LIST_AT_ONCE,
        **pdl_options(lane_X), num_warps=4,
    )
    return QueryTiles(lane_X, first_X)


def list_tiles_reference(query_start_L1: Tensor, num_tokens: int, queries: int, least: int) -> QueryTiles:
    """The same in torch operations."""
    lanes = query_start_L1.shape[0] - 1
    count_L = query_start_L1.diff()
    tiles_L = torch.where(count_L >= least, (count_L + queries - 1) // queries, 0)
    end_L = tiles_L.cumsum(0)
    place_X = torch.arange(num_tokens // queries + lanes, device=query_start_L1.device)
    lane_X = torch.searchsorted(end_L, place_X, right=True)
    safe_X = lane_X.clamp(max=lanes - 1)
    first_X = (place_X - end_L[safe_X] + tiles_L[safe_X]) * queries
    return QueryTiles(torch.where(lane_X < lanes, lane_X, -1).int(), first_X.int())


def varlen_attention(
    q_THD: Tensor,
    tiles: QueryTiles,
    lanes: PagedLanes,
    pool: PagedPool,
    shape: LayerAttention,
    config: VarlenConfig,
    out_THD: Tensor,
) -> None:
    """Causal attention of the listed tiles; writes their queries' rows of out_THD and no others.

    The pool holds all keys, this step's included. A lane's last query is at position length - 1.
    """
    lanes.check()
    pool.check(shape.num_kv_heads, shape.head_dim)
    if q_THD.shape[1:] != (shape.num_heads, shape.head_dim) or q_THD.stride(2) != 1:
        raise ValueError("q must be [T, H, D], the elements of a head adjacent")
    if lanes.query_start_L1 is None or config.rows < shape.group:
        raise ValueError("lanes need their query_start, and a tile the rows of a group")
    if not use_triton(q_THD):
        varlen_attention_reference(q_THD, tiles, lanes, pool, shape, config, out_THD)
        return
    scale, soft_cap = score_factors(shape)
    _varlen_kernel[(tiles.lane_X.shape[0], shape.num_kv_heads)](
        q_THD, out_THD, pool.keys, pool.values, tiles.lane_X, tiles.first_X,
        lanes.row_L, lanes.length_L, lanes.query_start_L1, lanes.blocks_RB,
        scale * pool.k_scale, soft_cap, pool.v_scale,
        q_THD.stride(0), q_THD.stride(1), out_THD.stride(0), out_THD.stride(1), lanes.blocks_RB.stride(0),
        KV_HEADS=shape.num_kv_heads, GROUP=shape.group, ROWS=config.rows, QUERIES=config.queries(shape),
        HEAD=shape.head_dim, HEAD_PAD=max(MIN_ROWS, next_power_of_2(shape.head_dim)),
        BLOCK_SIZE=pool.block_size, TILE=config.tile, WINDOW=shape.window or 0,
        CAPPED=shape.soft_cap is not None,
        **pdl_options(out_THD), num_warps=config.warps, num_stages=config.stages,
    )


def varlen_attention_reference(
    q_THD: Tensor,
    tiles: QueryTiles,
    lanes: PagedLanes,
    pool: PagedPool,
    shape: LayerAttention,
    config: VarlenConfig,
    out_THD: Tensor,
) -> None:
    """The same in torch operations."""
    assert lanes.query_start_L1 is not None
    work = tiles.lane_X >= 0
    lane_X, first_X = tiles.lane_X[work].long(), tiles.first_X[work]
    count_L = lanes.query_start_L1.diff()
    query_XQ = first_X[:, None] + torch.arange(config.queries(shape), device=first_X.device)
    inside_XQ = query_XQ < count_L[lane_X, None]
    lane_T = lane_X[:, None].expand_as(query_XQ)[inside_XQ]
    token_T = (lanes.query_start_L1[lane_X, None] + query_XQ)[inside_XQ].long()
    position_T = query_XQ[inside_XQ].long() + (lanes.length_L - count_L)[lane_T]
    out_THD[token_T] = attend_reference(
        q_THD[token_T], lane_T, position_T, lanes.row_L, lanes.blocks_RB, pool, shape
    )


@jit_with(do_not_specialize=("lanes", "count"))
def _list_kernel(
    query_start: Arg, lane_out: Arg, first_out: Arg, lanes: Arg, count: Arg,
    QUERIES: tl.constexpr, LEAST: tl.constexpr, LANES: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr,
) -> None:
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    lane = tl.arange(0, LANES)
    pdl_begin(PDL)
    begin = tl.load(query_start + lane, mask=lane < lanes, other=0)
    length = tl.load(query_start + lane + 1, mask=lane < lanes, other=0) - begin
    tiles = tl.where(length >= LEAST, tl.cdiv(length, QUERIES), 0)
    before = (tl.cumsum(tiles, 0)[None, :] <= tile[:, None]) & (lane < lanes)[None, :]
    found = tl.sum(before.to(tl.int32), 1)
    first = (tile - tl.sum(tl.where(before, tiles[None, :], 0), 1)) * QUERIES
    tl.store(lane_out + tile, tl.where(found < lanes, found, -1), mask=tile < count)
    tl.store(first_out + tile, first, mask=tile < count)


@jit_with(do_not_specialize=("blocks_stride",))
def _varlen_kernel(
    q: Arg, out: Arg, keys: Arg, values: Arg, tile_lane: Arg, tile_first: Arg, rows: Arg, lengths: Arg,
    query_start: Arg, blocks: Arg, scale: Arg, soft_cap: Arg, v_scale: Arg,
    token_stride: Arg, head_stride: Arg, out_token_stride: Arg, out_head_stride: Arg, blocks_stride: Arg,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, QUERIES: tl.constexpr,
    HEAD: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, PDL: tl.constexpr,
) -> None:
    # Late tiles see the most keys: they start first.
    work = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    pdl_begin(PDL)
    lane = tl.load(tile_lane + work)
    if lane < 0:
        return
    first = tl.load(tile_first + work)
    begin = tl.load(query_start + lane).to(tl.int64)
    count = tl.load(query_start + lane + 1).to(tl.int32) - begin.to(tl.int32)
    length, row = tl.load(lengths + lane), tl.load(rows + lane)
    place = tl.arange(0, ROWS)
    query = first + place // GROUP
    head = kv_head * GROUP + place % GROUP
    column = tl.arange(0, HEAD_PAD)[None, :]
    inside = ((place < QUERIES * GROUP) & (query < count))[:, None] & (column < HEAD)
    token = (begin + query)[:, None]
    q_tile = tl.load(q + token * token_stride + head[:, None] * head_stride + column, mask=inside, other=0.0)
    position = length - count + query
    top = tl.full([ROWS], FLOOR, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_PAD], tl.float32)
    block_row = blocks + row * blocks_stride
    earliest = length - count + first
    last = tl.cdiv(tl.minimum(earliest + QUERIES, length), TILE)
    # Tiles that every query sees whole need no mask.
    if WINDOW:
        whole = tl.maximum(earliest - WINDOW + 1, 0) // TILE
    else:
        whole = tl.minimum(tl.maximum(earliest + 1, 0) // TILE, last)
        top, total, acc = _attend_tiles(
            0, whole, length, position, q_tile, top, total, acc, keys, values, block_row, kv_head, column,
            scale, soft_cap, KV_HEADS, HEAD, BLOCK_SIZE, TILE, WINDOW, CAPPED, False,
        )
    top, total, acc = _attend_tiles(
        whole, last, length, position, q_tile, top, total, acc, keys, values, block_row, kv_head, column,
        scale, soft_cap, KV_HEADS, HEAD, BLOCK_SIZE, TILE, WINDOW, CAPPED, True,
    )
    # A dead lane's queries may see nothing.
    acc *= (v_scale / tl.where(total > 0.0, total, 1.0))[:, None]
    to = out + token * out_token_stride + head[:, None] * out_head_stride + column
    tl.store(to, acc.to(out.dtype.element_ty), mask=inside)


@jit
def _attend_tiles(
    begin: Arg, end: Arg, length: Arg, position: Arg, q_tile: Arg, top: Arg, total: Arg, acc: Arg,
    keys: Arg, values: Arg, block_row: Arg, kv_head: Arg, column: Arg, scale: Arg, soft_cap: Arg,
    KV_HEADS: tl.constexpr, HEAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr,
) -> Any:
    """Online softmax over the keys of tiles begin .. end - 1. Block ids are read a tile ahead; see
    decode_attention."""
    key = begin * TILE + tl.arange(0, TILE)
    block = tl.load(block_row + key // BLOCK_SIZE, mask=key < length, other=0)
    for tile in range(begin, end):
        key = tile * TILE + tl.arange(0, TILE)
        stored = key < length if MASKED else key >= 0
        place = ((block.to(tl.int64) * KV_HEADS + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE) * HEAD
        block = tl.load(block_row + (key + TILE) // BLOCK_SIZE, mask=key + TILE < length, other=0)
        at = place[:, None] + column
        inside = stored[:, None] & (column < HEAD)
        k_tile = tl.load(keys + at, mask=inside, other=0.0).to(q_tile.dtype)
        v_tile = tl.load(values + at, mask=inside, other=0.0).to(q_tile.dtype)
        score = base2_scores(
            tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee"), scale, soft_cap, CAPPED
        )
        if MASKED:
            seen = (key[None, :] <= position[:, None]) & stored[None, :]
            if WINDOW:
                seen = seen & (key[None, :] > position[:, None] - WINDOW)
            score = tl.where(seen, score, float("-inf"))
        weight, factor, top, total = softmax_step(score, top, total)
        acc = tl.dot(weight.to(q_tile.dtype), v_tile, acc * factor[:, None], input_precision="ieee")
    return top, total, acc
