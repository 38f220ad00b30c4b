"""Masks and biases of single tokens: allowed sets, added biases, banned token sequences.

A ban is a bias of -inf, so bans and biases meet in any order and an entry of 0 changes nothing.

Legend: N sampling lanes, n those worked on, b a block of them, V vocabulary, K list entries, W words of 32
tokens, R rows, M max_model_len.
"""

from __future__ import annotations

import torch

from slipstream.kernels.lanes import check_lanes, edit_lanes

Tensor = torch.Tensor


def allow_only(logits_NV: Tensor, lane_n: Tensor, mask_nW: Tensor) -> None:
    """-inf for every token whose bit is 0. mask: int32 [n, W], token t is bit t % 32 of word t // 32."""
    check_lanes(logits_NV, lane_n, mask_nW)
    if mask_nW.dtype != torch.int32 or mask_nW.shape[1] * 32 < logits_NV.shape[1]:
        raise ValueError("the mask must be int32 and have a bit for every token")
    edit_lanes(logits_NV, lane_n, allow_only_reference, mask_nW)


def allow_only_reference(logits_bV: Tensor, mask_bW: Tensor) -> None:
    """The same in torch operations, on every lane given."""
    bit = torch.arange(32, dtype=torch.int32, device=mask_bW.device)
    clear_bV = (mask_bW.unsqueeze(2) >> bit).bitwise_and_(1).flatten(1) == 0
    logits_bV.masked_fill_(clear_bV[:, : logits_bV.shape[1]], -torch.inf)


def add_at(logits_NV: Tensor, lane_n: Tensor, id_nK: Tensor, bias_nK: Tensor) -> None:
    """logits[lane, id] += bias for every entry; ids (int32 or int64) may repeat. bias: float32."""
    check_lanes(logits_NV, lane_n, id_nK, bias_nK)
    if id_nK.shape != bias_nK.shape:
        raise ValueError("every id needs its bias")
    logits_NV.index_put_((lane_n.unsqueeze(1), id_nK.long()), bias_nK, accumulate=True)


def ban_at(logits_NV: Tensor, lane_n: Tensor, id_nK: Tensor, banned_nK: Tensor) -> None:
    """logits[lane, id] = -inf for every entry where banned (bool) is True."""
    bias_nK = torch.zeros(banned_nK.shape, device=logits_NV.device).masked_fill_(banned_nK, -torch.inf)
    add_at(logits_NV, lane_n, id_nK, bias_nK)


def banned_entries(
    tokens_RM: Tensor, row_n: Tensor, length_n: Tensor, word_nK: Tensor, back_nK: Tensor
) -> Tensor:
    """Which entries are the last token of a word whose other tokens end the row: bool [n, K].

    word: int32, the words' tokens one word after the other; back: int32, tokens left in the word after this
    one (0 for the last one, -1 for an entry that is not used). The row is read where it is.
    """
    if word_nK.shape != back_nK.shape or word_nK.shape[0] != row_n.shape[0]:
        raise ValueError("words must be [n, K], one line a lane")
    position_nK = length_n.unsqueeze(1) - back_nK
    seen_nK = tokens_RM[row_n.unsqueeze(1), position_nK.clamp(0, tokens_RM.shape[1] - 1).long()]
    differs_nK = (back_nK > 0) & ((position_nK < 0) | (seen_nK != word_nK))
    last_nK = torch.arange(word_nK.shape[1], device=word_nK.device) + back_nK.clamp(min=0)
    differing_nK = torch.zeros_like(word_nK).scatter_add_(1, last_nK, differs_nK.int())
    return (back_nK == 0) & (differing_nK == 0)
