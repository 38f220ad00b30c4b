"""The work list of persistent decode attention, made on the device once a step for all layers alike.

All lanes' tiles stand in one row, which is cut into near equal shares, one for each program of a KV head. An
item is what one share has of one lane: an entry [lane, token, row, length, first tile, end of tiles, piece,
pieces]. A lane's pieces are neighbours in the list, and depend on lengths alone, never on timing.

The grid form has a simpler list, where it wants one: its lanes, the longest first.

Legend: L lanes, I items, F fields, Q shares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from slipstream.kernels.attention_common import LayerAttention
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
from slipstream.kernels.decode_config import DecodeConfig
from slipstream.kernels.decode_piece import tile_span
from slipstream.kernels.paged import PagedLanes

Tensor = torch.Tensor

FIELDS = 8
LIST_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """int32: item_IF, I = L + Q, enough for any lengths; start_Q1 [Q + 1], each share's first item. Of the
    grid form: item_IF [L, 1], lanes in order; start_Q1 is not used."""

    item_IF: Tensor
    start_Q1: Tensor


def list_decode_work(
    lanes: PagedLanes, shape: LayerAttention, config: DecodeConfig, from_qkv: bool
) -> DecodeWork:
    """The work of the lanes with one token, or their order. from_qkv: the token's own key is not in the pool
    yet. Layers of one window, count of KV heads and config may share the list."""
    lanes.check()
    count, device = lanes.row_L.shape[0], lanes.row_L.device
    if config.ordered:
        return _order_lanes(lanes.length_L)
    shares = config.shares(shape.num_kv_heads, device)
    if not use_triton(lanes.row_L):
        return list_decode_work_reference(lanes, shape, config, from_qkv, shares)
    work = DecodeWork(
        lanes.length_L.new_empty(count + shares, FIELDS), lanes.length_L.new_empty(shares + 1)
    )
    query_start = lanes.length_L if lanes.query_start_L1 is None else lanes.query_start_L1
    _list_kernel[(ceil_div(max(count + shares, shares + 1), LIST_AT_ONCE),)](
        lanes.row_L, lanes.length_L, query_start, work.item_IF, work.start_Q1, count, shares,
        TILE=config.tile, MIN_TILES=config.min_tiles, WINDOW=shape.window or 0, FROM_QKV=from_qkv,
        MIXED=lanes.query_start_L1 is not None, LANES=max(FEW_LANES, next_power_of_2(count)),
        AT_ONCE=LIST_AT_ONCE, ITEM=FIELDS, **pdl_options(work.item_IF), num_warps=4,
    )
    return work


def list_decode_work_reference(
    lanes: PagedLanes, shape: LayerAttention, config: DecodeConfig, from_qkv: bool, shares: int
) -> DecodeWork:
    """The same, tile by tile."""
    count = lanes.row_L.shape[0]
    start_L1 = range(count + 1) if lanes.query_start_L1 is None else lanes.query_start_L1.tolist()
    tiles: list[tuple[int, int]] = []  # of all lanes: lane and tile
    last_L = []
    for lane, length in enumerate(lanes.length_L.tolist()):
        first = max(length - shape.window, 0) // config.tile if shape.window else 0
        last_L.append(ceil_div(length - 1 if from_qkv else length, config.tile))
        if start_L1[lane + 1] - start_L1[lane] == 1:
            # A lane without a key in the pool still has one piece.
            tiles += [(lane, tile) for tile in range(first, max(last_L[-1], first + 1))]
    used = min(shares, max(1, len(tiles) // config.min_tiles))
    items: list[list[int]] = []
    starts = []
    for share in range(shares + 1):
        starts.append(len(items))
        part = tiles[share * len(tiles) // used : (share + 1) * len(tiles) // used] if share < used else []
        for lane in dict.fromkeys(lane for lane, _ in part):
            own = [tile for at, tile in part if at == lane]
            items.append([lane, start_L1[lane], int(lanes.row_L[lane]), int(lanes.length_L[lane]),
                          own[0], min(own[-1] + 1, last_L[lane]), 0, 0])  # fmt: skip
    lane_of = [item[0] for item in items]
    for place, item in enumerate(items):
        item[6:] = place - lane_of.index(item[0]), lane_of.count(item[0])
    items += [[0] * FIELDS] * (count + shares - len(items))
    item_IF = torch.tensor(items, dtype=torch.int32, device=lanes.row_L.device)
    return DecodeWork(item_IF, torch.tensor(starts, dtype=torch.int32, device=lanes.row_L.device))


def _order_lanes(length_L: Tensor) -> DecodeWork:
    """Equal lengths keep their order."""
    lanes = length_L.shape[0]
    if not use_triton(length_L):
        order_L = torch.sort(length_L, descending=True, stable=True).indices.int()
        return DecodeWork(order_L.unsqueeze(1), order_L)
    order_L = length_L.new_empty(lanes)
    _order_kernel[(ceil_div(lanes, LIST_AT_ONCE),)](
        length_L, order_L, lanes, LANES=max(FEW_LANES, next_power_of_2(lanes)), AT_ONCE=LIST_AT_ONCE,
        **pdl_options(order_L), num_warps=4,
    )
    return DecodeWork(order_L.unsqueeze(1), order_L)


@jit_with(do_not_specialize=("lanes",))
def _order_kernel(
    lengths: Arg, order: Arg, lanes: Arg, LANES: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr
) -> None:
    lane = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)[:, None]
    other = tl.arange(0, LANES)[None, :]
    pdl_begin(PDL)
    length = tl.load(lengths + lane, mask=lane < lanes, other=0)
    others = tl.load(lengths + other, mask=other < lanes, other=-1)
    ahead = (others > length) | ((others == length) & (other < lane))
    rank = tl.sum(ahead.to(tl.int32), 1)[:, None]
    tl.store(order + rank, lane, mask=lane < lanes)


@jit
def _tiles_of(
    lane: Arg, inside: Arg, lengths: Arg, query_start: Arg,
    TILE: tl.constexpr, WINDOW: tl.constexpr, FROM_QKV: tl.constexpr, MIXED: tl.constexpr,
) -> Any:
    """Lanes' counts of tiles (int64; at least 1, or 0 for no part), lengths, first tiles, ends and tokens."""
    length = tl.load(lengths + lane, mask=inside, other=1)
    token = lane
    if MIXED:
        token = tl.load(query_start + lane, mask=inside, other=0)
        inside = inside & (tl.load(query_start + lane + 1, mask=inside, other=0) - token == 1)
    _, _, first, last = tile_span(length, TILE, WINDOW, FROM_QKV)
    return tl.where(inside, tl.maximum(last - first, 1), 0).to(tl.int64), length, first, last, token


