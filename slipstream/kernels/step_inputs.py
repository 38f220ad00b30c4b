"""Input build: from rows to the tokens, positions and KV slots of one step.

Legend: T tokens, L lanes, R rows, B blocks a row, M max_model_len.
"""

from __future__ import annotations

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


@dataclass(slots=True)
class StepInputs:
    """token_T, position_T, slot_T: int64 [T]; query_start_L1: int32 [L + 1]; length_L: int32 [L], KV
    positions after the step (1 for dead lanes); row_L: int64 [L]; end_L: int32 [L], num_computed + query_len;
    alive_L: bool [L]."""

    token_T: Tensor
    position_T: Tensor
    slot_T: Tensor
    query_start_L1: Tensor
    length_L: Tensor
    row_L: Tensor
    end_L: Tensor
    alive_L: Tensor


def build_step_inputs(
    lane_to_row_L: Tensor,
    query_len_L: Tensor,
    num_tokens: int,
    *,
    tokens_RM: Tensor,
    num_computed_R: Tensor,
    alive_R: Tensor,
    blocks_RB: Tensor,
    block_size: int,
    one_each: bool,
) -> StepInputs:
    """All int32. A dead lane reads its row's first token and writes to the null block (slot 0).

    Tokens past the last lane's are padding: token, position and slot 0. one_each: every lane has one token.
    """
    if lane_to_row_L.shape != query_len_L.shape or lane_to_row_L.dim() != 1:
        raise ValueError("lane_to_row and query_len must be [L]")
    if not (lane_to_row_L.is_contiguous() and query_len_L.is_contiguous()):
        raise ValueError("lane_to_row and query_len must be contiguous")
    lanes = lane_to_row_L.shape[0]
    if one_each and num_tokens != lanes:
        raise ValueError(f"{lanes} lanes of one token each have not {num_tokens} tokens")
    if use_triton(tokens_RM):
        return _launch(
            lane_to_row_L, query_len_L, num_tokens, tokens_RM, num_computed_R, alive_R, blocks_RB, block_size
        )
    return build_step_inputs_reference(
        lane_to_row_L, query_len_L, num_tokens, tokens_RM, num_computed_R, alive_R, blocks_RB, block_size,
        one_each,
    )


