"""Paged attention behind one protocol: metadata from device tensors only, fixed addresses, no host reads.

Legend: T tokens of the step, L lanes, R rows, B blocks a row, H query heads, G KV heads, X = H + 2 G, D head
size, S slots of the pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from slipstream.kernels.attention_common import LayerAttention
from slipstream.kernels.qkv_write import HeadPrep

__all__ = ["Attend", "AttendQkv", "AttentionBackend", "AttentionBatch", "HeadPrep", "LayerAttention"]

Tensor = torch.Tensor


@dataclass(slots=True)
class AttentionBatch:
    """One step's lanes. Decode lanes come first, one token each and drafts; then prefill lanes.

    query_start_L1: int32 [L + 1]; length_L: int32, exact KV positions of each lane after this step's tokens
    (device). position_T: int64; slot_T: int64, where each token's K and V go (dead and padding tokens: the
    null block). row_L: int64; blocks_RB: int32, every block a row of the table may have. query_len_L,
    length_bound_L: host copies, int32 [L]; the first is exact, the second is an upper bound of length_L,
    exact for prefill lanes. Eager backends size their work by them; a captured backend must not read them.
    num_decode_lanes: what the host knows of; in a captured step all lanes or, where others are among them, 0.
    decode_tokens: that a decode lane has at most; eager backends read query_len_L instead.
    """

    query_start_L1: Tensor
    length_L: Tensor
    position_T: Tensor
    slot_T: Tensor
    row_L: Tensor
    blocks_RB: Tensor
    query_len_L: np.ndarray
    length_bound_L: np.ndarray
    num_decode_lanes: int
    decode_tokens: int = 1


class Attend(Protocol):
    """Attention of one step: writes K and V to the pool, then attends."""

    def __call__(self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        """Returns [T, H, D] in q's dtype. Causal; a sliding window, scale and soft cap are the layer's own
        (see LayerAttention)."""
        ...


class AttendQkv(Attend, Protocol):
    """A backend that also prepares q and k itself, in the kernels that read and write them anyway."""

    def from_qkv(self, layer: int, qkv_TXD: Tensor, prep: HeadPrep) -> Tensor:
        """qkv: the fused projection as it comes, heads of q, k, v. Returns [T, H, D] in its dtype."""
        ...


class AttentionBackend(Protocol):
    """Owns the paged K and V of every layer. reads_whole_blocks: also what lies beyond a row's length, whose
    masked numbers must be finite; then steps clear blocks with a new owner."""

    name: str
    reads_whole_blocks: bool

    def allocate(self, num_blocks: int) -> None:
        """Make the pool: num_blocks blocks, block 0 is the null block."""
        ...

    def bytes_per_block(self) -> int: ...

    def clear(self, blocks: Tensor) -> None:
        """Blocks (int64) with a new owner who will read them before every slot is written."""
        ...

    def bind(self, batch: AttentionBatch) -> Attend: ...
