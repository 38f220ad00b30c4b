"""RMS normalisation of the residual stream, with what comes before it: an addition, or the embedding.

out = x * weight / sqrt(mean(x^2) + eps), in float32 whatever goes in and out (Zhang and Sennrich, 2019).

Legend: T tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from slipstream.kernels.backend import Arg, jit, next_power_of_2, pdl_begin, pdl_options, tl, use_triton

Tensor = torch.Tensor


def add_rms_norm(
    residual_TH: Tensor,
    delta_TH: Tensor,
    weight_H: Tensor,
    eps: float,
    out_dtype: torch.dtype,
    copy_TH: Tensor | None = None,
) -> Tensor:
    """Adds delta to the float32 residual in place; returns the normalised sum [T, H]. weight: float32. copy:
    as rms_norm has it, of the sum."""
    _check(residual_TH, weight_H)
    if delta_TH.shape != residual_TH.shape or delta_TH.stride(1) != 1:
        raise ValueError("delta must be [T, H] like the residual, with rows of adjacent elements")
    if not use_triton(residual_TH):
        out_TH = add_rms_norm_reference(residual_TH, delta_TH, weight_H, eps, out_dtype)
        if copy_TH is not None:
            copy_TH.copy_(residual_TH)
        return out_TH
    out_TH = torch.empty(residual_TH.shape, dtype=out_dtype, device=residual_TH.device)
    _launch(residual_TH, delta_TH, residual_TH, weight_H, eps, out_TH, "add", copy_TH)
    return out_TH


def add_rms_norm_reference(
    residual_TH: Tensor, delta_TH: Tensor, weight_H: Tensor, eps: float, out_dtype: torch.dtype
) -> Tensor:
    """The same in torch operations."""
    return rms_norm_reference(residual_TH.add_(delta_TH), weight_H, eps, out_dtype)


def rms_norm(
    x_TH: Tensor,
    weight_H: Tensor,
    eps: float,
    out_dtype: torch.dtype,
    out_TH: Tensor | None = None,
    copy_TH: Tensor | None = None,
) -> Tensor:
    """x_TH: any float type. Returns out_dtype [T, H]: out, if given, whose rows' elements are adjacent. copy:
    [T, H] of any float type, which gets x; its rows' elements are adjacent, too."""
    _check(x_TH, weight_H, x_TH.dtype)
    out_TH = _room(x_TH.shape, out_dtype, x_TH.device, out_TH)
    if not use_triton(x_TH):
        if copy_TH is not None:
            copy_TH.copy_(x_TH)
        return out_TH.copy_(rms_norm_reference(x_TH, weight_H, eps, out_dtype))
    _launch(x_TH, x_TH, x_TH, weight_H, eps, out_TH, "plain", copy_TH)
    return out_TH


