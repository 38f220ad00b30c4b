"""From logits to a token: temperature, noise, choice; and the short way for rows with a small top_k.

Legend: N sampling lanes, n those worked on, b a block of them, V vocabulary, K candidates.
"""

from __future__ import annotations

from functools import partial

import torch

from slipstream.kernels.candidates import first_argmax, top_candidates
from slipstream.kernels.lanes import check_lanes, edit_lanes
from slipstream.kernels.noise import gumbel_cost

Tensor = torch.Tensor

LOWEST = torch.finfo(torch.float32).min


def divide_temperature(logits_NV: Tensor, lane_n: Tensor, temperature_n: Tensor) -> None:
    """(logits - highest) / temperature (float32 [n], over 0): no temperature makes it overflow upwards."""
    check_lanes(logits_NV, lane_n, temperature_n)
    edit_lanes(logits_NV, lane_n, divide_temperature_reference, temperature_n)


def divide_temperature_reference(logits_bV: Tensor, temperature_b: Tensor) -> None:
    """The same in torch operations, on every lane given."""
    # Where every token is banned the highest is -inf, and -inf - -inf would be NaN.
    highest_b1 = logits_bV.amax(1, keepdim=True).clamp_(min=LOWEST)
    logits_bV.sub_(highest_b1).div_(temperature_b.unsqueeze(1))


def add_gumbel(logits_NV: Tensor, lane_n: Tensor, key_2n: Tensor) -> None:
    """Add Gumbel noise keyed by token id (kernels/noise.py): the argmax is then a draw from the softmax."""
    check_lanes(logits_NV, lane_n, key_2n[0])
    edit_lanes(logits_NV, lane_n, add_gumbel_reference, *key_2n)


def add_gumbel_reference(logits_bV: Tensor, key0_b: Tensor, key1_b: Tensor) -> None:
    """The same in torch operations, on every lane given."""
    id_V = torch.arange(logits_bV.shape[1], dtype=torch.int32, device=logits_bV.device)
    logits_bV.sub_(gumbel_cost(torch.stack((key0_b, key1_b)), id_V).log_())


def draw_among_top(
    logits_NV: Tensor, lane_n: Tensor, top_k_n: Tensor, top_p_n: Tensor, key_2n: Tensor, num_candidates: int
) -> None:
    """top_k (int32), top_p (float32) and Gumbel noise at once, on each lane's most likely num_candidates.

    All other tokens become -inf. Equal to the three steps on the whole vocabulary as long as no more than
    num_candidates tokens are at or above the top_k-th logit; of more equal ones the lowest ids stay.
    """
    check_lanes(logits_NV, lane_n, top_k_n, top_p_n, key_2n[0])
    edit = partial(draw_among_top_reference, num_candidates)
    edit_lanes(logits_NV, lane_n, edit, top_k_n, top_p_n, *key_2n)


def draw_among_top_reference(
    num_candidates: int, logits_bV: Tensor, top_k_b: Tensor, top_p_b: Tensor, key0_b: Tensor, key1_b: Tensor
) -> None:
    """The same in torch operations, on every lane given."""
    value_bK, id_bK = top_candidates(logits_bV, num_candidates)
    last_b1 = (top_k_b.long() - 1).clamp_(max=value_bK.shape[1] - 1).unsqueeze(1)
    keep_bK = value_bK >= value_bK.gather(1, last_b1)
    weight_bK = (value_bK - value_bK[:, :1]).exp().double() * keep_bK
    before_bK = weight_bK.cumsum(1) - weight_bK
    keep_bK &= before_bK < (weight_bK.sum(1) * top_p_b).unsqueeze(1)
    # Equal logits share their fate: keep down to the value of the last one kept.
    last_b1 = (keep_bK.sum(1, keepdim=True) - 1).clamp_(min=0)
    keep_bK = value_bK >= value_bK.gather(1, last_b1)
    noisy_bK = value_bK - gumbel_cost(torch.stack((key0_b, key1_b)), id_bK.int()).log_()
    logits_bV.fill_(-torch.inf)
    logits_bV.scatter_(1, id_bK, noisy_bK.masked_fill_(~keep_bK, -torch.inf))


def finite_rows(logits_NV: Tensor) -> Tensor:
    """bool [N], False where a row holds NaN or an infinity: its sum is not finite then."""
    return logits_NV.sum(1).isfinite()


def choose(logits_NV: Tensor, ok_N: Tensor) -> tuple[Tensor, Tensor]:
    """The token of the highest logit, lowest id where equal: int32 [N], and bool [N], False where ok was or
    where no token is legal; the token is 0 there, which is always an id."""
    best_N, id_N = first_argmax(logits_NV)
    ok_N = ok_N & (best_N > -torch.inf)
    return (id_N * ok_N).int(), ok_N
