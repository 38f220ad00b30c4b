"""Where keys and values lie: one layer's pages, and the way from lanes to them.

Pools are head-major, [blocks, G, block_size, D], so that a head's keys of one block lie in one piece; slot s
is place s % block_size of block s // block_size.

Legend: T tokens, L lanes, R rows, B blocks a row, G KV heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.kernels.backend import Arg, jit, pdl_begin, pdl_options, tl, use_triton

Tensor = torch.Tensor

CLEARED_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class PagedPool:
    """One layer's K and V, [blocks, G, block_size, D] each, contiguous. A float8 pool holds K / k_scale and
    V / v_scale."""

    keys: Tensor
    values: Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]

    def check(self, num_kv_heads: int, head_dim: int) -> None:
        """Raises ValueError unless the pool has this shape."""
        if self.keys.shape != self.values.shape or self.keys.dtype != self.values.dtype:
            raise ValueError("keys and values must have one shape and type")
        if self.keys.dim() != 4 or self.keys.shape[1::2] != (num_kv_heads, head_dim):
            raise ValueError(f"pool must be [blocks, {num_kv_heads}, block_size, {head_dim}]")
        if not (self.keys.is_contiguous() and self.values.is_contiguous()):
            raise ValueError("pool must be contiguous")


@dataclass(frozen=True, slots=True)
class PagedLanes:
    """Where lanes find their keys. row_L: int64; length_L: int32, KV positions with this step's token;
    blocks_RB: int32. query_start_L1: int32 [L + 1] where lanes may have other than one token (their tokens
    are skipped), or None where lane and token are one."""

    row_L: Tensor
    length_L: Tensor
    blocks_RB: Tensor
    query_start_L1: Tensor | None = None

    def check(self) -> None:
        """Raises ValueError on wrong shapes."""
        lanes = self.row_L.shape[0]
        if self.row_L.dtype != torch.int64 or self.length_L.dtype != torch.int32:
            raise ValueError("row must be int64 and length int32")
        if self.length_L.shape != (lanes,) or self.blocks_RB.dim() != 2 or self.blocks_RB.stride(1) != 1:
            raise ValueError("length must be [L], blocks [R, B] with adjacent entries")
        if self.query_start_L1 is not None and self.query_start_L1.shape != (lanes + 1,):
            raise ValueError("query_start must be [L + 1]")


def store_kv(k_TGD: Tensor, v_TGD: Tensor, slot_T: Tensor, pool: PagedPool) -> None:
    """K and V, prepared, to their slots (int64), in torch operations."""
    block_T, place_T = slot_T // pool.block_size, slot_T % pool.block_size
    for target, source_TGD, scale in ((pool.keys, k_TGD, pool.k_scale), (pool.values, v_TGD, pool.v_scale)):
        scaled_TGD = source_TGD if scale == 1.0 else source_TGD.float() / scale
        target[block_T, :, place_T] = scaled_TGD.to(target.dtype)


def clear_blocks(pages_PNX: Tensor, blocks: Tensor) -> None:
    """Zeros in these blocks (int64) of all P pools, [P, blocks, ...], contiguous: one launch."""
    if not pages_PNX.is_contiguous():
        raise ValueError("pools must be contiguous")
    if not use_triton(pages_PNX):
        pages_PNX.index_fill_(1, blocks, 0)
    elif len(blocks):
        _clear_kernel[(len(blocks), len(pages_PNX))](
            pages_PNX, blocks, pages_PNX.stride(0), SIZE=pages_PNX.stride(1), AT_ONCE=CLEARED_AT_ONCE,
            **pdl_options(pages_PNX), num_warps=8,
        )


@jit
def _clear_kernel(
    pages: Arg, blocks: Arg, pool_stride: Arg, SIZE: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr
) -> None:
    pdl_begin(PDL)
    block = pages + tl.program_id(1).to(tl.int64) * pool_stride + tl.load(blocks + tl.program_id(0)) * SIZE
    zeros = tl.zeros((AT_ONCE,), pages.dtype.element_ty)
    for first in range(0, SIZE, AT_ONCE):
        place = first + tl.arange(0, AT_ONCE)
        tl.store(block + place, zeros, mask=place < SIZE)
