"""Commit: sampled tokens go into their rows, lengths advance, rows that end die. All on the device.

Legend: N sampling lanes, L lanes, R rows, M max_model_len, E end ids a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.kernels.step_inputs import StepInputs

Tensor = torch.Tensor

# The numbers of contracts.step.Finish, which a kernel may not import (a test compares them).
FINISH_NONE, FINISH_STOP, FINISH_LENGTH, FINISH_ERROR = 0, 1, 2, 3


@dataclass(slots=True)
class CommitRecord:
    """What the host will read: int32 [L] each. token is -1 where no token was appended."""

    count_L: Tensor
    finish_L: Tensor
    token_L: Tensor


def commit_step(
    inputs: StepInputs,
    sample_to_lane_N: Tensor,
    token_N: Tensor,
    ok_N: Tensor,
    *,
    tokens_RM: Tensor,
    length_R: Tensor,
    num_computed_R: Tensor,
    max_len_R: Tensor,
    end_ids_RE: Tensor,
    alive_R: Tensor,
) -> CommitRecord:
    """token_N: int32; ok_N: bool, False where no token could be chosen; sample_to_lane_N: int64.

    A lane appends its token where it is alive and every token of its row has been computed. The row ends at
    an end token, at max_len, or where ok is False. The last row is the padding row: lanes that append nothing
    write there.
    """
    if token_N.shape != sample_to_lane_N.shape or ok_N.shape != token_N.shape:
        raise ValueError("token, ok and sample_to_lane must be [N]")
    row_N, alive_N = inputs.row_L[sample_to_lane_N], inputs.alive_L[sample_to_lane_N]
    length_N, max_len_N = length_R[row_N], max_len_R[row_N]
    ready_N = alive_N & (inputs.end_L[sample_to_lane_N] == length_N)
    append_N = ready_N & ok_N & (length_N < max_len_N)
    padding = tokens_RM.shape[0] - 1
    position_N = (length_N * append_N).long()
    tokens_RM[torch.where(append_N, row_N, padding), position_N] = token_N
    new_length_N = length_N + append_N.int()
    ends_N = append_N & (token_N.unsqueeze(1) == end_ids_RE[row_N]).any(1)
    full_N = ready_N & (new_length_N >= max_len_N)
    finish_N = full_N.int() * FINISH_LENGTH
    finish_N = torch.where(ready_N & ~ok_N & (length_N < max_len_N), FINISH_ERROR, finish_N)
    finish_N = torch.where(ends_N, FINISH_STOP, finish_N)
    length_R[row_N] = new_length_N
    num_computed_R[inputs.row_L] = torch.where(inputs.alive_L, inputs.end_L, num_computed_R[inputs.row_L])
    alive_R[row_N] = (alive_N & (finish_N == FINISH_NONE)).int()
    lanes = inputs.row_L.shape[0]
    record = CommitRecord(*(torch.zeros(lanes, dtype=torch.int32, device=row_N.device) for _ in range(3)))
    record.count_L[sample_to_lane_N] = append_N.int()
    record.finish_L[sample_to_lane_N] = finish_N.int()
    record.token_L[sample_to_lane_N] = torch.where(append_N, token_N, -1)
    return record
