"""Staged-write scatter: copies spans of a packed payload to their places in a flat arena.

arena[dst_S[s] + i] = payload_N[start_S1[s] + i] for i < start_S1[s + 1] - start_S1[s]; spans never overlap.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def scatter_spans(arena: Tensor, payload_N: Tensor, dst_S: Tensor, start_S1: Tensor) -> None:
    """arena, payload_N: int32, flat; dst_S: int64 [S]; start_S1: int64 [S + 1], rising, from 0 to N."""
    if arena.dtype != torch.int32 or payload_N.dtype != torch.int32 or arena.dim() != 1:
        raise ValueError("arena and payload must be flat int32 tensors")
    if start_S1.shape[0] != dst_S.shape[0] + 1:
        raise ValueError("start needs one entry more than dst")
    scatter_spans_reference(arena, payload_N, dst_S, start_S1)


def scatter_spans_reference(arena: Tensor, payload_N: Tensor, dst_S: Tensor, start_S1: Tensor) -> None:
    """The same in torch operations."""
    count = payload_N.shape[0]
    shift_S = dst_S - start_S1[:-1]
    index_N = torch.repeat_interleave(shift_S, start_S1.diff(), output_size=count)
    arena.index_copy_(0, index_N.add_(torch.arange(count, device=arena.device)), payload_N)
