"""Decoder maths on kernels that merge what lies between the matrix products.

Legend: T tokens, H hidden, N outputs, K inputs, Y query and key heads together, D head size, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from slipstream.attention.protocol import AttendQkv, HeadPrep
from slipstream.kernels.rms_norm import add_rms_norm, embed_rms_norm, rms_norm
from slipstream.kernels.silu_and_mul import silu_and_mul
from slipstream.layers.embedding import Embedding
from slipstream.layers.rotary import Rotary

Tensor = torch.Tensor


class FusedNorm:
    """RMSNorm's numbers, in float32."""

    def __init__(self, weight_H: Tensor, eps: float) -> None:
        self.weight_H, self.eps = weight_H.float(), eps
        self.num_bytes = self.weight_H.nbytes


class FusedLinear:
    """y = x W^T + b, the weights as they are stored."""

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None) -> None:
        self.weight_NK, self.bias_N = weight_NK, bias_N
        self.num_bytes = weight_NK.nbytes + (0 if bias_N is None else bias_N.nbytes)

    def __call__(self, x_MK: Tensor) -> Tensor:
        return F.linear(x_MK, self.weight_NK, self.bias_N)


@dataclass(frozen=True, slots=True)
class FusedHeads:
    """One layer's heads."""

    head_dim: int
    prep: HeadPrep

    @property
    def num_bytes(self) -> int:
        # The rotary table is counted once, by itself.
        return 0 if self.prep.norm_YD is None else self.prep.norm_YD.nbytes


class FusedMaths:
    """See Maths."""

    name = "fused"
    max_weight = math.inf
    shares_weights = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.activation_dtype = dtype
        self.reason = "cuBLAS, and Triton for what lies between the products"

    def linear(self, weight_NK: Tensor, bias_N: Tensor | None) -> FusedLinear:
        return FusedLinear(weight_NK, bias_N)

    def norm(self, weight_H: Tensor, eps: float) -> FusedNorm:
        return FusedNorm(weight_H, eps)

    def heads(
        self, num_heads: int, num_kv_heads: int, head_dim: int, norm_YD: Tensor | None, eps: float,
        rotary: Rotary,
    ) -> FusedHeads:
        norm_YD = None if norm_YD is None else norm_YD.float()
        return FusedHeads(head_dim, HeadPrep(rotary.table_P2D, norm_YD, eps))

    def open(
        self, embed: Embedding, rotary: Rotary, first_norm: FusedNorm, token_T: Tensor, position_T: Tensor
    ) -> FusedPass:
        return FusedPass(embed, first_norm, token_T, self.activation_dtype)

    def logits(self, head: FusedLinear, hidden_NH: Tensor) -> Tensor:
        return head(hidden_NH)


class FusedPass:
    """See Pass. What a product adds to the residual waits for the norm that follows: one kernel does both."""

    def __init__(
        self, embed: Embedding, first_norm: FusedNorm, token_T: Tensor, dtype: torch.dtype
    ) -> None:
        self._dtype = dtype
        self._residual_TH, first_TH = embed_rms_norm(
            token_T, embed.weight_VH, first_norm.weight_H, first_norm.eps, dtype
        )
        self._ready_TH: Tensor | None = first_TH  # the embedding's kernel has normed already
        self._delta_TH: Tensor | None = None

    def _normed(self, norm: FusedNorm) -> Tensor:
        ready_TH, self._ready_TH = self._ready_TH, None
        if ready_TH is not None:
            return ready_TH
        delta_TH, self._delta_TH = self._delta_TH, None
        if delta_TH is None:
            return rms_norm(self._residual_TH, norm.weight_H, norm.eps, self._dtype)
        return add_rms_norm(self._residual_TH, delta_TH, norm.weight_H, norm.eps, self._dtype)

    def project(self, norm: FusedNorm, linear: FusedLinear) -> Tensor:
        return linear(self._normed(norm))

    def project_gated(self, norm: FusedNorm, linear: FusedLinear) -> Tensor:
        return silu_and_mul(linear(self._normed(norm)))

    def mix(self, layer: int, heads: FusedHeads, qkv_TN: Tensor, attend: AttendQkv) -> Tensor:
        qkv_TXD = qkv_TN.view(len(qkv_TN), -1, heads.head_dim)
        return attend.from_qkv(layer, qkv_TXD, heads.prep).flatten(1)

    def add(self, linear: FusedLinear, x_TK: Tensor) -> None:
        self._delta_TH = linear(x_TK)

    def finish(self, norm: FusedNorm) -> Tensor:
        return self._normed(norm)
