"""The order of a step's lanes in decode attention, where more programs wait than run at once: the longest
first, so that no long lane is left to the end.

Legend: L lanes.
"""

from __future__ import annotations

import torch

from slipstream.kernels.backend import (
    FEW_LANES,
    Arg,
    ceil_div,
    jit_with,
    next_power_of_2,
    pdl_begin,
    pdl_options,
    tl,
    use_triton,
)

Tensor = torch.Tensor

RANKED_AT_ONCE = 32


def order_lanes(length_L: Tensor) -> Tensor:
    """Lanes by falling length_L [L] (int32), as int32 [L]. Equal lengths keep their order."""
    lanes = length_L.shape[0]
    if lanes == 0 or not use_triton(length_L):
        return order_lanes_reference(length_L)
    order_L = length_L.new_empty(lanes)
    _order_kernel[(ceil_div(lanes, RANKED_AT_ONCE),)](
        length_L, order_L, lanes, LANES=max(FEW_LANES, next_power_of_2(lanes)), AT_ONCE=RANKED_AT_ONCE,
        **pdl_options(order_L), num_warps=4,
    )
    return order_L


def order_lanes_reference(length_L: Tensor) -> Tensor:
    """The same in torch operations."""
    return torch.sort(length_L, descending=True, stable=True).indices.int()


@jit_with(do_not_specialize=("lanes",))
def _order_kernel(
    lengths: Arg, order: Arg, lanes: Arg, LANES: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr
) -> None:
    lane = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)[:, None]
    other = tl.arange(0, LANES)[None, :]
    pdl_begin(PDL)
    length = tl.load(lengths + lane, mask=lane < lanes, other=0)
    others = tl.load(lengths + other, mask=other < lanes, other=-1)
    ahead = (others > length) | ((others == length) & (other < lane))
    rank = tl.sum(ahead.to(tl.int32), 1)[:, None]
    tl.store(order + rank, lane, mask=lane < lanes)