@jit_with(do_not_specialize=("lanes", "shares"))
def _list_kernel(
    rows: Arg, lengths: Arg, query_start: Arg, items: Arg, starts: Arg, lanes: Arg, shares: Arg,
    TILE: tl.constexpr, MIN_TILES: tl.constexpr, WINDOW: tl.constexpr, FROM_QKV: tl.constexpr,
    MIXED: tl.constexpr, LANES: tl.constexpr, AT_ONCE: tl.constexpr, ITEM: tl.constexpr, PDL: tl.constexpr,
) -> None:
    place = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    lane = tl.arange(0, LANES)
    pdl_begin(PDL)
    tiles, _, _, _, _ = _tiles_of(
        lane, lane < lanes, lengths, query_start, TILE, WINDOW, FROM_QKV, MIXED
    )
    end = tl.cumsum(tiles, 0)
    begin, total = end - tiles, tl.maximum(tl.sum(tiles, 0), 1)
    used = tl.minimum(tl.maximum(total // MIN_TILES, 1), shares)
    # Share q has the tiles from q * total // used; so tile x is in share ((x + 1) * used - 1) // total.
    share = ((begin + 1) * used - 1) // total
    pieces = tl.where(tiles > 0, (end * used - 1) // total - share + 1, 0)
    starting = tl.where(place < used, place * total // used, total)
    taken = tl.minimum(pieces[None, :], place[:, None] - share[None, :])
    taken = tl.sum(tl.where(begin[None, :] < starting[:, None], taken, 0), 1)
    tl.store(starts + place, taken.to(tl.int32), mask=place <= shares)

    passed = (tl.cumsum(pieces, 0)[None, :] <= place[:, None]) & (lane < lanes)[None, :]
    found = tl.sum(passed.to(tl.int32), 1)
    piece = place - tl.sum(tl.where(passed, pieces[None, :], 0), 1)
    before = tl.sum(tl.where(passed, tiles[None, :], 0), 1)
    inside = (place < lanes + shares) & (found < lanes)
    own, length, first, last, token = _tiles_of(
        found, inside, lengths, query_start, TILE, WINDOW, FROM_QKV, MIXED
    )
    first_share = ((before + 1) * used - 1) // total
    here = first_share + piece
    from_tile = tl.maximum(here * total // used - before, 0)
    to_tile = tl.minimum((here + 1) * total // used - before, own)
    at = items + place * ITEM
    tl.store(at, found, mask=inside)
    tl.store(at + 1, token, mask=inside)
    tl.store(at + 2, tl.load(rows + found, mask=inside, other=0).to(tl.int32), mask=inside)
    tl.store(at + 3, length, mask=inside)
    tl.store(at + 4, (first + from_tile).to(tl.int32), mask=inside)
    tl.store(at + 5, tl.minimum(first + to_tile, last).to(tl.int32), mask=inside)
    tl.store(at + 6, piece.to(tl.int32), mask=inside)
    pieces_here = ((before + own) * used - 1) // total - first_share + 1
    tl.store(at + 7, pieces_here.to(tl.int32), mask=inside)
