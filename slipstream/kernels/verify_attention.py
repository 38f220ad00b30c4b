"""Paged attention of lanes with a few tokens: a row's last token and the drafts past it. Split over KV, as in
decode attention: with few lanes a multiprocessor each would walk all keys alone.

A program has some of a lane's queries, all heads of a KV head's group, and a piece of its keys; what a lane
has not so many queries or keys for returns at once. So a lane without drafts costs about what it costs in
decode attention. The last piece to finish merges them, always in the same order.

Legend: T tokens, L lanes, R rows, B blocks a row, H query heads, G KV heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.kernels.attention_common import (
    FLOOR,
    MIN_ROWS,
    LayerAttention,
    attend_reference,
    blocks_of_tile,
    score_factors,
)
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
from slipstream.kernels.paged import PagedLanes, PagedPool
from slipstream.kernels.varlen_attention import attend_tiles, tile_span

Tensor = torch.Tensor

# Programs that lanes are split into at most: two for each multiprocessor of an H200.
PROGRAMS = 264
MOST_ROWS = 64
MERGED_AT_ONCE = tl.constexpr(4)


@dataclass(frozen=True, slots=True)
class VerifyConfig:
    """tokens: of a lane at most; longer ones are skipped. rows: queries of a program times heads of a group,
    at least the group; splits: most pieces of a lane's keys; tile: keys of one loop step; min_tiles: least
    piece, in tiles."""

    tokens: int
    rows: int
    splits: int
    tile: int
    warps: int
    stages: int
    min_tiles: int = 2

    def queries(self, shape: LayerAttention) -> int:
        """Queries of a program."""
        return self.rows // shape.group

    def chunks(self, shape: LayerAttention) -> int:
        """Programs that a lane's queries take."""
        return ceil_div(self.tokens, self.queries(shape))


