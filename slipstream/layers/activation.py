"""The gate of the feed-forward block."""

from __future__ import annotations

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


def silu_and_mul(gate_up_TI2: Tensor) -> Tensor:
    """silu(gate) * up, where the last axis holds gate, then up: [T, 2 I] -> [T, I], contiguous."""
    gate_TI, up_TI = gate_up_TI2.chunk(2, -1)
    return F.silu(gate_TI).mul_(up_TI)
