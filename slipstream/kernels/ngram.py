"""N-gram drafts: what followed the last tokens of a row where they stood before.

Of all earlier places the one with the longest match counts, and of equally long ones the most recent. The
copy runs on into itself, as in LZ77: after the row's last token it goes on with the drafts made so far, so
that text of any period is drafted whole.

Legend: L lanes, K drafts, P parts of a row.
"""

from __future__ import annotations

import torch

from slipstream.kernels.backend import Arg, jit, next_power_of_2, pdl_begin, pdl_options, tl, use_triton
from slipstream.kernels.history import AFTER_BITS, Histories, find_matches, text_of

Tensor = torch.Tensor

_AFTER_MASK = tl.constexpr((1 << AFTER_BITS) - 1)


def draft_ngrams(histories: Histories, least: int, most: int, drafts: int) -> tuple[Tensor, Tensor]:
    """token int32 [L, K] and count int32 [L]: K where an n-gram of least to most tokens stood before, else 0,
    and the tokens mean nothing."""
    key_LP = find_matches(histories, least, most, kept=1)
    if not use_triton(histories.tokens_RM):
        return draft_ngrams_reference(histories, key_LP, drafts)
    lanes, parts = key_LP.shape
    token_LK = torch.empty(lanes, drafts, dtype=torch.int32, device=key_LP.device)
    count_L = torch.empty(lanes, dtype=torch.int32, device=key_LP.device)
    _copy_kernel[(lanes,)](
        *histories.columns(), key_LP, token_LK, count_L, *histories.strides(), PARTS=parts, DRAFTS=drafts,
        PAD=next_power_of_2(drafts), **pdl_options(key_LP), num_warps=1,
    )  # fmt: skip
    return token_LK, count_L


def draft_ngrams_reference(histories: Histories, key_LP: Tensor, drafts: int) -> tuple[Tensor, Tensor]:
    """The same in torch operations."""
    key_L1 = key_LP.amax(1, keepdim=True).long()
    after_L1 = key_L1 & ((1 << AFTER_BITS) - 1)
    period_L1 = (histories.text_length_L().unsqueeze(1) - after_L1).clamp(min=1)
    draft_K = torch.arange(drafts, device=key_LP.device)
    token_LK = histories.tokens_RM[histories.row_L.unsqueeze(1), after_L1 + draft_K % period_L1]
    return token_LK, (key_L1[:, 0] > 0).int() * drafts


@jit
def _copy_kernel(
    rows: Arg, appended: Arg, alive: Arg, lengths: Arg, tokens: Arg, keys: Arg, token_out: Arg,
    count_out: Arg, row_stride: Arg, stride: Arg,
    PARTS: tl.constexpr, DRAFTS: tl.constexpr, PAD: tl.constexpr, PDL: tl.constexpr,
) -> None:
    lane = tl.program_id(0).to(tl.int64)
    part, draft = tl.arange(0, PARTS), tl.arange(0, PAD)
    pdl_begin(PDL)
    tokens, length = text_of(lane, rows, appended, alive, lengths, tokens, row_stride, stride)
    key = tl.max(tl.load(keys + lane * PARTS + part), 0)
    after = key & _AFTER_MASK
    count = tl.where(key > 0, DRAFTS, 0)
    token = tl.load(tokens + after + draft % tl.maximum(length - after, 1), mask=draft < count, other=0)
    tl.store(token_out + lane * DRAFTS + draft, token, mask=draft < DRAFTS)
    tl.store(count_out + lane, count)
