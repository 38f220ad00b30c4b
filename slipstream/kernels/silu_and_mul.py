"""The gate of the feed-forward block: silu(gate) * up.

Legend: T tokens, I inner size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from slipstream.kernels.backend import (
    Arg,
    ceil_div,
    jit,
    next_power_of_2,
    pdl_begin,
    pdl_options,
    tl,
    use_triton,
)

Tensor = torch.Tensor

BLOCK = 1024


def silu_and_mul(gate_up_TI2: Tensor) -> Tensor:
    """Each row holds gate, then up: [T, 2 I] -> [T, I], contiguous, of the same type."""
    if gate_up_TI2.dim() != 2 or gate_up_TI2.stride(1) != 1 or gate_up_TI2.shape[1] % 2:
        raise ValueError("gate and up must be [T, 2 I], with rows of adjacent elements")
    if not use_triton(gate_up_TI2):
        return silu_and_mul_reference(gate_up_TI2)
    tokens, inner = gate_up_TI2.shape[0], gate_up_TI2.shape[1] // 2
    out_TI = torch.empty(tokens, inner, dtype=gate_up_TI2.dtype, device=gate_up_TI2.device)
    if tokens:
        block = min(BLOCK, next_power_of_2(inner))
        _silu_kernel[(tokens, ceil_div(inner, block))](
            gate_up_TI2,
            out_TI,
            gate_up_TI2.stride(0),
            WIDTH=inner,
            BLOCK=block,
            **pdl_options(out_TI),
            num_warps=4,
        )
    return out_TI


def silu_and_mul_reference(gate_up_TI2: Tensor) -> Tensor:
    """The same in torch operations."""
    gate_TI, up_TI = gate_up_TI2.chunk(2, -1)
    return F.silu(gate_TI).mul_(up_TI)


@jit
def _silu_kernel(
    gate_up: Arg, out: Arg, stride: Arg, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    pdl_begin(PDL)
    gate = tl.load(gate_up + token * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * stride + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + token * WIDTH + column, value.to(out.dtype.element_ty), mask=inside)
