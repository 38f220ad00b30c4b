"""Input build: from rows to the tokens, positions and KV slots of one step.

Legend: T tokens, L lanes, R rows, B blocks a row, M max_model_len.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

Tensor = torch.Tensor


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
) -> StepInputs:
    """All int32. A dead lane reads its row's first token and writes to the null block (slot 0)."""
    if lane_to_row_L.shape != query_len_L.shape or lane_to_row_L.dim() != 1:
        raise ValueError("lane_to_row and query_len must be [L]")
    lanes = lane_to_row_L.shape[0]
    if num_tokens < lanes:
        raise ValueError("every lane needs at least one token")
    row_L = lane_to_row_L.long()
    alive_L = alive_R[row_L] != 0
    start_L = num_computed_R[row_L]
    end_L = start_L + query_len_L
    query_start_L1 = torch.zeros(lanes + 1, dtype=torch.int32, device=row_L.device)
    torch.cumsum(query_len_L, 0, dtype=torch.int32, out=query_start_L1[1:])
    if num_tokens == lanes:  # one token a lane
        row_T, alive_T, position_T = row_L, alive_L, start_L.long()
    else:
        place_T = torch.arange(num_tokens, device=row_L.device)
        lane_T = torch.repeat_interleave(query_len_L.long(), output_size=num_tokens)
        row_T, alive_T = row_L[lane_T], alive_L[lane_T]
        position_T = (start_L - query_start_L1[:-1])[lane_T] + place_T
    position_T = position_T * alive_T
    token_T = tokens_RM[row_T, position_T].long()
    block_T = blocks_RB[row_T, position_T // block_size].long()
    slot_T = (block_T * block_size + position_T % block_size) * alive_T
    length_L = torch.where(alive_L, end_L, 1)
    return StepInputs(token_T, position_T, slot_T, query_start_L1, length_L, row_L, end_L, alive_L)
