"""RMS normalisation (Zhang and Sennrich, 2019), computed in float32 whatever goes in and out.

x / sqrt(mean(x^2) + eps) * weight is computed as x / sqrt(|x|^2 + n eps) * (sqrt(n) weight) for n values:
torch has one operation for |x|, where F.rms_norm makes a dozen on a CPU, and a decode step has two norms a
layer.
"""

from __future__ import annotations

import math

import torch

Tensor = torch.Tensor


class RMSNorm:
    """Over the last axis. weight: [n]; scaled and kept in float32."""

    def __init__(self, weight: Tensor, eps: float, out_dtype: torch.dtype) -> None:
        width = weight.shape[-1]
        self._weight = weight.float() * math.sqrt(width)
        self._eps = self._weight.new_tensor(width * eps)
        self._out_dtype = out_dtype
        self.num_bytes = self._weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """x: float32 [..., n]. Returns a new tensor of out_dtype."""
        return _scaled(x, self._eps).mul_(self._weight).to(self._out_dtype)


class HeadNorm:
    """RMSNorm over each head of q and k at once; every head has its own weight row."""

    def __init__(self, weight_HD: Tensor, eps: float) -> None:
        width = weight_HD.shape[-1]
        self._weight_HD = weight_HD.float() * math.sqrt(width)
        self._eps = self._weight_HD.new_tensor(width * eps)
        self.num_bytes = self._weight_HD.nbytes

    def __call__(self, x_THD: Tensor) -> Tensor:
        return _scaled(x_THD.float(), self._eps).mul_(self._weight_HD).to(x_THD.dtype)


class NoHeadNorm:
    """For architectures that do not normalise q and k."""

    num_bytes = 0

    def __call__(self, x_THD: Tensor) -> Tensor:
        return x_THD


def _scaled(x: Tensor, eps: Tensor) -> Tensor:
    """x / sqrt(|x|^2 + eps), a new tensor."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.addcmul(eps, length, length).rsqrt_()
