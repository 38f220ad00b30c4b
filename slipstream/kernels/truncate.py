"""Truncation: what is below a row's cutoff becomes -inf. Cutoffs are values, so equal logits share
their fate.

The cutoff of top-k and top-p is found by a radix search over the bits of the logits, weighed by one or by
probability: three histograms instead of a sort.

Legend: N sampling lanes, n those worked on, b a block of them, V vocabulary.
"""

from __future__ import annotations

import torch
from torch.nn.functional import threshold

from slipstream.kernels.candidates import key_value, order_key
from slipstream.kernels.lanes import check_lanes, edit_lanes

Tensor = torch.Tensor

# Three histograms of 11 bits each cover the 32 bits of a key.
SHIFTS = (22, 11, 0)
WIDTH = 1 << 11
INT32_MIN = -(1 << 31)
LOWEST = torch.finfo(torch.float32).min
# Not the smallest number under zero, but one that no flush-to-zero mode makes zero.
JUST_UNDER_ZERO = -torch.finfo(torch.float32).tiny


def keep_min_p(logits_NV: Tensor, lane_n: Tensor, min_p_n: Tensor) -> None:
    """Keep tokens whose probability is at least min_p (float32 [n], over 0) times the highest."""
    check_lanes(logits_NV, lane_n, min_p_n)
    edit_lanes(logits_NV, lane_n, keep_min_p_reference, min_p_n)


def keep_min_p_reference(logits_bV: Tensor, min_p_b: Tensor) -> None:
    """The same in torch operations, on every lane given."""
    mask_below(logits_bV, logits_bV.amax(1) + min_p_b.log())


def keep_top_k(logits_NV: Tensor, lane_n: Tensor, top_k_n: Tensor) -> None:
    """Keep the top_k (int32 [n], at least 1) highest logits, and those equal to the last of them."""
    check_lanes(logits_NV, lane_n, top_k_n)
    edit_lanes(logits_NV, lane_n, keep_top_k_reference, top_k_n)


def keep_top_k_reference(logits_bV: Tensor, top_k_b: Tensor) -> None:
    """The same in torch operations, on every lane given."""
    weight = torch.ones((), dtype=torch.float64, device=logits_bV.device).expand_as(logits_bV)
    mask_below(logits_bV, cutoff(logits_bV, weight, top_k_b.double()))


def keep_top_p(logits_NV: Tensor, lane_n: Tensor, top_p_n: Tensor) -> None:
    """Keep the fewest most likely tokens whose probability together reaches top_p (float32 [n]), and those
    equal to the last of them."""
    check_lanes(logits_NV, lane_n, top_p_n)
    edit_lanes(logits_NV, lane_n, keep_top_p_reference, top_p_n)


def keep_top_p_reference(logits_bV: Tensor, top_p_b: Tensor) -> None:
    """The same in torch operations, on every lane given."""
    weight_bV = (logits_bV - logits_bV.amax(1, keepdim=True)).exp_().double()
    mask_below(logits_bV, cutoff(logits_bV, weight_bV, weight_bV.sum(1) * top_p_b))


def cutoff(logits_bV: Tensor, weight_bV: Tensor, target_b: Tensor) -> Tensor:
    """The highest logit such that the weight at or above it reaches the lane's target.

    weight, target: float64, [b, V] and [b]. Returns float32 [b]. Bins are clamped, so a lane of NaN is safe.
    """
    key_bV = order_key(logits_bV)
    target_b1 = target_b.unsqueeze(1)
    first_b1 = prefix_b1 = torch.full_like(target_b1, -WIDTH // 2, dtype=torch.int32)
    for shift in SHIFTS:
        # Keys that share the prefix have bins 1 .. WIDTH; what is above or below goes to the outer two.
        low_b1 = first_b1.clamp(min=INT32_MIN + 1) - 1
        bin_bV = torch.minimum(torch.maximum(key_bV >> shift, low_b1), first_b1 + WIDTH).sub_(low_b1)
        mass = torch.zeros(len(target_b), WIDTH + 2, dtype=torch.float64, device=logits_bV.device)
        from_top = mass.scatter_add_(1, bin_bV.long(), weight_bV).flip(1).cumsum(1)
        short_b1 = (from_top < target_b1).sum(1, keepdim=True, dtype=torch.int32)
        prefix_b1 = first_b1 + (WIDTH - short_b1).clamp_(0, WIDTH - 1)
        first_b1 = prefix_b1 * WIDTH
    return key_value(prefix_b1).squeeze(1)


def mask_below(logits_bV: Tensor, cutoff_b: Tensor) -> None:
    """-inf where a logit is below its lane's cutoff, in place. (Comparing and filling takes ten times as
    long on a CPU.)"""
    below_bV = logits_bV - cutoff_b.clamp(min=LOWEST).unsqueeze(1)
    threshold(below_bV, JUST_UNDER_ZERO, -torch.inf, inplace=True)
    logits_bV.add_(below_bV.clamp_(max=0.0))
