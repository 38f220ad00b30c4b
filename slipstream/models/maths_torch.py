"""Decoder maths in torch operations: on a CPU, and on CUDA without Triton.

Legend: T tokens, M rows of a linear (T, or more where the linear layers want it), H hidden, N outputs, K
inputs, Y query and key heads together, D head size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from slipstream.attention.protocol import Attend
from slipstream.kernels.silu_and_mul import silu_and_mul_reference
from slipstream.layers.embedding import Embedding
from slipstream.layers.linear import Linear, LinearBackend
from slipstream.layers.norm import HeadNorm, NoHeadNorm, RMSNorm
from slipstream.layers.rotary import Rotary, Turn, rotate

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class TorchHeads:
    """One layer's heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm: HeadNorm | NoHeadNorm

    @property
    def num_bytes(self) -> int:
        return self.norm.num_bytes


class TorchMaths:
    """See Maths."""

    def __init__(self, linear: LinearBackend) -> None:
        self._linear = linear
        self.name, self.reason = linear.name, linear.reason
        self.activation_dtype, self.max_weight = linear.activation_dtype, linear.max_weight
        self.shares_weights = linear.name == "torch"

    def linear(self, weight_NK: Tensor, bias_N: Tensor | None) -> Linear:
        return self._linear.make(weight_NK, bias_N)

    def norm(self, weight_H: Tensor, eps: float) -> RMSNorm:
        return RMSNorm(weight_H, eps, self.activation_dtype)

    def heads(
        self, num_heads: int, num_kv_heads: int, head_dim: int, norm_YD: Tensor | None, eps: float,
        rotary: Rotary,
    ) -> TorchHeads:
        norm = NoHeadNorm() if norm_YD is None else HeadNorm(norm_YD, eps)
        return TorchHeads(num_heads, num_kv_heads, head_dim, norm)

    def open(
        self, embed: Embedding, rotary: Rotary, first_norm: RMSNorm, token_T: Tensor, position_T: Tensor
    ) -> TorchPass:
        return TorchPass(self._linear, embed(token_T), rotary.turn(position_T))

    def resume(self, rotary: Rotary, residual_TH: Tensor, position_T: Tensor) -> TorchPass:
        return TorchPass(self._linear, residual_TH, rotary.turn(position_T))

    def normed(self, norm: RMSNorm, x_TH: Tensor, out_TH: Tensor | None = None) -> Tensor:
        normed_TH = norm(x_TH.float())
        return normed_TH if out_TH is None else out_TH.copy_(normed_TH)

    def embedded(self, norm: RMSNorm, embed: Embedding, token_T: Tensor, out_TH: Tensor) -> Tensor:
        return self.normed(norm, embed(token_T), out_TH)

    def logits(self, head: Linear, hidden_NH: Tensor) -> Tensor:
        count = len(hidden_NH)
        return head(_padded(hidden_NH, self._linear.even_rows(count)))[:count].float()


class TorchPass:
    """See Pass. Rows are padded to the count at which results do not depend on the batch."""

    def __init__(self, linear: LinearBackend, residual_TH: Tensor, turn: Turn) -> None:
        self._linear, self._tokens = linear, len(residual_TH)
        self._rows = linear.even_rows(self._tokens)
        self._residual_MH = _padded(residual_TH, self._rows)
        self._turn = turn

    def project(self, norm: RMSNorm, linear: Linear) -> Tensor:
        return linear(norm(self._residual_MH))[: self._tokens]

    def project_gated(self, norm: RMSNorm, linear: Linear) -> Tensor:
        return silu_and_mul_reference(linear(norm(self._residual_MH)))

    def mix(self, layer: int, heads: TorchHeads, qkv_TN: Tensor, attend: Attend) -> Tensor:
        qkv_TXD = qkv_TN.view(self._tokens, -1, heads.head_dim)
        turning = heads.num_heads + heads.num_kv_heads
        qk_TYD = rotate(heads.norm(qkv_TXD[:, :turning]), self._turn)
        query, key = qk_TYD[:, : heads.num_heads], qk_TYD[:, heads.num_heads :]
        return _padded(attend(layer, query, key, qkv_TXD[:, turning:]).flatten(1), self._rows)

    def keep(self, row_L: Tensor, mixed_TN: Tensor) -> Tensor:
        self._tokens, self._rows = len(row_L), self._linear.even_rows(len(row_L))
        self._residual_MH = _padded(self._residual_MH[row_L], self._rows)
        return _padded(mixed_TN[row_L], self._rows)

    def add(self, linear: Linear, x_TK: Tensor, norm: RMSNorm | None = None) -> None:
        self._residual_MH.add_(linear(x_TK))

    def residual(self) -> Tensor:
        return self._residual_MH[: self._tokens]

    def save(self, out_TH: Tensor) -> None:
        out_TH.copy_(self.residual())

    def finish(self, norm: RMSNorm) -> Tensor:
        return norm(self._residual_MH)[: self._tokens]


def _padded(x_TH: Tensor, rows: int) -> Tensor:
    """Zero rows below x, where the linear layers want them."""
    return x_TH if rows == len(x_TH) else F.pad(x_TH, (0, 0, 0, rows - len(x_TH)))