def choose_verify(lanes: int, tokens: int, shape: LayerAttention, dtype: torch.dtype) -> VerifyConfig:
    """Few lanes want many pieces, but short ones cost more to merge than they save: by sweeps on an H200 at
    head size 128 and contexts of 384 and 4,096 tokens, between products (tests/gpu/time_chain.py)."""
    least = max(MIN_ROWS, next_power_of_2(shape.group))
    rows = max(least, min(next_power_of_2(shape.group * tokens), MOST_ROWS))
    programs = lanes * shape.num_kv_heads * ceil_div(tokens, rows // shape.group)
    splits = 1 << max(min(PROGRAMS // programs, 32).bit_length() - 1, 0)
    if dtype.itemsize > 2:  # no tensor cores: small tiles, for registers' sake
        return VerifyConfig(tokens, rows, splits, tile=MIN_ROWS, warps=4, stages=2)
    tile = 64 if shape.head_dim <= 128 else 32
    return VerifyConfig(tokens, rows, splits, tile, warps=4, stages=3, min_tiles=3 if programs < 128 else 16)


class VerifyScratch:
    """Partial results of pieces, and counters that are zero between launches (one stream)."""

    def __init__(self, shape: LayerAttention, device: torch.device) -> None:
        rows = PROGRAMS * max(MOST_ROWS, next_power_of_2(shape.group))
        self.acc = torch.empty(rows * shape.head_dim, dtype=torch.float32, device=device)
        self.lse = torch.empty(rows, dtype=torch.float32, device=device)
        self.counter = torch.zeros(PROGRAMS, dtype=torch.int32, device=device)


def verify_attention(
    q_THD: Tensor,
    lanes: PagedLanes,
    pool: PagedPool,
    shape: LayerAttention,
    config: VerifyConfig,
    scratch: VerifyScratch,
    out_THD: Tensor,
) -> None:
    """Causal attention of lanes with 1 to config.tokens tokens; writes their rows of out_THD and no others.

    The pool holds all keys, this step's included. A lane's last query is at position length - 1. Lengths,
    rows and block ids are read before the preceding kernel has ended.
    """
    lanes.check()
    pool.check(shape.num_kv_heads, shape.head_dim)
    count, query_start_L1 = lanes.row_L.shape[0], lanes.query_start_L1
    if q_THD.shape[1:] != (shape.num_heads, shape.head_dim) or q_THD.stride(2) != 1:
        raise ValueError("q must be [T, H, D], the elements of a head adjacent")
    if query_start_L1 is None or config.rows < shape.group:
        raise ValueError("lanes need their query_start, and a program the rows of a group")
    if not use_triton(q_THD):
        verify_attention_reference(q_THD, lanes, pool, shape, config, out_THD)
        return
    work = count * config.chunks(shape)
    if config.splits > 1 and work * shape.num_kv_heads * config.splits > PROGRAMS:
        raise ValueError(f"scratch is too small for {work} pieces of work in {config.splits} splits")
    scale, soft_cap = score_factors(shape)
    _verify_kernel[(shape.num_kv_heads, work, config.splits)](
        q_THD, out_THD, pool.keys, pool.values, lanes.row_L, lanes.length_L, query_start_L1, lanes.blocks_RB,
        scratch.acc, scratch.lse, scratch.counter, scale * pool.k_scale, soft_cap, pool.v_scale,
        q_THD.stride(0), q_THD.stride(1), out_THD.stride(0), out_THD.stride(1), lanes.blocks_RB.stride(0),
        KV_HEADS=shape.num_kv_heads, GROUP=shape.group, ROWS=config.rows, QUERIES=config.queries(shape),
        CHUNKS=config.chunks(shape), MOST=config.tokens, HEAD=shape.head_dim,
        HEAD_PAD=max(MIN_ROWS, next_power_of_2(shape.head_dim)), BLOCK_SIZE=pool.block_size,
        TILE=config.tile, SPLITS=config.splits, MIN_TILES=config.min_tiles, WINDOW=shape.window or 0,
        CAPPED=shape.soft_cap is not None, **pdl_options(out_THD), num_warps=config.warps,
        num_stages=config.stages,
    )  # fmt: skip


def verify_attention_reference(
    q_THD: Tensor, lanes: PagedLanes, pool: PagedPool, shape: LayerAttention, config: VerifyConfig,
    out_THD: Tensor,
) -> None:
    """The same in torch operations."""
    assert lanes.query_start_L1 is not None
    count_L = lanes.query_start_L1.diff()
    query_LQ = torch.arange(config.tokens, device=q_THD.device).expand(len(count_L), -1)
    inside_LQ = (query_LQ < count_L[:, None]) & (count_L[:, None] <= config.tokens)
    lane_T, query_T = inside_LQ.nonzero(as_tuple=True)
    token_T = lanes.query_start_L1[lane_T].long() + query_T
    position_T = (lanes.length_L - count_L)[lane_T].long() + query_T
    out_THD[token_T] = attend_reference(
        q_THD[token_T], lane_T, position_T, lanes.row_L, lanes.blocks_RB, pool, shape
    )


@jit_with(do_not_specialize=("blocks_stride",))
def _verify_kernel(
    q: Arg, out: Arg, keys: Arg, values: Arg, rows: Arg, lengths: Arg, query_start: Arg, blocks: Arg,
    partial_acc: Arg, partial_lse: Arg, counter: Arg, scale: Arg, soft_cap: Arg, v_scale: Arg,
    token_stride: Arg, head_stride: Arg, out_token_stride: Arg, out_head_stride: Arg, blocks_stride: Arg,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, QUERIES: tl.constexpr,
    CHUNKS: tl.constexpr, MOST: tl.constexpr, HEAD: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, MIN_TILES: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, PDL: tl.constexpr,
) -> None:
    kv_head, work, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    lane, first = work // CHUNKS, (work % CHUNKS) * QUERIES
    begin = tl.load(query_start + lane).to(tl.int64)
    count = tl.load(query_start + lane + 1) - begin.to(tl.int32)
    length, row = tl.load(lengths + lane), tl.load(rows + lane)
    start, end, clear, whole = tile_span(length - count + first, length, QUERIES, TILE, WINDOW)
    size = tl.maximum(tl.cdiv(end - start, SPLITS), MIN_TILES)
    pieces = tl.maximum(tl.cdiv(end - start, size), 1)
    start += piece * size
    block_row = blocks + row * blocks_stride
    block = blocks_of_tile(block_row, start, length, BLOCK_SIZE, TILE)
    # All wait, those without work too: a kernel that ends before its predecessor misleads its successor.
    pdl_begin(PDL)
    if (count <= MOST) & (first < count) & (piece < pieces):
        place = tl.arange(0, ROWS)
        query, head = first + place // GROUP, kv_head * GROUP + place % GROUP
        column = tl.arange(0, HEAD_PAD)[None, :]
        inside = ((place < QUERIES * GROUP) & (query < count))[:, None] & (column < HEAD)
        token = (begin + query)[:, None]
        at = q + token * token_stride + head[:, None] * head_stride + column
        q_tile = tl.load(at, mask=inside, other=0.0)
        top = tl.full([ROWS], FLOOR, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, HEAD_PAD], tl.float32)
        top, total, acc = attend_tiles(
            start, tl.minimum(start + size, end), clear, whole, length, length - count + query, q_tile, top,
            total, acc, keys, values, block, block_row, kv_head, column, scale, soft_cap,
            KV_HEADS, HEAD, BLOCK_SIZE, TILE, WINDOW, CAPPED,
        )
        # A query sees nothing of a piece that lies in its future, and a dead lane's may see nothing at all.
        acc *= (v_scale / tl.where(total > 0.0, total, 1.0))[:, None]
        to = out + token * out_token_stride + head[:, None] * out_head_stride + column
        if pieces == 1:
            tl.store(to, acc.to(out.dtype.element_ty), mask=inside)
        else:
            lse = tl.where(total > 0.0, top + tl.log2(total), FLOOR)
            _finish(
                acc, lse, to, inside, partial_acc, partial_lse, counter + work * KV_HEADS + kv_head,
                (work * KV_HEADS + kv_head) * SPLITS, piece, pieces, place, column, ROWS, HEAD, HEAD_PAD,
                SPLITS,
            )


@jit
def _finish(
    acc: Arg, lse: Arg, to: Arg, inside: Arg, partial_acc: Arg, partial_lse: Arg, counter: Arg, first: Arg,
    piece: Arg, pieces: Arg, place: Arg, column: Arg,
    ROWS: tl.constexpr, HEAD: tl.constexpr, HEAD_PAD: tl.constexpr, SPLITS: tl.constexpr,
) -> None:
    """Store a partial result; the last piece to do so merges them. Past the L1 cache: others wrote them."""
    at = (first + piece) * ROWS + place
    tl.store(partial_lse + at, lse)
    tl.store(partial_acc + at[:, None] * HEAD + column, acc, mask=inside)
    # One thread's release covers its whole program's stores only after a barrier.
    tl.debug_barrier()
    if tl.atomic_add(counter, 1, sem="acq_rel") == pieces - 1:
        # All sums first, then so many results at once: one after the other each would wait for memory.
        every = tl.arange(0, SPLITS)[:, None]
        at_every = partial_lse + (first + every) * ROWS + place[None, :]
        lse_every = tl.load(at_every, mask=every < pieces, other=FLOOR, cache_modifier=".cg")
        top = tl.max(lse_every, 0)
        total = tl.sum(tl.exp2(lse_every - top[None, :]), 0)
        merged = tl.zeros([ROWS, HEAD_PAD], tl.float32)
        for other in range(0, pieces, MERGED_AT_ONCE):
            for i in tl.static_range(MERGED_AT_ONCE):
                at_other = (first + other + i) * ROWS + place
                there = place < tl.where(other + i < pieces, ROWS, 0)
                lse_other = tl.load(partial_lse + at_other, mask=there, other=FLOOR, cache_modifier=".cg")
                part = tl.load(
                    partial_acc + at_other[:, None] * HEAD + column, mask=inside & there[:, None], other=0.0,
                    cache_modifier=".cg",
                )
                merged += part * tl.exp2(lse_other - top)[:, None]
        tl.store(to, (merged / total[:, None]).to(to.dtype.element_ty), mask=inside)
        tl.store(counter, 0)
