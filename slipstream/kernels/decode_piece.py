"""One piece of a lane's keys in decode attention, in registers, and the merge of a lane's pieces.

The last piece of a lane to finish merges the partial results, always in the same order. Heads lie in two
halves [rows, HALF_PAD], because rotation turns one half with the other.
"""

from __future__ import annotations

from typing import Any

from slipstream.kernels.attention_common import (
    FLOOR,
    block_and_place,
    blocks_of_tile,
    capped_scores,
    softmax_step,
)
from slipstream.kernels.backend import Arg, jit, pdl_begin, tl
from slipstream.kernels.qkv_write import head_norm, rotate_halves


@jit
def tile_span(length: Arg, TILE: tl.constexpr, WINDOW: tl.constexpr, FROM_QKV: tl.constexpr) -> Any:
    """A lane's first key seen, the end of its keys in the pool, its first tile and the end of its tiles."""
    stored = length - 1 if FROM_QKV else length
    low = tl.maximum(length - WINDOW, 0) if WINDOW else length * 0
    return low, stored, low // TILE, tl.cdiv(stored, TILE)


@jit
def attend_piece(
    lane: Arg, token: Arg, row: Arg, length: Arg, begin: Arg, end: Arg, piece: Arg, pieces: Arg,
    kv_head: Arg, source: Arg, out: Arg, keys: Arg, values: Arg, blocks: Arg, slots: Arg, rope: Arg,
    norm: Arg, partial_acc: Arg, partial_lse: Arg, counter: Arg, scale: Arg, soft_cap: Arg, eps: Arg,
    k_factor: Arg, v_factor: Arg, v_scale: Arg, token_stride: Arg, head_stride: Arg, out_token_stride: Arg,
    out_head_stride: Arg, blocks_stride: Arg, rope_stride: Arg, norm_stride: Arg,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD: tl.constexpr,
    HALF_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, FROM_QKV: tl.constexpr, NORMED: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
) -> None:
    """Tiles begin .. end - 1 of a lane. lane, token: int64.

    What is read before pdl_begin was written several kernels ago, or is constant.
    """
    member = tl.arange(0, ROWS)
    column = tl.arange(0, HALF_PAD)[None, :]
    head = (kv_head * GROUP + member)[:, None]
    in_group = (member < GROUP)[:, None] & (column < HEAD // 2)
    low, stored, _, _ = tile_span(length, TILE, WINDOW, FROM_QKV)
    # Asked for before all else: addresses of keys wait for them.
    block_row = blocks + row * blocks_stride
    block = blocks_of_tile(block_row, begin, stored, BLOCK_SIZE, TILE)
    at = source + token * token_stride + column
    if FROM_QKV:
        angle = rope + (length - 1).to(tl.int64) * rope_stride + column
        cos = tl.load(angle, mask=column < HEAD // 2, other=0.0)
        sin = tl.load(angle + HEAD + HEAD // 2, mask=column < HEAD // 2, other=0.0)
        slot = tl.load(slots + lane)
        key_head = KV_HEADS * GROUP + kv_head
        q_norm = _norm_weights(norm + head * norm_stride + column, in_group, HEAD, NORMED)
        k_norm = _norm_weights(norm + key_head * norm_stride + column, column < HEAD // 2, HEAD, NORMED)
    pdl_begin(PDL, EARLY)
    q_low = tl.load(at + head * head_stride, mask=in_group, other=0.0)
    q_high = tl.load(at + head * head_stride + HEAD // 2, mask=in_group, other=0.0)
    if FROM_QKV:
        q_low, q_high = _prepare(q_low, q_high, q_norm, cos, sin, eps, HEAD, NORMED)
        q_low, q_high = q_low.to(source.dtype.element_ty), q_high.to(source.dtype.element_ty)
        top, total, acc_low, acc_high = _own_key(
            q_low, q_high, at + key_head * head_stride, keys, values, slot, k_norm, kv_head, piece == 0,
            column, cos, sin, scale, soft_cap, eps, k_factor, v_factor, head_stride,
            KV_HEADS, HEAD, BLOCK_SIZE, CAPPED, NORMED,
        )
    else:
        top, total = tl.full([ROWS], FLOOR, tl.float32), tl.zeros([ROWS], tl.float32)
        acc_low = tl.zeros([ROWS, HALF_PAD], tl.float32)
        acc_high = tl.zeros([ROWS, HALF_PAD], tl.float32)
    top, total, acc_low, acc_high = _attend_tiles(
        begin, end, low, stored, q_low, q_high, top, total, acc_low, acc_high,
        keys, values, block, block_row, kv_head, column, scale, soft_cap,
        KV_HEADS, HEAD, BLOCK_SIZE, TILE, WINDOW, CAPPED,
    )
    _finish(
        top, total, acc_low, acc_high, v_scale, out + token * out_token_stride + column, out_head_stride,
        partial_acc, partial_lse, counter + lane * KV_HEADS + kv_head,
        lane * (SPLITS * KV_HEADS * GROUP), kv_head * GROUP, piece, pieces, member, column, in_group,
        KV_HEADS * GROUP, GROUP, HEAD, SPLITS,
    )


@jit
def _finish(
    top: Arg, total: Arg, acc_low: Arg, acc_high: Arg, v_scale: Arg, to: Arg, out_head_stride: Arg,
    partial_acc: Arg, partial_lse: Arg, counter: Arg, place: Arg, first_head: Arg, piece: Arg,
    pieces: Arg, member: Arg, column: Arg, in_group: Arg,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, SPLITS: tl.constexpr,
) -> None:
    """A lane's only piece is its result; else store the partial one, and the last piece to do so merges."""
    factor = (v_scale / total)[:, None]
    if pieces == 1:
        to_head = to + (first_head + member)[:, None] * out_head_stride
        tl.store(to_head, (acc_low * factor).to(to.dtype.element_ty), mask=in_group)
        tl.store(to_head + HEAD // 2, (acc_high * factor).to(to.dtype.element_ty), mask=in_group)
    else:
        at = place + piece * HEADS + first_head + member
        tl.store(partial_lse + at, top + tl.log2(total), mask=member < GROUP)
        to_partial = partial_acc + at[:, None] * HEAD + column
        tl.store(to_partial, acc_low * factor, mask=in_group)
        tl.store(to_partial + HEAD // 2, acc_high * factor, mask=in_group)
        # One thread's release covers its whole program's stores only after a barrier.
        tl.debug_barrier()
        if tl.atomic_add(counter, 1, sem="acq_rel") == pieces - 1:
            _merge(
                to + first_head * out_head_stride, out_head_stride, partial_acc, partial_lse,
                place + first_head, pieces, column, HEADS, GROUP, HEAD, SPLITS,
            )
            tl.store(counter, 0)


@jit
def _norm_weights(weight: Arg, inside: Arg, HEAD: tl.constexpr, NORMED: tl.constexpr) -> Any:
    """Both halves of the norm's weights; ones that nobody uses where there is no norm."""
    if NORMED:
        low = tl.load(weight, mask=inside, other=0.0)
        high = tl.load(weight + HEAD // 2, mask=inside, other=0.0)
        return low, high
    else:
        return 1.0, 1.0


@jit
def _prepare(
    low: Arg, high: Arg, weights: Arg, cos: Arg, sin: Arg, eps: Arg,
    HEAD: tl.constexpr, NORMED: tl.constexpr,
) -> Any:
    """Heads of q or k, normalised and turned, in float32."""
    low, high = low.to(tl.float32), high.to(tl.float32)
    if NORMED:
        low, high = head_norm(low, high, weights[0], weights[1], eps, HEAD)
    return rotate_halves(low, high, cos, sin)


@jit
def _own_key(
    q_low: Arg, q_high: Arg, k_at: Arg, keys: Arg, values: Arg, slot: Arg, norm: Arg, kv_head: Arg,
    is_first: Arg, column: Arg, cos: Arg, sin: Arg, scale: Arg, soft_cap: Arg, eps: Arg, k_factor: Arg,
    v_factor: Arg, head_stride: Arg,
    KV_HEADS: tl.constexpr, HEAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    CAPPED: tl.constexpr, NORMED: tl.constexpr,
) -> Any:
    """The token's own K and V, at k_at and KV_HEADS heads further: stored by the first piece, and the start
    of that piece's softmax. Never read back, so no program waits for another's store."""
    in_half = column < HEAD // 2
    v_at = k_at + KV_HEADS * head_stride
    k_low, k_high = _prepare(
        tl.load(k_at, mask=in_half, other=0.0), tl.load(k_at + HEAD // 2, mask=in_half, other=0.0),
        norm, cos, sin, eps, HEAD, NORMED,
    )
    k_low = (k_low * k_factor).to(keys.dtype.element_ty)
    k_high = (k_high * k_factor).to(keys.dtype.element_ty)
    v_low = tl.load(v_at, mask=in_half, other=0.0).to(tl.float32) * v_factor
    v_high = tl.load(v_at + HEAD // 2, mask=in_half, other=0.0).to(tl.float32) * v_factor
    v_low, v_high = v_low.to(values.dtype.element_ty), v_high.to(values.dtype.element_ty)
    place = ((slot // BLOCK_SIZE * KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD + column
    if is_first:
        tl.store(keys + place, k_low, mask=in_half)
        tl.store(keys + place + HEAD // 2, k_high, mask=in_half)
        tl.store(values + place, v_low, mask=in_half)
        tl.store(values + place + HEAD // 2, v_high, mask=in_half)
    raw = tl.sum(q_low.to(tl.float32) * k_low.to(tl.float32), 1)
    raw += tl.sum(q_high.to(tl.float32) * k_high.to(tl.float32), 1)
    score = capped_scores(raw, scale, soft_cap, CAPPED)
    top = tl.where(is_first, score if CAPPED else score * scale, FLOOR)
    total = tl.where(is_first, tl.full(top.shape, 1.0, tl.float32), 0.0)
    acc_low = tl.where(is_first, tl.broadcast_to(v_low.to(tl.float32), q_low.shape), 0.0)
    acc_high = tl.where(is_first, tl.broadcast_to(v_high.to(tl.float32), q_high.shape), 0.0)
    return top, total, acc_low, acc_high


@jit
def _attend_tiles(
    begin: Arg, end: Arg, low: Arg, stored: Arg, q_low: Arg, q_high: Arg, top: Arg, total: Arg,
    acc_low: Arg, acc_high: Arg, keys: Arg, values: Arg, block: Arg, block_row: Arg, kv_head: Arg,
    column: Arg, scale: Arg, soft_cap: Arg,
    KV_HEADS: tl.constexpr, HEAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr,
) -> Any:
    """Online softmax over the keys of tiles begin .. end - 1; block: ids of the first tile's. They are read a
    tile ahead: as part of the same step they would take a stage of the pipeline from the keys."""
    for tile in range(begin, end):
        key = tile * TILE + tl.arange(0, TILE)
        seen = key < stored
        if WINDOW:
            seen = seen & (key >= low)
        _, place = block_and_place(tile, TILE, BLOCK_SIZE)
        place = (kv_head * BLOCK_SIZE + place) * HEAD
        at = (block.to(tl.int64) * (KV_HEADS * BLOCK_SIZE * HEAD) + place)[:, None] + column
        following, _ = block_and_place(tile + 1, TILE, BLOCK_SIZE)
        block = tl.load(block_row + following, mask=key + TILE < stored, other=0)
        inside = seen[:, None] & (column < HEAD // 2)
        k_low = tl.load(keys + at, mask=inside, other=0.0).to(q_low.dtype)
        k_high = tl.load(keys + at + HEAD // 2, mask=inside, other=0.0).to(q_low.dtype)
        v_low = tl.load(values + at, mask=inside, other=0.0).to(q_low.dtype)
        v_high = tl.load(values + at + HEAD // 2, mask=inside, other=0.0).to(q_low.dtype)
        raw = tl.dot(q_low, tl.trans(k_low), input_precision="ieee")
        raw = tl.dot(q_high, tl.trans(k_high), raw, input_precision="ieee")
        score = tl.where(seen[None, :], capped_scores(raw, scale, soft_cap, CAPPED), float("-inf"))
        weight, factor, top, total = softmax_step(score, scale, top, total, CAPPED)
        weight = weight.to(q_low.dtype)
        acc_low = tl.dot(weight, v_low, acc_low * factor[:, None], input_precision="ieee")
        acc_high = tl.dot(weight, v_high, acc_high * factor[:, None], input_precision="ieee")
    return top, total, acc_low, acc_high


@jit
def _merge(
    to: Arg, head_stride: Arg, partial_acc: Arg, partial_lse: Arg, place: Arg, pieces: Arg, column: Arg,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, SPLITS: tl.constexpr,
) -> None:
    """Partial results of a KV head's group, weighed by their sums. Past the L1 cache: other programs wrote
    them."""
    kind = to.dtype.element_ty
    piece = tl.arange(0, SPLITS)
    inside = (piece < pieces)[:, None] & (column < HEAD // 2)
    for member in tl.static_range(GROUP):
        at = place + member + piece * HEADS
        lse = tl.load(partial_lse + at, mask=piece < pieces, other=FLOOR, cache_modifier=".cg")
        weight = tl.exp2(lse - tl.max(lse, 0))
        weight = (weight / tl.sum(weight, 0))[:, None]
        part = partial_acc + at[:, None] * HEAD + column
        low = tl.load(part, mask=inside, other=0.0, cache_modifier=".cg")
        high = tl.load(part + HEAD // 2, mask=inside, other=0.0, cache_modifier=".cg")
        at_out = to + member * head_stride
        tl.store(at_out, tl.sum(low * weight, 0)[None, :].to(kind), mask=column < HEAD // 2)
        tl.store(at_out + HEAD // 2, tl.sum(high * weight, 0)[None, :].to(kind), mask=column < HEAD // 2)
