"""Paged decode attention: one query a lane, the heads of a KV group packed, split over KV on a fixed grid.

All lengths and block tables come from device memory, so one captured launch serves any lengths. A lane's
keys are cut into at most `splits` pieces of at least `min_tiles` tiles; pieces that a short lane does not
need return at once. The last piece of a lane to finish merges the partial results, always in the same order.

`decode_from_qkv` also does the work of write_qkv, so that a decode layer needs no kernel before attention.

Legend: T tokens, L lanes, R rows, B blocks a row, H query heads, G KV heads, X = H + 2 G, D head size.
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
    Arg,
    jit,
    jit_with,
    next_power_of_2,
    pdl_begin,
    pdl_options,
    tl,
    use_triton,
)
from slipstream.kernels.paged import PagedLanes, PagedPool
from slipstream.kernels.qkv_write import HeadPrep, check_qkv, head_norm, rotate_halves, write_qkv_reference

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """splits: most pieces of a lane's keys; tile: keys of one loop step; min_tiles: least piece, in tiles."""

    splits: int
    tile: int
    warps: int
    stages: int
    min_tiles: int = 1


def choose_decode(lanes: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> DecodeConfig:
    """By a sweep on an H200 at head size 128: few lanes want many splits, many lanes small programs."""
    programs = lanes * num_kv_heads
    # Tiles of 8 KiB, so that every choice below fits in shared memory.
    tile = max(MIN_ROWS, min(32, 8192 // (next_power_of_2(head_dim) * dtype.itemsize)))
    if programs <= 16:
        return DecodeConfig(splits=16, tile=2 * tile, warps=4, stages=3)
    if programs <= 256:
        return DecodeConfig(splits=16, tile=tile, warps=1, stages=3, min_tiles=2)
    if programs <= 1024:
        return DecodeConfig(splits=8, tile=2 * tile, warps=4, stages=3, min_tiles=16)
    return DecodeConfig(splits=4, tile=tile, warps=1, stages=2, min_tiles=64)


class DecodeScratch:
    """Partial results and counters of split lanes. Counters are zero between launches; one stream only."""

    def __init__(self, lanes: int, shape: LayerAttention, splits: int, device: torch.device) -> None:
        places = lanes * shape.num_heads * splits
        self.acc = torch.empty(places * shape.head_dim, dtype=torch.float32, device=device)
        self.lse = torch.empty(places, dtype=torch.float32, device=device)
        self.counter = torch.zeros(lanes * shape.num_kv_heads, dtype=torch.int32, device=device)

    def holds(self, lanes: int, shape: LayerAttention, splits: int) -> bool:
        """Whether there is room for these lanes in these splits."""
        places = lanes * shape.num_heads * splits
        room = places * shape.head_dim <= self.acc.shape[0] and places <= self.lse.shape[0]
        return room and lanes * shape.num_kv_heads <= self.counter.shape[0]


def decode_attention(
    q_THD: Tensor,
    lanes: PagedLanes,
    pool: PagedPool,
    shape: LayerAttention,
    config: DecodeConfig,
    scratch: DecodeScratch,
    out_THD: Tensor,
) -> None:
    """Attention of lanes with one token over keys that are all in the pool; writes their rows of out_THD."""
    lanes.check()
    pool.check(shape.num_kv_heads, shape.head_dim)
    if q_THD.shape[1:] != (shape.num_heads, shape.head_dim) or q_THD.stride(2) != 1:
        raise ValueError("q must be [T, H, D], the elements of a head adjacent")
    if not use_triton(q_THD):
        decode_attention_reference(q_THD, lanes, pool, shape, out_THD)
        return
    _launch(q_THD, None, None, lanes, pool, shape, config, scratch, out_THD)


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
) -> Tensor:
    """write_qkv and decode_attention in one, one token a lane: returns [L, H, D] in qkv's type.

    The token's position is its lane's length - 1; its K and V go to slot_L (int64), and count whatever the
    slot: a dead lane (length 1, null slot) sees itself alone.
    """
    lanes.check()
    check_qkv(qkv_LXD, shape.num_kv_heads, prep, pool)
    if qkv_LXD.shape[0] != lanes.row_L.shape[0] or slot_L.shape != lanes.row_L.shape:
        raise ValueError("every lane needs one token and a slot")
    if not use_triton(qkv_LXD):
        return decode_from_qkv_reference(qkv_LXD, slot_L, prep, lanes, pool, shape)
    out_LHD = qkv_LXD.new_empty(qkv_LXD.shape[0], shape.num_heads, shape.head_dim)
    _launch(qkv_LXD, slot_L, prep, lanes, pool, shape, config, scratch, out_LHD)
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
) -> None:
    count = lanes.row_L.shape[0]
    if count == 0:
        return
    if config.splits > 1 and not scratch.holds(count, shape, config.splits):
        raise ValueError(f"scratch is too small for {count} lanes in {config.splits} splits")
    scale, soft_cap = score_factors(shape)
    rope = scratch.lse if prep is None else prep.rope_P2D
    norm = rope if prep is None or prep.norm_YD is None else prep.norm_YD
    query_start = lanes.length_L if lanes.query_start_L1 is None else lanes.query_start_L1
    _decode_kernel[(shape.num_kv_heads, count, config.splits)](
        source_TXD, out_THD, pool.keys, pool.values,
        lanes.row_L, lanes.length_L, query_start, lanes.blocks_RB, lanes.row_L if slot_L is None else slot_L,
        rope, norm, scratch.acc, scratch.lse, scratch.counter,
        scale * pool.k_scale, soft_cap, 0.0 if prep is None else prep.eps,
        1.0 / pool.k_scale, 1.0 / pool.v_scale, pool.v_scale,
        source_TXD.stride(0), source_TXD.stride(1), out_THD.stride(0), out_THD.stride(1),
        lanes.blocks_RB.stride(0), rope.stride(0), norm.stride(0),
        KV_HEADS=shape.num_kv_heads, GROUP=shape.group, ROWS=max(MIN_ROWS, next_power_of_2(shape.group)),
        HEAD=shape.head_dim, HALF_PAD=max(MIN_ROWS, next_power_of_2(shape.head_dim // 2)),
        BLOCK_SIZE=pool.block_size, TILE=config.tile, SPLITS=config.splits, MIN_TILES=config.min_tiles,
        WINDOW=shape.window or 0, CAPPED=shape.soft_cap is not None, FROM_QKV=prep is not None,
        NORMED=prep is not None and prep.norm_YD is not None, MIXED=lanes.query_start_L1 is not None,
        **pdl_options(out_THD), num_warps=config.warps, num_stages=config.stages,
    )


@jit_with(do_not_specialize=("blocks_stride",))
def _decode_kernel(
    source: Arg, out: Arg, keys: Arg, values: Arg, rows: Arg, lengths: Arg, query_start: Arg, blocks: Arg,
    slots: Arg, rope: Arg, norm: Arg, partial_acc: Arg, partial_lse: Arg, counter: Arg,
    scale: Arg, soft_cap: Arg, eps: Arg, k_factor: Arg, v_factor: Arg, v_scale: Arg,
    token_stride: Arg, head_stride: Arg, out_token_stride: Arg, out_head_stride: Arg,
    blocks_stride: Arg, rope_stride: Arg, norm_stride: Arg,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD: tl.constexpr,
    HALF_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
    MIN_TILES: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, FROM_QKV: tl.constexpr,
    NORMED: tl.constexpr, MIXED: tl.constexpr, PDL: tl.constexpr,
) -> None:
    kv_head, lane, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    member = tl.arange(0, ROWS)
    column = tl.arange(0, HALF_PAD)[None, :]
    head = (kv_head * GROUP + member)[:, None]
    in_group = (member < GROUP)[:, None] & (column < HEAD // 2)
    pdl_begin(PDL)
    token, count = lane, 1
    if MIXED:
        token = tl.load(query_start + lane).to(tl.int64)
        count = tl.load(query_start + lane + 1) - token
    length, row = tl.load(lengths + lane), tl.load(rows + lane)
    stored = length - 1 if FROM_QKV else length
    low = tl.maximum(length - WINDOW, 0) if WINDOW else 0
    first, last = low // TILE, tl.cdiv(stored, TILE)
    piece = tl.maximum(tl.cdiv(last - first, SPLITS), MIN_TILES)
    pieces = tl.where(count == 1, tl.maximum(tl.cdiv(last - first, piece), 1), 0)
    if split >= pieces:
        return
    begin = first + split * piece
    at = source + token * token_stride + column
    q_low = tl.load(at + head * head_stride, mask=in_group, other=0.0)
    q_high = tl.load(at + head * head_stride + HEAD // 2, mask=in_group, other=0.0)
    if FROM_QKV:
        angle = rope + (length - 1).to(tl.int64) * rope_stride + column
        cos = tl.load(angle, mask=column < HEAD // 2, other=0.0)
        sin = tl.load(angle + HEAD + HEAD // 2, mask=column < HEAD // 2, other=0.0)
        q_low, q_high = _prepare(
            q_low, q_high, norm + head * norm_stride + column, in_group, cos, sin, eps, HEAD, NORMED
        )
        q_low, q_high = q_low.to(source.dtype.element_ty), q_high.to(source.dtype.element_ty)
        top, total, acc_low, acc_high = _own_key(
            q_low, q_high, at, keys, values, slots + lane, norm, kv_head, split == 0, column, cos, sin,
            scale, soft_cap, eps, k_factor, v_factor, head_stride, norm_stride,
            KV_HEADS, GROUP, HEAD, BLOCK_SIZE, CAPPED, NORMED,
        )
    else:
        top, total = tl.full([ROWS], FLOOR, tl.float32), tl.zeros([ROWS], tl.float32)
        acc_low = tl.zeros([ROWS, HALF_PAD], tl.float32)
        acc_high = tl.zeros([ROWS, HALF_PAD], tl.float32)
    top, total, acc_low, acc_high = _attend_tiles(
        begin, tl.minimum(begin + piece, last), low, stored, q_low, q_high, top, total, acc_low, acc_high,
        keys, values, blocks + row * blocks_stride, kv_head, column, scale, soft_cap,
        KV_HEADS, HEAD, BLOCK_SIZE, TILE, WINDOW, CAPPED,
    )
    _finish(
        top, total, acc_low, acc_high, v_scale, out + token * out_token_stride + column, out_head_stride,
        partial_acc, partial_lse, counter + lane * KV_HEADS + kv_head, lane * KV_HEADS * GROUP,
        kv_head * GROUP, split, pieces, member, column, in_group, GROUP, HEAD, SPLITS,
    )


@jit
def _finish(
    top: Arg, total: Arg, acc_low: Arg, acc_high: Arg, v_scale: Arg, to: Arg, out_head_stride: Arg,
    partial_acc: Arg, partial_lse: Arg, counter: Arg, lane_head: Arg, first_head: Arg, split: Arg,
    pieces: Arg, member: Arg, column: Arg, in_group: Arg,
    GROUP: tl.constexpr, HEAD: tl.constexpr, SPLITS: tl.constexpr,
) -> None:
    """A lane's only piece is its result; else store the partial one, and the last piece to do so merges."""
    factor = (v_scale / total)[:, None]
    if pieces == 1:
        to_head = to + (first_head + member)[:, None] * out_head_stride
        tl.store(to_head, (acc_low * factor).to(to.dtype.element_ty), mask=in_group)
        tl.store(to_head + HEAD // 2, (acc_high * factor).to(to.dtype.element_ty), mask=in_group)
    else:
        place = (lane_head + first_head + member) * SPLITS + split
        tl.store(partial_lse + place, top + tl.log2(total), mask=member < GROUP)
        to_partial = partial_acc + place[:, None] * HEAD + column
        tl.store(to_partial, acc_low * factor, mask=in_group)
        tl.store(to_partial + HEAD // 2, acc_high * factor, mask=in_group)
        # One thread's release covers its whole program's stores only after a barrier.
        tl.debug_barrier()
        if tl.atomic_add(counter, 1, sem="acq_rel") == pieces - 1:
            _merge(
                to + first_head * out_head_stride, out_head_stride, partial_acc, partial_lse,
                lane_head + first_head, pieces, column, GROUP, HEAD, SPLITS,
            )
            tl.store(counter, 0)


@jit
def _prepare(
    low: Arg, high: Arg, weight: Arg, inside: Arg, cos: Arg, sin: Arg, eps: Arg,
    HEAD: tl.constexpr, NORMED: tl.constexpr,
) -> Any:
    """Heads of q or k, normalised and turned, in float32."""
    low, high = low.to(tl.float32), high.to(tl.float32)
    if NORMED:
        weight_low = tl.load(weight, mask=inside, other=0.0)
        weight_high = tl.load(weight + HEAD // 2, mask=inside, other=0.0)
        low, high = head_norm(low, high, weight_low, weight_high, eps, HEAD)
    return rotate_halves(low, high, cos, sin)


@jit
def _own_key(
    q_low: Arg, q_high: Arg, at: Arg, keys: Arg, values: Arg, slot: Arg, norm: Arg, kv_head: Arg,
    is_first: Arg, column: Arg, cos: Arg, sin: Arg, scale: Arg, soft_cap: Arg, eps: Arg, k_factor: Arg,
    v_factor: Arg, head_stride: Arg, norm_stride: Arg,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    CAPPED: tl.constexpr, NORMED: tl.constexpr,
) -> Any:
    """The token's own K and V: stored by the first piece, and the start of that piece's softmax. Never read
    back, so no program waits for another's store."""
    in_half = column < HEAD // 2
    key_head = KV_HEADS * GROUP + kv_head
    k_at = at + key_head * head_stride
    v_at = k_at + KV_HEADS * head_stride
    k_low, k_high = _prepare(
        tl.load(k_at, mask=in_half, other=0.0), tl.load(k_at + HEAD // 2, mask=in_half, other=0.0),
        norm + key_head * norm_stride + column, in_half, cos, sin, eps, HEAD, NORMED,
    )
    k_low = (k_low * k_factor).to(keys.dtype.element_ty)
    k_high = (k_high * k_factor).to(keys.dtype.element_ty)
    v_low = tl.load(v_at, mask=in_half, other=0.0).to(tl.float32) * v_factor
    v_high = tl.load(v_at + HEAD // 2, mask=in_half, other=0.0).to(tl.float32) * v_factor
    v_low, v_high = v_low.to(values.dtype.element_ty), v_high.to(values.dtype.element_ty)
    place = tl.load(slot)
    place = ((place // BLOCK_SIZE * KV_HEADS + kv_head) * BLOCK_SIZE + place % BLOCK_SIZE) * HEAD + column
    if is_first:
        tl.store(keys + place, k_low, mask=in_half)
        tl.store(keys + place + HEAD // 2, k_high, mask=in_half)
        tl.store(values + place, v_low, mask=in_half)
        tl.store(values + place + HEAD // 2, v_high, mask=in_half)
    raw = tl.sum(q_low.to(tl.float32) * k_low.to(tl.float32), 1)
    raw += tl.sum(q_high.to(tl.float32) * k_high.to(tl.float32), 1)
    top = tl.where(is_first, base2_scores(raw, scale, soft_cap, CAPPED), FLOOR)
    total = tl.where(is_first, tl.full(top.shape, 1.0, tl.float32), 0.0)
    acc_low = tl.where(is_first, tl.broadcast_to(v_low.to(tl.float32), q_low.shape), 0.0)
    acc_high = tl.where(is_first, tl.broadcast_to(v_high.to(tl.float32), q_high.shape), 0.0)
    return top, total, acc_low, acc_high


@jit
def _attend_tiles(
    begin: Arg, end: Arg, low: Arg, stored: Arg, q_low: Arg, q_high: Arg, top: Arg, total: Arg,
    acc_low: Arg, acc_high: Arg, keys: Arg, values: Arg, block_row: Arg, kv_head: Arg, column: Arg,
    scale: Arg, soft_cap: Arg,
    KV_HEADS: tl.constexpr, HEAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr,
) -> Any:
    """Online softmax over the keys of tiles begin .. end - 1. Block ids are read a tile ahead: as part of the
    same step they would take a stage of the pipeline from the keys."""
    key = begin * TILE + tl.arange(0, TILE)
    block = tl.load(block_row + key // BLOCK_SIZE, mask=key < stored, other=0)
    for tile in range(begin, end):
        key = tile * TILE + tl.arange(0, TILE)
        seen = key < stored
        if WINDOW:
            seen = seen & (key >= low)
        place = ((block.to(tl.int64) * KV_HEADS + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE) * HEAD
        block = tl.load(block_row + (key + TILE) // BLOCK_SIZE, mask=key + TILE < stored, other=0)
        at = place[:, None] + column
        inside = seen[:, None] & (column < HEAD // 2)
        k_low = tl.load(keys + at, mask=inside, other=0.0).to(q_low.dtype)
        k_high = tl.load(keys + at + HEAD // 2, mask=inside, other=0.0).to(q_low.dtype)
        v_low = tl.load(values + at, mask=inside, other=0.0).to(q_low.dtype)
        v_high = tl.load(values + at + HEAD // 2, mask=inside, other=0.0).to(q_low.dtype)
        raw = tl.dot(q_low, tl.trans(k_low), input_precision="ieee")
        raw = tl.dot(q_high, tl.trans(k_high), raw, input_precision="ieee")
        score = tl.where(seen[None, :], base2_scores(raw, scale, soft_cap, CAPPED), float("-inf"))
        weight, factor, top, total = softmax_step(score, top, total)
        weight = weight.to(q_low.dtype)
        acc_low = tl.dot(weight, v_low, acc_low * factor[:, None], input_precision="ieee")
        acc_high = tl.dot(weight, v_high, acc_high * factor[:, None], input_precision="ieee")
    return top, total, acc_low, acc_high


@jit
def _merge(
    to: Arg, head_stride: Arg, partial_acc: Arg, partial_lse: Arg, first_head: Arg, pieces: Arg, column: Arg,
    GROUP: tl.constexpr, HEAD: tl.constexpr, SPLITS: tl.constexpr,
) -> None:
    """Partial results of a KV head's group, weighed by their sums. Past the L1 cache: other programs wrote
    them."""
    split = tl.arange(0, SPLITS)
    inside = (split < pieces)[:, None] & (column < HEAD // 2)
    for member in tl.static_range(GROUP):
        place = (first_head + member) * SPLITS + split
        lse = tl.load(partial_lse + place, mask=split < pieces, other=FLOOR, cache_modifier=".cg")
        weight = tl.exp2(lse - tl.max(lse, 0))
        weight = (weight / tl.sum(weight, 0))[:, None]
        at = partial_acc + place[:, None] * HEAD + column
        low = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
        high = tl.load(at + HEAD // 2, mask=inside, other=0.0, cache_modifier=".cg")
        at_out = to + member * head_stride
        kind = to.dtype.element_ty
        tl.store(at_out, tl.sum(low * weight, 0)[None, :].to(kind), mask=column < HEAD // 2)
        tl.store(at_out + HEAD // 2, tl.sum(high * weight, 0)[None, :].to(kind), mask=column < HEAD // 2)
