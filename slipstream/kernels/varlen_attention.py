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
    block_and_place,
    blocks_of_tile,
    capped_scores,
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
    """rows: queries of a tile times heads of a group, at least the group; tile: keys of one loop step.
    registers: most of a thread, so that two programs may share a multiprocessor, or None."""

    rows: int
    tile: int
    warps: int
    stages: int
    registers: int | None = None

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
    """int32 [X] each: a tile's lane, -1 where there is no work, and its first query within the lane.

    Tiles that see the most keys come first, by eighths of a power of two, so that the last to run are short;
    among equals a lane's tiles are neighbours, so that they find its keys in the L2 cache.
    """

    lane_X: Tensor
    first_X: Tensor


def list_tiles(lanes: PagedLanes, num_tokens: int, queries: int, least: int = 2) -> QueryTiles:
    """The tiles of `queries` tokens of every lane that has at least `least`. X is num_tokens // queries + L,
    enough for any lengths that add up to num_tokens."""
    lanes.check()
    start_L1 = lanes.query_start_L1
    if start_L1 is None or start_L1.dtype != torch.int32 or queries < 1:
        raise ValueError("query_start must be int32 [L + 1], queries at least 1")
    if not use_triton(start_L1):
        return list_tiles_reference(lanes, num_tokens, queries, least)
    count = lanes.row_L.shape[0]
    size = num_tokens // queries + count
    tiles = QueryTiles(start_L1.new_empty(size), start_L1.new_empty(size))
    _list_kernel[(ceil_div(size, LIST_AT_ONCE),)](
        start_L1, lanes.length_L, tiles.lane_X, tiles.first_X, count, size,
        QUERIES=queries, LEAST=least, LANES=max(FEW_LANES, next_power_of_2(count)), TILES=LIST_AT_ONCE,
        **pdl_options(start_L1), num_warps=4,
    )
    return tiles


