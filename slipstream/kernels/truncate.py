"""Truncation: min_p, top_k and top_p make the less likely tokens -inf. Equal logits share their fate.

top_k and top_p look for the least likely token to keep by its distance to the highest logit, a digit at a
time: three histograms, of counts or of probability, instead of a sort. Distances are in steps of 2**-26 nats
(less than float32 tells apart in a probability), and all from 32 nats on count as one: noise spans less than
20 (kernels/noise.py), so no such token is ever drawn.

Legend: N sampling lanes, n those worked on, b a block of them, V vocabulary, D values of a digit.
"""

from __future__ import annotations

import torch
from torch.nn.functional import threshold

from slipstream.kernels.lanes import check_lanes, edit_lanes

Tensor = torch.Tensor

STEPS_PER_NAT = 2.0**26
LAST_STEP = 2.0**31 - 128  # the highest float32 that is an int32
DIGITS = ((20, 2048), (10, 1024), (0, 1024))  # shift and number of values of each digit of a distance
LOWEST = torch.finfo(torch.float32).min
# Not the smallest number under zero, but one that no flush-to-zero mode makes zero.
JUST_UNDER_ZERO = -torch.finfo(torch.float32).tiny


def keep_min_p(logits_NV: Tensor, lane_n: Tensor, min_p_n: Tensor) -> None:
    """Keep tokens whose probability is at least min_p (float32 [n], over 0) times the highest."""
    check_lanes(logits_NV, lane_n, min_p_n)
    edit_lanes(logits_NV, lane_n, keep_min_p_reference, min_p_n)


def keep_min_p_reference(logits_bV: Tensor, min_p_b: Tensor) -> None:
    """The same in torch operations, on every lane given."""
    cutoff_b = (logits_bV.amax(1) + min_p_b.log()).clamp_(min=LOWEST)
    _mask_negative(logits_bV, logits_bV - cutoff_b.unsqueeze(1))


def keep_top_k(logits_NV: Tensor, lane_n: Tensor, top_k_n: Tensor) -> None:
    """Keep the top_k (int32 [n], 1 to V) highest logits, and those equal to the last of them."""
    check_lanes(logits_NV, lane_n, top_k_n)
    edit_lanes(logits_NV, lane_n, keep_top_k_reference, top_k_n)


def keep_top_k_reference(logits_bV: Tensor, top_k_b: Tensor) -> None:
    """The same in torch operations, on every lane given."""
    _subtract_highest(logits_bV)
    one = torch.ones((), device=logits_bV.device)
    _keep_weight(logits_bV, one.expand_as(logits_bV), top_k_b.double())


def keep_top_p(logits_NV: Tensor, lane_n: Tensor, top_p_n: Tensor) -> None:
    """Keep the fewest most likely tokens whose probability together reaches top_p (float32 [n]), and those
    equal to the last of them."""
    check_lanes(logits_NV, lane_n, top_p_n)
    edit_lanes(logits_NV, lane_n, keep_top_p_reference, top_p_n)


def keep_top_p_reference(logits_bV: Tensor, top_p_b: Tensor) -> None:
    """The same in torch operations, on every lane given."""
    _subtract_highest(logits_bV)
    weight_bV = logits_bV.exp()
    _keep_weight(logits_bV, weight_bV, weight_bV.sum(1, dtype=torch.float64) * top_p_b)


def _subtract_highest(logits_bV: Tensor) -> None:
    logits_bV.sub_(logits_bV.amax(1, keepdim=True).clamp_(min=LOWEST))


def _keep_weight(logits_bV: Tensor, weight_bV: Tensor, target_b: Tensor) -> None:
    """Keep the highest logits (at most 0, the highest being 0) until their weight (float32) reaches the
    lane's target (float64)."""
    step_bV = (logits_bV * -STEPS_PER_NAT).clamp_(max=LAST_STEP).int()
    prefix_b1 = torch.zeros(len(target_b), 1, dtype=torch.int32, device=logits_bV.device)
    missing_b1 = target_b.unsqueeze(1)
    for shift, values in DIGITS:
        bin_bV = _bins((step_bV >> shift).sub_(prefix_b1 * values), values)
        mass_bD = torch.zeros(len(target_b), 2 * values, device=logits_bV.device)
        mass_bD = mass_bD.scatter_add_(1, bin_bV, weight_bV)[:, :values].double()
        reached_bD = mass_bD.cumsum(1)
        digit_b1 = (reached_bD < missing_b1).sum(1, keepdim=True).clamp_(max=values - 1)
        missing_b1 = missing_b1 - (reached_bD - mass_bD).gather(1, digit_b1)
        prefix_b1 = prefix_b1 * values + digit_b1.int()
    _mask_negative(logits_bV, (prefix_b1 - step_bV).float())


def _bins(offset_bV: Tensor, values: int) -> Tensor:
    """int64 bins of offsets (int32, used up) from a prefix: 0 .. values - 1 where they share it, and spread
    over values .. 2 * values - 1 where not. (Adding up in one bin would be slow, a mask of weights slower.)
    Always in range, so a lane of NaN is safe."""
    bin_bV = offset_bV.bitwise_and(values - 1)
    other_bV = offset_bV.sub_(bin_bV).clamp_(-values, values).bitwise_and_(values)
    return bin_bV.add_(other_bV).long()


def _mask_negative(logits_bV: Tensor, margin_bV: Tensor) -> None:
    """-inf where the margin (float32, used up) is negative. On a CPU comparing and filling takes ten times as
    long."""
    threshold(margin_bV, JUST_UNDER_ZERO, -torch.inf, inplace=True)
    logits_bV.add_(margin_bV.clamp_(max=0.0))
