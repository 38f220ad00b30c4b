"""Drafts for the next step go into their rows, past the end, and their count beside them.

Legend: L lanes, K drafts at most, R rows, M max_model_len.
"""

from __future__ import annotations

import torch

from slipstream.kernels.backend import Arg, jit_with, next_power_of_2, pdl_begin, pdl_options, tl, use_triton

Tensor = torch.Tensor


def put_drafts(
    row_L: Tensor,
    token_LK: Tensor,
    count_L: Tensor,
    appended_L: Tensor,
    *,
    tokens_RM: Tensor,
    alive_R: Tensor,
    length_R: Tensor,
    max_len_R: Tensor,
    draft_count_R: Tensor,
) -> None:
    """tokens[row, length + j] = token[lane, j] for j < draft_count[row] = count. Counts are clamped to 0 .. K
    and so that the token after the drafts has room; they are 0 for rows that are dead or gained nothing in
    this step (they are still in their prompt). row: int64, all others int32; no living row twice. Scalar
    columns have one stride.
    """
    lanes, most = token_LK.shape
    if any(each.shape != (lanes,) for each in (row_L, count_L, appended_L)) or not most:
        raise ValueError("row, count and appended must be [L], tokens [L, K] with K at least 1")
    if token_LK.dtype != torch.int32 or count_L.dtype != torch.int32 or token_LK.stride(1) != 1:
        raise ValueError("tokens and counts must be int32, the tokens of a lane adjacent")
    scalars = (alive_R, length_R, max_len_R, draft_count_R)
    if len({each.stride(0) for each in scalars}) != 1:
        raise ValueError("the scalar columns of a row must have one stride")
    if not use_triton(tokens_RM):
        put_drafts_reference(row_L, token_LK, count_L, appended_L, tokens_RM, *scalars)
        return
    _put_kernel[(lanes,)](
        row_L, token_LK, count_L.contiguous(), appended_L, tokens_RM, *scalars,
        token_LK.stride(0), tokens_RM.stride(0), alive_R.stride(0),
        DRAFTS=most, PAD=next_power_of_2(most), **pdl_options(tokens_RM), num_warps=1,
    )  # fmt: skip


def put_drafts_reference(
    row_L: Tensor,
    token_LK: Tensor,
    count_L: Tensor,
    appended_L: Tensor,
    tokens_RM: Tensor,
    alive_R: Tensor,
    length_R: Tensor,
    max_len_R: Tensor,
    draft_count_R: Tensor,
) -> None:
    """The same in torch operations."""
    length_L, draft_K = length_R[row_L], torch.arange(token_LK.shape[1], device=row_L.device)
    count_L = count_L.clamp(max=token_LK.shape[1]).minimum(max_len_R[row_L] - length_L - 1).clamp_(min=0)
    count_L = count_L * ((alive_R[row_L] != 0) & (appended_L > 0))
    own_LK = draft_K < count_L[:, None]
    to_LK = torch.where(own_LK, row_L[:, None], tokens_RM.shape[0] - 1)
    tokens_RM[to_LK, (length_L[:, None] + draft_K) * own_LK] = token_LK
    draft_count_R[row_L] = count_L


@jit_with(
    do_not_specialize=("drafts_stride",),
    do_not_specialize_on_alignment=("drafts", "counts", "appended"),
)
def _put_kernel(
    rows: Arg, drafts: Arg, counts: Arg, appended: Arg, tokens: Arg, alive: Arg, length: Arg, max_len: Arg,
    draft_count: Arg, drafts_stride: Arg, tokens_stride: Arg, row_stride: Arg,
    DRAFTS: tl.constexpr, PAD: tl.constexpr, PDL: tl.constexpr,
) -> None:
    lane = tl.program_id(0)
    draft = tl.arange(0, PAD)
    pdl_begin(PDL)
    row = tl.load(rows + lane)
    at = row * row_stride
    old = tl.load(length + at)
    count = tl.minimum(tl.minimum(tl.load(counts + lane), DRAFTS), tl.load(max_len + at) - old - 1)
    takes = (tl.load(alive + at) != 0) & (tl.load(appended + lane) > 0)
    count = tl.where(takes, tl.maximum(count, 0), 0)
    token = tl.load(drafts + lane.to(tl.int64) * drafts_stride + draft, mask=draft < count, other=0)
    tl.store(tokens + row * tokens_stride + old + draft, token, mask=draft < count)
    tl.store(draft_count + at, count)
