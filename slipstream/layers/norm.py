"""RMS normalisation (Zhang and Sennrich, 2019), computed in float32 whatever goes in and out."""

from __future__ import annotations

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


class RMSNorm:
    """x * weight / sqrt(mean(x^2) + eps) over the last axis. weight is kept in float32."""

    def __init__(self, weight: Tensor, eps: float, out_dtype: torch.dtype) -> None:
        self.weight = weight.float().contiguous()
        self.eps = eps
        self.out_dtype = out_dtype
        self.num_bytes = self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., width], any float type. Returns out_dtype."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(self.out_dtype)

    def add(self, residual: Tensor, delta: Tensor) -> Tensor:
        """Adds delta to the float32 residual in place and returns the normalised sum."""
        return self(residual.add_(delta))


class HeadNorm:
    """RMSNorm over each head of q and k at once; every head has its own weight row."""

    def __init__(self, weight_HD: Tensor, eps: float) -> None:
        self.weight_HD = weight_HD.float().contiguous()
        self.eps = eps
        self.num_bytes = self.weight_HD.nbytes

    def __call__(self, x_THD: Tensor) -> Tensor:
        normed = F.rms_norm(x_THD.float(), self.weight_HD.shape[-1:], None, self.eps)
        return normed.mul_(self.weight_HD).to(x_THD.dtype)


class NoHeadNorm:
    """For architectures that do not normalise q and k."""

    num_bytes = 0

    def __call__(self, x_THD: Tensor) -> Tensor:
        return x_THD
