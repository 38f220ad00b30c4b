"""Decoder maths on kernels that merge what lies between the matrix products.

Where it measures better (kernels/linear.py), a product takes the gate or the sum after it into its own
kernel, and two such products share the norm between them. Other products are cuBLAS's; the sum and the norm
that follows are then one kernel. Which it is depends on a product's shape alone.

Legend: T tokens, H hidden, N outputs, K inputs, Y query and key heads together, D head size, V vocabulary.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import get_args

import torch
import torch.nn.functional as F

from slipstream.attention.protocol import AttendQkv, HeadPrep
from slipstream.kernels.linear import (
    MOST_ROWS,
    LinearConfig,
    LinearScratch,
    Norm,
    Op,
    Scaled,
    add_linear,
    choose_linear_config,
    gated_linear,
    linear,
    scratch_size,
    shares_norm,
)
from slipstream.kernels.rms_norm import add_rms_norm, embed_rms_norm, rms_norm
from slipstream.kernels.silu_and_mul import silu_and_mul
from slipstream.layers.embedding import Embedding
from slipstream.layers.rotary import Rotary

Tensor = torch.Tensor


class FusedNorm:
    """RMSNorm's numbers, in float32."""

    def __init__(self, weight_H: Tensor, eps: float) -> None:
        self.norm = Norm(weight_H.float(), eps)
        self.num_bytes = self.norm.weight_K.nbytes


class FusedLinear:
    """y = x W^T + b, the weights as they are stored. scratch: for sums that several programs share."""

    def __init__(
        self, weight_NK: Tensor, bias_N: Tensor | None, scratch: LinearScratch, invariant: bool
    ) -> None:
        self.weight_NK, self.bias_N, self.scratch = weight_NK, bias_N, scratch
        self.num_bytes = weight_NK.nbytes + (0 if bias_N is None else bias_N.nbytes)
        self._invariant = invariant

    def config(self, op: Op, rows: int) -> LinearConfig | None:
        """None: cuBLAS."""
        outputs, inputs = self.weight_NK.shape
        return choose_linear_config(op, rows, outputs, inputs, self.weight_NK.dtype, self._invariant)

    def by_cublas(self, x_MK: Tensor) -> Tensor:
        """y, whatever would be chosen."""
        return F.linear(x_MK, self.weight_NK, self.bias_N)

    def shares(self, rows: int, config: LinearConfig) -> bool:
        """Whether a sum also does its part of the norm that follows."""
        outputs, inputs = self.weight_NK.shape
        return not self._invariant and shares_norm(rows, outputs, inputs, config)

    def __call__(self, x_MK: Tensor) -> Tensor:
        config = self.config("plain", len(x_MK))
        if config is None:
            return self.by_cublas(x_MK)
        return linear(x_MK, self.weight_NK, self.bias_N, config, scratch=self.scratch)


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
    """See Maths. invariant: a row's result is the same, bit for bit, alone and in any batch."""

    name = "fused"
    max_weight = math.inf
    shares_weights = True

    def __init__(self, dtype: torch.dtype, device: torch.device, invariant: bool) -> None:
        self.activation_dtype = dtype
        self._invariant = invariant
        self._scratch = LinearScratch(0, 0, device)
        self.reason = "Triton tiles that add up in one order, for any batch" if invariant else (
            "cuBLAS, and Triton for few rows and for what lies between the products"
        )

    def linear(self, weight_NK: Tensor, bias_N: Tensor | None) -> FusedLinear:
        outputs, inputs = weight_NK.shape
        sums, tiles = _most_scratch(outputs, inputs, weight_NK.dtype, self._invariant)
        if sums > len(self._scratch.partial) or tiles > len(self._scratch.counter):
            self._scratch = LinearScratch(sums, tiles, weight_NK.device)
        return FusedLinear(weight_NK, bias_N, self._scratch, self._invariant)

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
        norm, dtype = first_norm.norm, self.activation_dtype
        residual_TH, first_TH = embed_rms_norm(token_T, embed.weight_VH, norm.weight_K, norm.eps, dtype)
        return FusedPass(residual_TH, dtype, first_TH)

    def resume(self, rotary: Rotary, residual_TH: Tensor, position_T: Tensor) -> FusedPass:
        return FusedPass(residual_TH, self.activation_dtype)

    def normed(self, norm: FusedNorm, x_TH: Tensor, out_TH: Tensor | None = None) -> Tensor:
        return rms_norm(x_TH, norm.norm.weight_K, norm.norm.eps, self.activation_dtype, out_TH)

    def embedded(self, norm: FusedNorm, embed: Embedding, token_T: Tensor, out_TH: Tensor) -> Tensor:
        weight_K, eps, dtype = norm.norm.weight_K, norm.norm.eps, self.activation_dtype
        return embed_rms_norm(token_T, embed.weight_VH, weight_K, eps, dtype, out_TH)[1]

    def logits(self, head: FusedLinear, hidden_NH: Tensor) -> Tensor:
        return head(hidden_NH)


