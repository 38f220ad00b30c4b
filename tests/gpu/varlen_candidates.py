"""Other forms of the kernel of varlen_attention.py, for check_flash.py to race against it: head size 128, no
window, no soft cap, one pool type. What wins there moves into the package.

Every form runs the tiles that all queries see without masks first, and the few on the diagonal after them.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from slipstream.kernels.attention_common import (
    FLOOR,
    LayerAttention,
    block_and_place,
    score_factors,
    softmax_step,
)
from slipstream.kernels.backend import Arg, jit, jit_with, pdl_begin, pdl_options, tl
from slipstream.kernels.paged import PagedLanes, PagedPool
from slipstream.kernels.varlen_attention import QueryTiles

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Candidate:
    """rows, tile, warps, stages: as in VarlenConfig. tma: keys come by tensor descriptors, a tile within a
    block. registers: most of a thread, so that two programs share a multiprocessor: then the softmax of one
    may run beside the products of the other."""

    rows: int
    tile: int
    warps: int
    stages: int
    tma: bool = False
    registers: int | None = None

    def fits(self, block_size: int) -> bool:
        return not self.tma or block_size % self.tile == 0


CANDIDATES = [
    Candidate(128, 64, 8, 3),
    Candidate(128, 64, 8, 3, tma=True),
    Candidate(128, 128, 8, 2, tma=True),
    Candidate(128, 64, 8, 2, tma=True, registers=128),
    Candidate(128, 32, 8, 3, tma=True, registers=128),
    Candidate(64, 64, 4, 2, tma=True),
]


def candidate_attention(
    q_THD: Tensor, tiles: QueryTiles, lanes: PagedLanes, pool: PagedPool, shape: LayerAttention,
    config: Candidate, out_THD: Tensor,
) -> None:  # fmt: skip
    """As varlen_attention."""
    keys, values = pool.keys, pool.values
    if config.tma:
        make = import_module("triton.tools.tensor_descriptor").TensorDescriptor.from_tensor
        block = [config.tile, shape.head_dim]
        keys, values = (make(each.view(-1, shape.head_dim), block) for each in (keys, values))
    scale, _ = score_factors(shape)
    candidate_kernel[(shape.num_kv_heads, tiles.lane_X.shape[0])](
        q_THD, out_THD, keys, values, tiles.lane_X, tiles.first_X,
        lanes.row_L, lanes.length_L, lanes.query_start_L1, lanes.blocks_RB, scale,
        q_THD.stride(0), q_THD.stride(1), lanes.blocks_RB.stride(0),
        KV_HEADS=shape.num_kv_heads, GROUP=shape.group, ROWS=config.rows, QUERIES=config.rows // shape.group,
        HEAD=shape.head_dim, BLOCK_SIZE=pool.block_size, TILE=config.tile, TMA=config.tma,
        **pdl_options(out_THD), num_warps=config.warps, num_stages=config.stages, maxnreg=config.registers,
    )  # fmt: skip


@jit_with(do_not_specialize=("blocks_stride",))
def candidate_kernel(
    q: Arg, out: Arg, keys: Arg, values: Arg, tile_lane: Arg, tile_first: Arg, rows: Arg, lengths: Arg,
    query_start: Arg, blocks: Arg, scale: Arg, token_stride: Arg, head_stride: Arg, blocks_stride: Arg,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, QUERIES: tl.constexpr,
    HEAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, TMA: tl.constexpr, PDL: tl.constexpr,
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
    column = tl.arange(0, HEAD)[None, :]
    inside = ((place < QUERIES * GROUP) & (query < count))[:, None] & (column < HEAD)
    at = (begin + query)[:, None] * token_stride + head[:, None] * head_stride + column
    q_tile = tl.load(q + at, mask=inside, other=0.0)
    position = length - count + query
    top = tl.full([ROWS], FLOOR, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD], tl.float32)
    earliest = length - count + first
    end = tl.cdiv(tl.minimum(earliest + QUERIES, length), TILE)
    whole = tl.minimum(tl.maximum(earliest + 1, 0) // TILE, end)
    block_row = blocks + row * blocks_stride
    top, total, acc = _tiles(
        0, whole, length, position, q_tile, top, total, acc, keys, values, block_row, kv_head, column, scale,
        KV_HEADS, HEAD, BLOCK_SIZE, TILE, TMA, False,
    )
    top, total, acc = _tiles(
        whole, end, length, position, q_tile, top, total, acc, keys, values, block_row, kv_head, column,
        scale, KV_HEADS, HEAD, BLOCK_SIZE, TILE, TMA, True,
    )
    acc *= (1.0 / tl.where(total > 0.0, total, 1.0))[:, None]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)


@jit
def _block(
    block_row: Arg, tile: Arg, length: Arg,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr,
) -> Any:
    """Ids of a tile's blocks: of each key's, or by TMA the one that the tile is in."""
    if TMA:
        return tl.load(block_row + tile // (BLOCK_SIZE // TILE))
    else:
        here, _ = block_and_place(tile, TILE, BLOCK_SIZE)
        if MASKED:
            return tl.load(block_row + here, mask=tile * TILE + tl.arange(0, TILE) < length, other=0)
        else:
            return tl.load(block_row + here)


@jit
def _load(
    source: Arg, block: Arg, tile: Arg, length: Arg, kv_head: Arg, column: Arg,
    KV_HEADS: tl.constexpr, HEAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    TMA: tl.constexpr, MASKED: tl.constexpr,
) -> Any:
    """Keys or values of one tile."""
    if TMA:
        place = tile % (BLOCK_SIZE // TILE) * TILE
        return source.load([(block * KV_HEADS + kv_head) * BLOCK_SIZE + place, 0])
    else:
        _, place = block_and_place(tile, TILE, BLOCK_SIZE)
        at = block.to(tl.int64) * (KV_HEADS * BLOCK_SIZE * HEAD) + (kv_head * BLOCK_SIZE + place) * HEAD
        if MASKED:
            inside = tile * TILE + tl.arange(0, TILE) < length
            return tl.load(source + at[:, None] + column, mask=inside[:, None], other=0.0)
        else:
            return tl.load(source + at[:, None] + column)


@jit
def _tiles(
    begin: Arg, end: Arg, length: Arg, position: Arg, q_tile: Arg, top: Arg, total: Arg, acc: Arg,
    keys: Arg, values: Arg, block_row: Arg, kv_head: Arg, column: Arg, scale: Arg,
    KV_HEADS: tl.constexpr, HEAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    TMA: tl.constexpr, MASKED: tl.constexpr,
) -> Any:
    block = _block(block_row, begin, length, BLOCK_SIZE, TILE, TMA, True)
    for tile in range(begin, end):
        k_tile = _load(
            keys, block, tile, length, kv_head, column, KV_HEADS, HEAD, BLOCK_SIZE, TILE, TMA, MASKED
        )
        v_tile = _load(
            values, block, tile, length, kv_head, column, KV_HEADS, HEAD, BLOCK_SIZE, TILE, TMA, MASKED
        )
        block = _block(block_row, tile + 1, length, BLOCK_SIZE, TILE, TMA, True)
        score = tl.dot(q_tile, tl.trans(k_tile))
        if MASKED:
            key = tile * TILE + tl.arange(0, TILE)
            score = tl.where(key[None, :] <= position[:, None], score, float("-inf"))
        weight, factor, top, total = softmax_step(score, scale, top, total, False)
        acc = tl.dot(weight.to(q_tile.dtype), v_tile, acc * factor[:, None])
    return top, total, acc