def list_tiles_reference(lanes: PagedLanes, num_tokens: int, queries: int, least: int) -> QueryTiles:
    """The same by sorting."""
    assert lanes.query_start_L1 is not None
    found = []
    for lane, count in enumerate(lanes.query_start_L1.diff().tolist()):
        for first in range(0, count if count >= least else 0, queries):
            keys = max(int(lanes.length_L[lane]) - count, 0) + first + queries
            step = 1 << max(keys.bit_length() - 4, 0)
            found.append((-(keys // step * step), lane, -first))
    size = num_tokens // queries + lanes.row_L.shape[0]
    order = [(lane, -first) for _, lane, first in sorted(found)] + [(-1, 0)] * (size - len(found))
    tile_X2 = torch.tensor(order, dtype=torch.int32, device=lanes.row_L.device).view(size, 2)
    return QueryTiles(*(each.contiguous() for each in tile_X2.unbind(1)))


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
    _varlen_kernel[(shape.num_kv_heads, tiles.lane_X.shape[0])](
        q_THD, out_THD, pool.keys, pool.values, tiles.lane_X, tiles.first_X,
        lanes.row_L, lanes.length_L, lanes.query_start_L1, lanes.blocks_RB,
        scale * pool.k_scale, soft_cap, pool.v_scale,
        q_THD.stride(0), q_THD.stride(1), out_THD.stride(0), out_THD.stride(1), lanes.blocks_RB.stride(0),
        KV_HEADS=shape.num_kv_heads, GROUP=shape.group, ROWS=config.rows, QUERIES=config.queries(shape),
        HEAD=shape.head_dim, HEAD_PAD=max(MIN_ROWS, next_power_of_2(shape.head_dim)),
        BLOCK_SIZE=pool.block_size, TILE=config.tile, WINDOW=shape.window or 0,
        CAPPED=shape.soft_cap is not None,
        **pdl_options(out_THD), num_warps=config.warps, num_stages=config.stages, maxnreg=config.registers,
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


@jit_with(do_not_specialize=("lanes", "size"))
def _list_kernel(
    query_start: Arg, lengths: Arg, lane_out: Arg, first_out: Arg, lanes: Arg, size: Arg,
    QUERIES: tl.constexpr, LEAST: tl.constexpr, LANES: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr,
) -> None:
    """Each tile's place is the count of those that come before it, lane by lane."""
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    lane = tl.arange(0, LANES)
    pdl_begin(PDL)
    begin = tl.load(query_start + lane, mask=lane < lanes, other=0)
    count = tl.load(query_start + lane + 1, mask=lane < lanes, other=0) - begin
    done = tl.maximum(tl.load(lengths + lane, mask=lane < lanes, other=0) - count, 0)[None, :]
    tiles = tl.where(count >= LEAST, tl.cdiv(count, QUERIES), 0)
    before = (tl.cumsum(tiles, 0)[None, :] <= tile[:, None]) & (lane < lanes)[None, :]
    found = tl.sum(before.to(tl.int32), 1)
    index = tile - tl.sum(tl.where(before, tiles[None, :], 0), 1)
    own = lane[None, :] == found[:, None]
    keys = tl.sum(tl.where(own, done, 0), 1) + (index + 1) * QUERIES
    power = keys
    for shift in tl.static_range(5):
        power |= power >> (1 << shift)
    step = tl.maximum((power + 1) >> 4, 1)
    least = keys // step * step
    # Of its own class, tiles of earlier lanes come before, those of later lanes do not.
    edge = least[:, None] + tl.where(lane[None, :] < found[:, None], 0, step[:, None])
    fewer = tl.cdiv(tl.maximum(edge - done, 1), QUERIES) - 1
    ahead = tl.where(own, tiles[None, :] - 1 - index[:, None], tl.maximum(tiles[None, :] - fewer, 0))
    place = tl.where(found < lanes, tl.sum(ahead, 1), tile)
    tl.store(lane_out + place, tl.where(found < lanes, found, -1), mask=tile < size)
    tl.store(first_out + place, tl.where(found < lanes, index * QUERIES, 0), mask=tile < size)


@jit_with(do_not_specialize=("blocks_stride",))
def _varlen_kernel(
    q: Arg, out: Arg, keys: Arg, values: Arg, tile_lane: Arg, tile_first: Arg, rows: Arg, lengths: Arg,
    query_start: Arg, blocks: Arg, scale: Arg, soft_cap: Arg, v_scale: Arg,
    token_stride: Arg, head_stride: Arg, out_token_stride: Arg, out_head_stride: Arg, blocks_stride: Arg,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, QUERIES: tl.constexpr,
    HEAD: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, PDL: tl.constexpr,
) -> None:
    kv_head, work = tl.program_id(0), tl.program_id(1)
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
    start, end, clear, whole = tile_span(length - count + first, length, QUERIES, TILE, WINDOW)
    block_row = blocks + row * blocks_stride
    block = blocks_of_tile(block_row, start, length, BLOCK_SIZE, TILE)
    top, total, acc = attend_tiles(
        start, end, clear, whole, length, position, q_tile, top, total, acc, keys, values, block, block_row,
        kv_head, column, scale, soft_cap, KV_HEADS, HEAD, BLOCK_SIZE, TILE, WINDOW, CAPPED,
    )
    # A dead lane's queries may see nothing.
    acc *= (v_scale / tl.where(total > 0.0, total, 1.0))[:, None]
    to = out + token * out_token_stride + head[:, None] * out_head_stride + column
    tl.store(to, acc.to(out.dtype.element_ty), mask=inside)


@jit
def tile_span(
    earliest: Arg, length: Arg, QUERIES: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr
) -> Any:
    """The tiles of keys that QUERIES queries see, begin .. end - 1, of which each sees clear .. whole - 1
    whole, so that they need no mask. earliest: the first query's position."""
    end = tl.cdiv(tl.minimum(earliest + QUERIES, length), TILE)
    begin, clear, whole = 0, 0, tl.maximum(earliest + 1, 0) // TILE
    if WINDOW:
        begin = tl.maximum(earliest - WINDOW + 1, 0) // TILE
        clear = tl.cdiv(tl.maximum(earliest + QUERIES - WINDOW, 0), TILE)
    return begin, end, clear, whole


@jit
def attend_tiles(
    begin: Arg, end: Arg, clear: Arg, whole: Arg, length: Arg, position: Arg, q_tile: Arg, top: Arg,
    total: Arg, acc: Arg, keys: Arg, values: Arg, block: Arg, block_row: Arg, kv_head: Arg, column: Arg,
    scale: Arg, soft_cap: Arg, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
) -> Any:
    """Online softmax over tiles begin .. end - 1; see tile_span. block: of the first tile's keys. They are
    read a tile ahead; see decode_piece."""
    for tile in range(begin, end):
        key = tile * TILE + tl.arange(0, TILE)
        _, place = block_and_place(tile, TILE, BLOCK_SIZE)
        place = (kv_head * BLOCK_SIZE + place) * HEAD
        at = (block.to(tl.int64) * (KV_HEADS * BLOCK_SIZE * HEAD) + place)[:, None] + column
        block = blocks_of_tile(block_row, tile + 1, length, BLOCK_SIZE, TILE)
        inside = (key < length)[:, None] & (column < HEAD)
        k_tile = tl.load(keys + at, mask=inside, other=0.0).to(q_tile.dtype)
        v_tile = tl.load(values + at, mask=inside, other=0.0).to(q_tile.dtype)
        raw = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
        score = capped_scores(raw, scale, soft_cap, CAPPED)
        if (tile >= whole) | (tile < clear):
            seen = key[None, :] <= position[:, None]
            if WINDOW:
                seen = seen & (key[None, :] > position[:, None] - WINDOW)
            score = tl.where(seen, score, float("-inf"))
        weight, factor, top, total = softmax_step(score, scale, top, total, CAPPED)
        acc = tl.dot(weight.to(q_tile.dtype), v_tile, acc * factor[:, None], input_precision="ieee")
    return top, total, acc