@functools.cache
def _most_scratch(outputs: int, inputs: int, dtype: torch.dtype, invariant: bool) -> tuple[int, int]:
    """Sums and tiles that any product with such a weight needs."""
    sums = tiles = 0
    every = range(1, MOST_ROWS + 1)  # products of more rows are never split
    for op, rows in itertools.product(get_args(Op), every):
        config = choose_linear_config(op, rows, outputs, inputs, dtype, invariant)
        if config is not None:
            needed = scratch_size(rows, outputs, config)
            sums, tiles = max(sums, needed[0]), max(tiles, needed[1])
    return sums, tiles


class FusedPass:
    """See Pass. What cuBLAS adds to the residual waits for the norm that follows."""

    def __init__(self, residual_TH: Tensor, dtype: torch.dtype, ready_TH: Tensor | None = None) -> None:
        self._residual_TH, self._dtype = residual_TH, dtype
        self._ready_TH = ready_TH  # the embedding's kernel has normed already
        self._delta_TH: Tensor | None = None
        self._scaled: Scaled | None = None
        self._copy_TH: Tensor | None = None

    def _normed(self, norm: Norm) -> Tensor:
        ready_TH, self._ready_TH, self._scaled = self._ready_TH, None, None
        if ready_TH is not None:
            return ready_TH
        delta_TH, self._delta_TH = self._delta_TH, None
        weight_K, eps, copy_TH, self._copy_TH = norm.weight_K, norm.eps, self._copy_TH, None
        if delta_TH is None:
            return rms_norm(self._residual_TH, weight_K, eps, self._dtype, copy_TH=copy_TH)
        return add_rms_norm(self._residual_TH, delta_TH, weight_K, eps, self._dtype, copy_TH)

    def _input(self, norm: Norm) -> Tensor | Scaled:
        """What a product takes that can finish a norm."""
        scaled, self._scaled = self._scaled, None
        return self._normed(norm) if scaled is None or scaled.norm is not norm else scaled

    def project(self, norm: FusedNorm, linear_: FusedLinear) -> Tensor:
        config = linear_.config("plain", len(self._residual_TH))
        if config is None:
            return linear_.by_cublas(self._normed(norm.norm))
        return linear(self._input(norm.norm), linear_.weight_NK, linear_.bias_N, config, linear_.scratch)

    def project_gated(self, norm: FusedNorm, linear_: FusedLinear) -> Tensor:
        config = linear_.config("gated", len(self._residual_TH))
        if config is None:
            return silu_and_mul(linear_.by_cublas(self._normed(norm.norm)))
        x_TK = self._input(norm.norm)
        return gated_linear(x_TK, linear_.weight_NK, linear_.bias_N, config, linear_.scratch)

    def mix(self, layer: int, heads: FusedHeads, qkv_TN: Tensor, attend: AttendQkv) -> Tensor:
        qkv_TXD = qkv_TN.view(len(qkv_TN), -1, heads.head_dim)
        return attend.from_qkv(layer, qkv_TXD, heads.prep).flatten(1)

    def keep(self, row_L: Tensor, mixed_TN: Tensor) -> Tensor:
        # Not by index_select(): its kernel for few rows is slow.
        self._residual_TH = self.residual()[row_L]
        return mixed_TN[row_L]

    def add(self, linear_: FusedLinear, x_TK: Tensor, norm: FusedNorm | None = None) -> None:
        config = linear_.config("add", len(x_TK))
        if config is None:
            self._delta_TH = linear_.by_cublas(x_TK)
        else:
            self._scaled = add_linear(
                x_TK, linear_.weight_NK, linear_.bias_N, self._residual_TH, config, linear_.scratch,
                norm.norm if norm is not None and linear_.shares(len(x_TK), config) else None,
            )

    def residual(self) -> Tensor:
        delta_TH, self._delta_TH = self._delta_TH, None
        return self._residual_TH if delta_TH is None else self._residual_TH.add_(delta_TH)

    def save(self, out_TH: Tensor) -> None:
        if self._copy_TH is None and self._ready_TH is None and self._scaled is None:
            self._copy_TH = out_TH  # the norm that comes next has a kernel
        else:
            out_TH.copy_(self.residual())

    def finish(self, norm: FusedNorm) -> Tensor:
        return self._normed(norm.norm)