def rms_norm_reference(x_TH: Tensor, weight_H: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
    """The same in torch operations."""
    return F.rms_norm(x_TH.float(), weight_H.shape, weight_H, eps).to(out_dtype)


def embed_rms_norm(
    token_T: Tensor,
    embed_VH: Tensor,
    weight_H: Tensor,
    eps: float,
    out_dtype: torch.dtype,
    out_TH: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rows of a table, as a step's first residual: float32 [T, H], and its norm in out_dtype (out, if given,
    whose rows' elements are adjacent). token: int32 or int64, below V."""
    _check(embed_VH, weight_H, embed_VH.dtype)
    if token_T.dim() != 1 or token_T.dtype not in (torch.int32, torch.int64):
        raise ValueError("tokens must be int32 or int64 [T]")
    shape = torch.Size((token_T.shape[0], embed_VH.shape[1]))
    out_TH = _room(shape, out_dtype, embed_VH.device, out_TH)
    if not use_triton(embed_VH):
        residual_TH, normed_TH = embed_rms_norm_reference(token_T, embed_VH, weight_H, eps, out_dtype)
        return residual_TH, out_TH.copy_(normed_TH)
    residual_TH = torch.empty(shape, dtype=torch.float32, device=embed_VH.device)
    _launch(embed_VH, token_T, residual_TH, weight_H, eps, out_TH, "embed")
    return residual_TH, out_TH


def embed_rms_norm_reference(
    token_T: Tensor, embed_VH: Tensor, weight_H: Tensor, eps: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The same in torch operations."""
    residual_TH = F.embedding(token_T, embed_VH).float()
    return residual_TH, rms_norm_reference(residual_TH, weight_H, eps, out_dtype)


def _room(shape: torch.Size, dtype: torch.dtype, device: torch.device, out_TH: Tensor | None) -> Tensor:
    if out_TH is None:
        return torch.empty(shape, dtype=dtype, device=device)
    if out_TH.shape != shape or out_TH.dtype != dtype or out_TH.stride(1) != 1:
        raise ValueError(f"out must be {dtype} [T, H], with rows of adjacent elements")
    return out_TH


def _check(x_TH: Tensor, weight_H: Tensor, dtype: torch.dtype = torch.float32) -> None:
    if x_TH.dim() != 2 or x_TH.dtype != dtype or x_TH.stride(1) != 1:
        raise ValueError("the residual must be float32 [T, H], with rows of adjacent elements")
    if weight_H.shape != x_TH.shape[1:] or weight_H.dtype != torch.float32 or weight_H.stride(0) != 1:
        raise ValueError("the weight must be float32 [H], adjacent")


def _launch(
    x_TH: Tensor, delta_TH: Tensor, sum_TH: Tensor, weight_H: Tensor, eps: float, out_TH: Tensor, mode: str,
    copy_TH: Tensor | None = None,
) -> None:
    tokens, hidden = out_TH.shape
    to_TH = out_TH if copy_TH is None else copy_TH
    if to_TH.shape != out_TH.shape or to_TH.stride(1) != 1:
        raise ValueError("copy must be [T, H], with rows of adjacent elements")
    if tokens == 0:
        return
    block = next_power_of_2(hidden)
    _norm_kernel[(tokens,)](
        x_TH,
        delta_TH,
        sum_TH,
        weight_H,
        out_TH,
        to_TH,
        eps,
        x_TH.stride(0),
        delta_TH.stride(0),
        sum_TH.stride(0),
        out_TH.stride(0),
        to_TH.stride(0),
        WIDTH=hidden,
        BLOCK=block,
        MODE=mode,
        COPIES=copy_TH is not None,
        **pdl_options(out_TH),
        num_warps=min(max(block // 512, 1), 16),
    )


@jit
def _norm_kernel(
    x: Arg,
    delta: Arg,
    total: Arg,
    weight: Arg,
    out: Arg,
    copy: Arg,
    eps: Arg,
    x_stride: Arg,
    delta_stride: Arg,
    total_stride: Arg,
    out_stride: Arg,
    copy_stride: Arg,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    MODE: tl.constexpr,
    COPIES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    scale = tl.load(weight + column, mask=inside, other=0.0)  # a constant: read before the wait
    # The weights of the product that follows may be on their way meanwhile. The embedding, a step's first
    # kernel, holds back: what follows it may count on all that came before the step's layers.
    pdl_begin(PDL, MODE != "embed")
    source = tl.load(delta + token * delta_stride).to(tl.int64) if MODE == "embed" else token
    value = tl.load(x + source * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if MODE == "add":
        value += tl.load(delta + token * delta_stride + column, mask=inside, other=0.0).to(tl.float32)
    if MODE != "plain":
        tl.store(total + token * total_stride + column, value, mask=inside)
    if COPIES:
        tl.store(copy + token * copy_stride + column, value.to(copy.dtype.element_ty), mask=inside)
    rstd = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
    tl.store(out + token * out_stride + column, (value * rstd * scale).to(out.dtype.element_ty), mask=inside)
