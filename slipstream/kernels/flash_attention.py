"""Attention of lanes with several tokens by FlashAttention 3 (Shah et al., 2024), where the package fa3-fwd
is installed: for prefill and mixed steps on Hopper.

Lengths and pages come from device memory. What the host gives are bounds that follow from a step's shape, so
a captured call serves any lengths: its grid is the GPU's multiprocessors, its work list is made by a kernel
of its own, and with one split nothing is allocated by length. Results repeat to the bit.

Pages are read by TMA, and whole: behind a lane's last key they must hold finite numbers, whatever they are.

Legend: T tokens, L lanes, R rows, B blocks a row, H query heads, D head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from slipstream.kernels.attention_common import LayerAttention, attend_reference
from slipstream.kernels.paged import PagedLanes, PagedPool
from slipstream.kernels.precompile import is_listing

Tensor = torch.Tensor

# Pages come by TMA only where a lane may have more queries than one tile has, 192 at most. A bound may be
# larger than the step.
LEAST_BOUND = 256
PREFIX = "FLASHATTENTION_DISABLE_"


def installed_build() -> frozenset[str] | None:
    """What the installed package was built without, by FlashAttention's names (PAGEDKV, LOCAL, FP16, ...);
    None where it is not installed."""
    try:
        flags = import_module("fa3_fwd_config").CONFIG["build_flags"]
    except ImportError:
        return None
    return frozenset(name.removeprefix(PREFIX) for name, off in flags.items() if off)


@functools.cache
def _operator() -> Callable[..., Any]:
    return import_module("fa3_fwd_interface").fa3_fwd_cuda.fwd  # type: ignore[no-any-return]


def use_flash(tensor: Tensor) -> bool:
    """There is no other form of it than CUDA's."""
    return tensor.is_cuda


@dataclass(frozen=True, slots=True)
class FlashLanes:
    """What it takes of a step's lanes beside PagedLanes, int32 [L] each: row_L, and count_L, the queries of
    lanes with at least two; 0 for others, which it leaves alone."""

    row_L: Tensor
    count_L: Tensor


def flash_lanes(lanes: PagedLanes) -> FlashLanes:
    """Made once a step for all layers."""
    lanes.check()
    if lanes.query_start_L1 is None:
        raise ValueError("query_start must be int32 [L + 1]")
    count_L = lanes.query_start_L1.diff()
    return FlashLanes(lanes.row_L.int(), count_L * (count_L > 1))


def flash_attention(
    q_THD: Tensor, own: FlashLanes, lanes: PagedLanes, pool: PagedPool, shape: LayerAttention, out_THD: Tensor
) -> None:
    """Causal attention of lanes with at least two tokens; writes their rows of out_THD. q, pool and out:
    bfloat16 (float16 where the build has it). Raises RuntimeError where the build lacks what this needs."""
    pool.check(shape.num_kv_heads, shape.head_dim)
    if q_THD.shape[1:] != (shape.num_heads, shape.head_dim) or q_THD.stride(2) != 1:
        raise ValueError("q must be [T, H, D], the elements of a head adjacent")
    if q_THD.dtype != pool.keys.dtype or out_THD.dtype != q_THD.dtype or out_THD.shape != q_THD.shape:
        raise ValueError("q, pool and out must have one type, q and out one shape")
    if not use_flash(q_THD):
        flash_attention_reference(q_THD, own, lanes, pool, shape, out_THD)
    elif not is_listing():  # nothing has written the lengths then
        _operator()(
            q_THD,
            pool.keys.transpose(1, 2),
            pool.values.transpose(1, 2),
            out=out_THD,
            cu_seqlens_q=lanes.query_start_L1,
            seqused_q=own.count_L,
            seqused_k=lanes.length_L,
            max_seqlen_q=max(len(q_THD), LEAST_BOUND),
            page_table=lanes.blocks_RB,
            kv_batch_idx=own.row_L,
            softmax_scale=shape.scale,
            is_causal=True,
            window_size_left=-1 if shape.window is None else shape.window - 1,
            window_size_right=0,
            softcap=shape.soft_cap or 0.0,
            num_splits=1,
        )


def flash_attention_reference(
    q_THD: Tensor, own: FlashLanes, lanes: PagedLanes, pool: PagedPool, shape: LayerAttention, out_THD: Tensor
) -> None:
    """The same in torch operations."""
    assert lanes.query_start_L1 is not None
    start_L = lanes.query_start_L1[:-1].long()
    lane_T = torch.repeat_interleave(torch.arange(len(start_L), device=q_THD.device), own.count_L)
    place_T = torch.arange(len(lane_T), device=q_THD.device) - (own.count_L.cumsum(0) - own.count_L)[lane_T]
    position_T = place_T + (lanes.length_L - own.count_L)[lane_T]
    token_T = start_L[lane_T] + place_T
    out_THD[token_T] = attend_reference(
        q_THD[token_T], lane_T, position_T, lanes.row_L, lanes.blocks_RB, pool, shape
    )