def build_step_inputs_reference(
    lane_to_row_L: Tensor,
    query_len_L: Tensor,
    num_tokens: int,
    tokens_RM: Tensor,
    num_computed_R: Tensor,
    alive_R: Tensor,
    blocks_RB: Tensor,
    block_size: int,
    one_each: bool,
) -> StepInputs:
    """The same in torch operations."""
    lanes = lane_to_row_L.shape[0]
    row_L = lane_to_row_L.long()
    alive_L = alive_R[row_L] != 0
    start_L = num_computed_R[row_L]
    end_L = start_L + query_len_L
    query_start_L1 = torch.zeros(lanes + 1, dtype=torch.int32, device=row_L.device)
    torch.cumsum(query_len_L, 0, dtype=torch.int32, out=query_start_L1[1:])
    if one_each:
        row_T, alive_T, position_T = row_L, alive_L, start_L.long()
    else:
        place_T = torch.arange(num_tokens, device=row_L.device)
        lane_T = torch.searchsorted(query_start_L1[1:], place_T, right=True)
        real_T, lane_T = lane_T < lanes, lane_T.clamp_(max=lanes - 1)
        row_T, alive_T = row_L[lane_T] * real_T, alive_L[lane_T] & real_T
        position_T = (start_L - query_start_L1[:-1])[lane_T] + place_T
    position_T = position_T * alive_T
    token_T = tokens_RM[row_T, position_T].long()
    if not one_each:
        token_T *= real_T
    block_T = blocks_RB[row_T, position_T // block_size].long()
    slot_T = (block_T * block_size + position_T % block_size) * alive_T
    length_L = torch.where(alive_L, end_L, 1)
    return StepInputs(token_T, position_T, slot_T, query_start_L1, length_L, row_L, end_L, alive_L)


def _launch(
    lane_to_row_L: Tensor,
    query_len_L: Tensor,
    num_tokens: int,
    tokens_RM: Tensor,
    num_computed_R: Tensor,
    alive_R: Tensor,
    blocks_RB: Tensor,
    block_size: int,
) -> StepInputs:
    lanes, device = lane_to_row_L.shape[0], tokens_RM.device
    # Tensors of their own, so that all are aligned, whatever the count of tokens: see jit_with.
    token_T, position_T, slot_T = (
        torch.empty(num_tokens, dtype=torch.int64, device=device) for _ in range(3)
    )
    length_L, end_L = (torch.empty(lanes, dtype=torch.int32, device=device) for _ in range(2))
    query_start_L1 = torch.empty(lanes + 1, dtype=torch.int32, device=device)
    row_L = torch.empty(lanes, dtype=torch.int64, device=device)
    alive_L = torch.empty(lanes, dtype=torch.bool, device=device)
    _inputs_kernel[(ceil_div(num_tokens, TOKENS_AT_ONCE),)](
        lane_to_row_L, query_len_L, tokens_RM, num_computed_R, alive_R, blocks_RB,
        token_T, position_T, slot_T, query_start_L1, length_L, row_L, end_L, alive_L,
        lanes, num_tokens,
        tokens_RM.stride(0), num_computed_R.stride(0), alive_R.stride(0), blocks_RB.stride(0),
        BLOCK_SIZE=block_size, LANES=max(FEW_LANES, next_power_of_2(lanes)), TOKENS=TOKENS_AT_ONCE,
        **pdl_options(token_T), num_warps=4,
    )
    return StepInputs(token_T, position_T, slot_T, query_start_L1, length_L, row_L, end_L, alive_L)


@jit_with(do_not_specialize=("lanes", "num_tokens", "blocks_stride"))
def _inputs_kernel(
    lane_to_row: Arg, query_len: Arg, tokens: Arg, num_computed: Arg, alive: Arg, blocks: Arg,
    token_out: Arg, position_out: Arg, slot_out: Arg, query_start_out: Arg, length_out: Arg, row_out: Arg,
    end_out: Arg, alive_out: Arg, lanes: Arg, num_tokens: Arg,
    tokens_stride: Arg, computed_stride: Arg, alive_stride: Arg, blocks_stride: Arg,
    BLOCK_SIZE: tl.constexpr, LANES: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    lane = tl.arange(0, LANES)
    in_lanes = lane < lanes
    pdl_begin(PDL)
    count = tl.load(query_len + lane, mask=in_lanes, other=0)
    ends = tl.cumsum(count, 0)
    if program == 0:
        lane_row = tl.load(lane_to_row + lane, mask=in_lanes, other=0).to(tl.int64)
        lives = tl.load(alive + lane_row * alive_stride, mask=in_lanes, other=0) != 0
        end = tl.load(num_computed + lane_row * computed_stride, mask=in_lanes, other=0) + count
        tl.store(query_start_out, 0)
        tl.store(query_start_out + 1 + lane, ends, mask=in_lanes)
        tl.store(length_out + lane, tl.where(lives, end, 1), mask=in_lanes)
        tl.store(row_out + lane, lane_row, mask=in_lanes)
        tl.store(end_out + lane, end, mask=in_lanes)
        tl.store(alive_out + lane, lives, mask=in_lanes)
    token = program * TOKENS + tl.arange(0, TOKENS)
    before = (ends[None, :] <= token[:, None]) & in_lanes[None, :]
    token_lane = tl.sum(before.to(tl.int32), 1)
    real = token_lane < lanes
    row = tl.load(lane_to_row + token_lane, mask=real, other=0).to(tl.int64)
    lives = tl.load(alive + row * alive_stride, mask=real, other=0) != 0
    start = tl.load(num_computed + row * computed_stride, mask=real, other=0)
    position = tl.where(lives, start + token - tl.sum(tl.where(before, count[None, :], 0), 1), 0)
    block = tl.load(blocks + row * blocks_stride + position // BLOCK_SIZE, mask=lives, other=0).to(tl.int64)
    slot = tl.where(lives, block * BLOCK_SIZE + position % BLOCK_SIZE, 0)
    value = tl.load(tokens + row * tokens_stride + position, mask=real, other=0)
    inside = token < num_tokens
    tl.store(token_out + token, value.to(tl.int64), mask=inside)
    tl.store(position_out + token, position.to(tl.int64), mask=inside)
    tl.store(slot_out + token, slot, mask=inside)
