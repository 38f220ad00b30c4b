"""Paged attention behind one protocol: metadata from device tensors only, fixed addresses, no host reads.

Legend: T tokens of the step, L lanes, H query heads, G KV heads, D head size, S slots of the pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

Tensor = torch.Tensor


@dataclass(slots=True)
class AttentionBatch:
    """One step's lanes. Decode lanes come first, one token each; then prefill lanes.

    query_start_L1: int32 [L + 1]; length_L: int32, exact KV positions of each lane after this step's tokens
    (device). position_T: int64; slot_T: int64, where each token's K and V go (dead and padding tokens: the
    null block). block_table_LB: int32 [L, B], every block a row may have. query_len_L, length_bound_L: host
    copies, int32 [L]; the first is exact, the second is an upper bound of length_L, exact for prefill lanes.
    Eager backends size their work by them; a captured backend must not read them.
    """

    query_start_L1: Tensor
    length_L: Tensor
    position_T: Tensor
    slot_T: Tensor
    block_table_LB: Tensor
    query_len_L: np.ndarray
    length_bound_L: np.ndarray
    num_decode_lanes: int


class Attend(Protocol):
    """Attention of one step: writes K and V to the pool, then attends."""

    def __call__(self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        """Returns [T, H, D] in q's dtype. Causal; a sliding window, scale and soft cap are the layer's own
        (see LayerAttention)."""
        ...


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """One layer's shape. scale multiplies q.k; window is the count of keys seen, itself included, or None."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None


class AttentionBackend(Protocol):
    """Owns the paged K and V of every layer."""

    name: str

    def allocate(self, num_blocks: int) -> None:
        """Make the pool: num_blocks blocks, block 0 is the null block."""
        ...

    def bytes_per_block(self) -> int: ...

    def bind(self, batch: AttentionBatch) -> Attend: ...
