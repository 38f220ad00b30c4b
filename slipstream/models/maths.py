"""How a decoder computes on a device: the parts it keeps, and what one step does with them.

Two ways: torch operations (maths_torch.py), and kernels that merge what lies between the matrix products
(maths_fused.py). A model is wired once and knows neither.

Legend: T tokens, H hidden, N outputs, K inputs, Y query and key heads together, D head size, V vocabulary.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from slipstream.layers.embedding import Embedding
from slipstream.layers.linear import Linear
from slipstream.layers.rotary import Rotary

Tensor = torch.Tensor


class Sized(Protocol):
    """A part that keeps weights."""

    @property
    def num_bytes(self) -> int: ...


class Pass(Protocol):
    """One step through the layers. Owns the residual, which is float32 throughout.

    norm and heads are what the Maths of the same kind made.
    """

    def project(self, norm: Any, linear: Any) -> Tensor:
        """linear(norm(residual)): [T, N]."""
        ...

    def project_gated(self, norm: Any, linear: Any) -> Tensor:
        """silu(gate) * up of linear(norm(residual)), whose rows are gate's, then up's: [T, N / 2]."""
        ...

    def mix(self, layer: int, heads: Any, qkv_TN: Tensor, attend: Any) -> Tensor:
        """Attention over the fused projection: [T, H D] of the query heads. attend: an Attend, or an
        AttendQkv where the maths need one."""
        ...

    def keep(self, row_L: Tensor, mixed_TN: Tensor) -> Tensor:
        """From now on there are these tokens (int64) alone, and nothing more is mixed. Returns theirs of what
        mix() gave."""
        ...

    def add(self, linear: Any, x_TK: Tensor, norm: Any | None = None) -> None:
        """residual += linear(x). norm: what the next project() will be given, if one follows at once."""
        ...

    def residual(self) -> Tensor:
        """The residual as it stands, float32 [T, H]; what follows changes it."""
        ...

    def save(self, out_TH: Tensor) -> None:
        """The residual as it stands goes to out, at the next norm at the latest."""
        ...

    def finish(self, norm: Any) -> Tensor:
        """norm(residual): [T, H]."""
        ...


class Maths(Protocol):
    """Makes a model's parts. name, reason: for the plan. max_weight: the largest magnitude a weight may have.
    shares_weights: a linear layer keeps the tensor it is given."""

    name: str
    reason: str
    activation_dtype: torch.dtype
    max_weight: float
    shares_weights: bool

    def linear(self, weight_NK: Tensor, bias_N: Tensor | None) -> Linear: ...

    def norm(self, weight_H: Tensor, eps: float) -> Sized: ...

    def heads(
        self, num_heads: int, num_kv_heads: int, head_dim: int, norm_YD: Tensor | None, eps: float,
        rotary: Rotary,
    ) -> Sized:
        """What happens to q and k before attention. norm_YD: weights of their norm, a row a head."""
        ...

    def open(
        self, embed: Embedding, rotary: Rotary, first_norm: Any, token_T: Tensor, position_T: Tensor
    ) -> Pass:
        """token_T: int32 or int64; position_T: int64. first_norm: what the first project() will be given."""
        ...

    def resume(self, rotary: Rotary, residual_TH: Tensor, position_T: Tensor) -> Pass:
        """A pass whose residual begins elsewhere than with tokens: float32 [T, H], adjacent, which it
        owns."""
        ...

    def normed(self, norm: Any, x_TH: Tensor, out_TH: Tensor | None = None) -> Tensor:
        """norm(x), for what is no residual: any float type in, activation_dtype out (into out, if given)."""
        ...

    def embedded(self, norm: Any, embed: Embedding, token_T: Tensor, out_TH: Tensor) -> Tensor:
        """norm(embed(token)) into out, of activation_dtype. token_T: int32 or int64."""
        ...

    def logits(self, head: Any, hidden_NH: Tensor) -> Tensor:
        """[N, V] in float32, or in the weights' type where the sampler reads that."""
        ...
