"""Log-probabilities of the raw distribution: of given tokens, their rank, and the most likely ones.

Legend: N rows of logits, b a block of them, V vocabulary, K top tokens.
"""

from __future__ import annotations

import torch

from slipstream.kernels.candidates import top_candidates
from slipstream.kernels.lanes import LANES_AT_ONCE

Tensor = torch.Tensor


def token_logprobs(logits_NV: Tensor, token_N: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """logits: float32; token: int32 or int64 [N]; num_top: K, at least 0.

    Returns ids int32 [N, 1 + K] (the token, then the top K in order, lower id first where equal), values
    float32 [N, 1 + K], and rank int32 [N]: 1 + the number of tokens that are more likely.
    """
    if logits_NV.dim() != 2 or logits_NV.dtype != torch.float32 or token_N.shape != logits_NV.shape[:1]:
        raise ValueError("logits must be float32 [N, V], tokens [N]")
    # A block at a time: the temporaries of log-sum-exp and rank never reach the size of the logits.
    blocks = [slice(first, first + LANES_AT_ONCE) for first in range(0, len(token_N), LANES_AT_ONCE)]
    scores = [token_logprobs_reference(logits_NV[b], token_N[b].long(), num_top) for b in blocks]
    ids, values, rank = (torch.cat(parts) for parts in zip(*scores, strict=True))
    return ids, values, rank


def token_logprobs_reference(
    logits_bV: Tensor, token_b: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor]:
    """In torch operations, on one block."""
    id_b1 = token_b.unsqueeze(1)
    value_b1 = logits_bV.gather(1, id_b1)
    rank_b = (logits_bV > value_b1).sum(1, dtype=torch.int32) + 1
    # Relative to the highest, so that large logits cost no digits.
    highest_b1 = logits_bV.amax(1, keepdim=True)
    total_b1 = (logits_bV - highest_b1).exp_().sum(1, keepdim=True).log_()
    if num_top:
        top_bK, top_id_bK = top_candidates(logits_bV, num_top)
        value_b1, id_b1 = torch.cat((value_b1, top_bK), 1), torch.cat((id_b1, top_id_bK), 1)
    return id_b1.int(), value_b1 - highest_b1 - total_b1, rank_b
