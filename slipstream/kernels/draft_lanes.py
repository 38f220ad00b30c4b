"""Inputs of a drafter's own passes: the token after each of a step's, and one more token a lane, some times.

Legend: T tokens of the step, L lanes, P passes, R rows, B blocks a row, M max_model_len.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from slipstream.kernels.backend import (
    FEW_LANES,
    Arg,
    ceil_div,
    jit_with,
    next_power_of_2,
    pdl_begin,
    pdl_options,
    tl,
    use_triton,
)

Tensor = torch.Tensor

TOKENS_AT_ONCE = 32
ALIGNED = 4  # int32 numbers in 16 bytes


@dataclass(frozen=True, slots=True)
class DraftLanes:
    """position_PL, slot_PL: int64, of the token that a lane computes in each pass; length_PL: int32, its KV
    positions with that token, hence the position of the draft that follows. Where there is nothing to
    compute: position and slot 0, length 1. token_L: int64, the newest token of the row; count_L: int32,
    drafts that it has room for: both 0 for lanes that gained no token or are dead."""

    position_PL: Tensor
    slot_PL: Tensor
    length_PL: Tensor
    token_L: Tensor
    count_L: Tensor


def next_tokens(position_T: Tensor, query_start_L1: Tensor, row_L: Tensor, tokens_RM: Tensor) -> Tensor:
    """int64 [T]: tokens[row, position + 1] of the row whose lane a token is of; the last token's of a full
    row is itself. position, row: int64; query_start, tokens: int32."""
    if position_T.dim() != 1 or query_start_L1.shape != (row_L.shape[0] + 1,):
        raise ValueError("positions must be [T], query_start [L + 1]")
    if not use_triton(tokens_RM):
        return next_tokens_reference(position_T, query_start_L1, row_L, tokens_RM)
    tokens, lanes = position_T.shape[0], row_L.shape[0]
    next_T = torch.empty(tokens, dtype=torch.int64, device=tokens_RM.device)
    _next_kernel[(ceil_div(tokens, TOKENS_AT_ONCE),)](
        position_T, query_start_L1, row_L, tokens_RM, next_T, lanes, tokens, tokens_RM.stride(0),
        WIDTH=tokens_RM.shape[1], LANES=max(FEW_LANES, next_power_of_2(lanes)), TOKENS=TOKENS_AT_ONCE,
        **pdl_options(next_T), num_warps=4,
    )  # fmt: skip
    return next_T


def next_tokens_reference(
    position_T: Tensor, query_start_L1: Tensor, row_L: Tensor, tokens_RM: Tensor
) -> Tensor:
    """The same in torch operations."""
    place_T = torch.arange(len(position_T), device=row_L.device)
    lane_T = torch.searchsorted(query_start_L1[1:], place_T, right=True).clamp_(max=len(row_L) - 1)
    return tokens_RM[row_L[lane_T], (position_T + 1).clamp_(max=tokens_RM.shape[1] - 1)].long()


def draft_lanes(
    row_L: Tensor,
    appended_L: Tensor,
    columns: Mapping[str, Tensor],
    *,
    passes: int,
    drafts: int,
    most: int,
    block_size: int,
) -> DraftLanes:
    """Pass p of a lane computes position length - 1 + p of its row. most: positions that the drafter has
    been made for; a draft must follow a computed one. row: int64; appended: int32, tokens that the lane
    gained; columns: the table's, after commit."""
    names = ("alive", "length", "max_len")
    state = [columns[name] for name in names]
    if row_L.shape != appended_L.shape or len({column.stride(0) for column in state}) != 1:
        raise ValueError("row and appended must be [L], and scalar columns have one stride")
    blocks_RB = columns["blocks"]
    if not use_triton(blocks_RB):
        return draft_lanes_reference(row_L, appended_L, columns, passes, drafts, most, block_size)
    lanes, device = row_L.shape[0], blocks_RB.device
    # Rows are aligned whatever the count of lanes, so that kernels which read one are compiled once.
    width = ALIGNED * ceil_div(lanes, ALIGNED)
    wide = torch.empty(2, passes, width, dtype=torch.int64, device=device)[..., :lanes]
    position_PL, slot_PL = wide.unbind()
    length_PL = torch.empty(passes, width, dtype=torch.int32, device=device)[:, :lanes]
    token_L = torch.empty(lanes, dtype=torch.int64, device=device)
    count_L = torch.empty(lanes, dtype=torch.int32, device=device)
    _lanes_kernel[(max(passes, 1),)](
        row_L, appended_L, *state, columns["tokens"], blocks_RB,
        position_PL, slot_PL, length_PL, token_L, count_L,
        lanes, width, state[0].stride(0), columns["tokens"].stride(0), blocks_RB.stride(0),
        PASSES=passes, DRAFTS=drafts, MOST=most, BLOCK_SIZE=block_size,
        LANES=max(FEW_LANES, next_power_of_2(lanes)), **pdl_options(count_L), num_warps=4,
    )  # fmt: skip
    return DraftLanes(position_PL, slot_PL, length_PL, token_L, count_L)


