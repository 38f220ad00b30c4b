"""What kernels that change some lanes' logits in place have in common: checks, and small blocks of lanes.

Lanes are int64 places, ascending, none twice. A block keeps temporaries in the cache and bounds their memory.

Legend: N sampling lanes, n those a kernel works on, b a block of them, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Tensor = torch.Tensor

LANES_AT_ONCE = 4


def check_lanes(logits_NV: Tensor, lane_n: Tensor, *per_lane: Tensor) -> None:
    """Raises ValueError unless logits are contiguous float32 [N, V], lanes int64 [n], the rest [n, ...]."""
    if logits_NV.dim() != 2 or logits_NV.dtype != torch.float32 or not logits_NV.is_contiguous():
        raise ValueError("logits must be contiguous float32 [N, V]")
    if lane_n.dim() != 1 or lane_n.dtype != torch.int64:
        raise ValueError("lanes must be int64 [n]")
    if any(values.shape[0] != lane_n.shape[0] for values in per_lane):
        raise ValueError("every lane needs its parameters")


def edit_lanes(logits_NV: Tensor, lane_n: Tensor, edit: Callable[..., None], *per_lane: Tensor) -> None:
    """Call edit(logits_bV, *per_lane_b) on blocks of the lanes; it changes its logits in place."""
    all_lanes = lane_n.shape[0] == logits_NV.shape[0]
    for first in range(0, lane_n.shape[0], LANES_AT_ONCE):
        block = slice(first, first + LANES_AT_ONCE)
        values = [each[block] for each in per_lane]
        if all_lanes:
            edit(logits_NV[block], *values)
        else:
            logits_bV = logits_NV.index_select(0, lane_n[block])
            edit(logits_bV, *values)
            logits_NV.index_copy_(0, lane_n[block], logits_bV)
