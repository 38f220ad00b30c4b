"""Penalties on tokens that a row already holds, counted from the row itself, so they need no state.

Legend: N sampling lanes, n those worked on, b a block of them, V vocabulary, R rows, M max_model_len.
"""

from __future__ import annotations

import torch

from slipstream.kernels.lanes import LANES_AT_ONCE, check_lanes

Tensor = torch.Tensor


def penalise(
    logits_NV: Tensor,
    lane_n: Tensor,
    *,
    tokens_RM: Tensor,
    row_n: Tensor,
    prompt_len_n: Tensor,
    length_n: Tensor,
    repetition_n: Tensor,
    frequency_n: Tensor,
    presence_n: Tensor,
) -> None:
    """Repetition first (logits over 0 are divided, others multiplied) over prompt and output; then frequency
    times the token's count in the output, then presence, once, where it is in the output.

    row: int64; lengths: int32; penalties: float32, all [n]. Tokens past `length` are never used.
    """
    check_lanes(logits_NV, lane_n, row_n, prompt_len_n, length_n, repetition_n, frequency_n, presence_n)
    for first in range(0, lane_n.shape[0], LANES_AT_ONCE):
        b = slice(first, first + LANES_AT_ONCE)
        token_bM, output_bM = held_tokens(tokens_RM, row_n[b], prompt_len_n[b], length_n[b])
        penalise_reference(
            logits_NV, lane_n[b], token_bM, output_bM, repetition_n[b], frequency_n[b], presence_n[b]
        )


def held_tokens(
    tokens_RM: Tensor, row_b: Tensor, prompt_len_b: Tensor, length_b: Tensor
) -> tuple[Tensor, Tensor]:
    """The row's tokens, int64 [b, M], filled up with its first one, and float32 [b, M], 1 where the token is
    output and 0 elsewhere."""
    position_M = torch.arange(tokens_RM.shape[1], device=tokens_RM.device)
    token_bM = tokens_RM[row_b]
    inside_bM = position_M < length_b.unsqueeze(1)
    output_bM = inside_bM & (position_M >= prompt_len_b.unsqueeze(1))
    return torch.where(inside_bM, token_bM, token_bM[:, :1]).long(), output_bM.float()


def penalise_reference(
    logits_NV: Tensor,
    lane_b: Tensor,
    token_bM: Tensor,
    output_bM: Tensor,
    repetition_b: Tensor,
    frequency_b: Tensor,
    presence_b: Tensor,
) -> None:
    """In torch operations. A token that is held twice is written twice, with the same value."""
    count_bV = torch.zeros(len(lane_b), logits_NV.shape[1], device=logits_NV.device)
    count_bM = count_bV.scatter_add_(1, token_bM, output_bM).gather(1, token_bM)
    place = (lane_b.unsqueeze(1), token_bM)
    value_bM, repetition_b1 = logits_NV[place], repetition_b.unsqueeze(1)
    value_bM = torch.where(value_bM > 0, value_bM / repetition_b1, value_bM * repetition_b1)
    value_bM -= frequency_b.unsqueeze(1) * count_bM
    value_bM -= presence_b.unsqueeze(1) * (count_bM > 0)
    logits_NV.index_put_(place, value_bM)