def draft_lanes_reference(
    row_L: Tensor,
    appended_L: Tensor,
    columns: Mapping[str, Tensor],
    passes: int,
    drafts: int,
    most: int,
    block_size: int,
) -> DraftLanes:
    """The same in torch operations."""
    lives_L = (appended_L > 0) & (columns["alive"][row_L] != 0)
    length_L = columns["length"][row_L].long()
    position_PL = length_L - 1 + torch.arange(passes, device=row_L.device)[:, None]
    limit_L = columns["max_len"][row_L].clamp(max=most)
    used_PL = lives_L & (position_PL >= 0) & (position_PL < limit_L)
    position_PL = position_PL * used_PL
    block_PL = columns["blocks"][row_L, position_PL // block_size].long()
    slot_PL = (block_PL * block_size + position_PL % block_size) * used_PL
    token_L = columns["tokens"][row_L, (length_L - 1).clamp_(min=0)] * lives_L
    room_L = (most + 1 - length_L).clamp_(0, drafts) * lives_L
    return DraftLanes(position_PL, slot_PL, position_PL.int() + 1, token_L.long(), room_L.int())


@jit_with(do_not_specialize=("lanes", "num_tokens"))
def _next_kernel(
    position: Arg, query_start: Arg, rows: Arg, tokens: Arg, next_out: Arg, lanes: Arg, num_tokens: Arg,
    tokens_stride: Arg, WIDTH: tl.constexpr, LANES: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
) -> None:
    lane = tl.arange(0, LANES)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = token < num_tokens
    pdl_begin(PDL)
    ends = tl.load(query_start + 1 + lane, mask=lane < lanes, other=2147483647)
    token_lane = tl.sum((ends[None, :] <= token[:, None]).to(tl.int32), 1)
    row = tl.load(rows + tl.minimum(token_lane, lanes - 1), mask=inside, other=0)
    place = tl.minimum(tl.load(position + token, mask=inside, other=0) + 1, WIDTH - 1)
    value = tl.load(tokens + row * tokens_stride + place, mask=inside, other=0)
    tl.store(next_out + token, value.to(tl.int64), mask=inside)


@jit_with(do_not_specialize=("lanes", "width", "blocks_stride"))
def _lanes_kernel(
    rows: Arg, appended: Arg, alive: Arg, length: Arg, max_len: Arg, tokens: Arg, blocks: Arg,
    position_out: Arg, slot_out: Arg, length_out: Arg, token_out: Arg, count_out: Arg,
    lanes: Arg, width: Arg, row_stride: Arg, tokens_stride: Arg, blocks_stride: Arg,
    PASSES: tl.constexpr, DRAFTS: tl.constexpr, MOST: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    LANES: tl.constexpr, PDL: tl.constexpr,
) -> None:
    number = tl.program_id(0)
    lane = tl.arange(0, LANES)
    inside = lane < lanes
    pdl_begin(PDL)
    row = tl.load(rows + lane, mask=inside, other=0)
    at = row * row_stride
    lives = inside & (tl.load(appended + lane, mask=inside, other=0) > 0)
    lives = lives & (tl.load(alive + at, mask=inside, other=0) != 0)
    total = tl.load(length + at, mask=inside, other=0)
    limit = tl.minimum(tl.load(max_len + at, mask=inside, other=0), MOST)
    place = total - 1 + number
    used = lives & (place >= 0) & (place < limit)
    place = tl.where(used, place, 0)
    block = tl.load(blocks + row * blocks_stride + place // BLOCK_SIZE, mask=used, other=0).to(tl.int64)
    slot = tl.where(used, block * BLOCK_SIZE + place % BLOCK_SIZE, 0)
    to, there = number * width + lane, lane < tl.where(number < PASSES, lanes, 0)
    tl.store(position_out + to, place.to(tl.int64), mask=there)
    tl.store(slot_out + to, slot, mask=there)
    tl.store(length_out + to, place + 1, mask=there)
    if number == 0:
        newest = tl.load(tokens + row * tokens_stride + tl.maximum(total - 1, 0), mask=lives, other=0)
        tl.store(token_out + lane, newest.to(tl.int64), mask=inside)
        room = tl.minimum(tl.maximum(MOST + 1 - total, 0), DRAFTS)
        tl.store(count_out + lane, tl.where(lives, room, 0), mask=inside)
