"""A model whose forward pass torch.compile has compiled, for --compilation-config's stock_torch_compile.

The pass becomes one graph for a single token and one for any more. Their count is all that the compiler may
not know: with sizes of weights left open too, it would look at 28 layers for minutes. Attention stays what it
is: an operation that the compiler does not look into. It has to be found by the operation alone, so the
step's attend is kept here while forward runs: one engine's thread, one step at a time.

Legend: T tokens, H query heads, G KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from slipstream.attention.protocol import Attend, LayerAttention
from slipstream.kernels.precompile import is_listing
from slipstream.models.base import Model

Tensor = torch.Tensor

_now: list[Attend] = []


@torch.library.custom_op("slipstream::attend", mutates_args=())
def _attend(layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
    return _now[-1](layer, q_THD, k_TGD, v_TGD)


@_attend.register_fake
def _(layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
    return q_THD.new_empty(q_THD.shape)


class CompiledModel:
    """See Model. backend: torch.compile's."""

    def __init__(self, model: Model, backend: str | Callable[..., Any] = "inductor") -> None:
        self._model = model
        self._forward: Any = torch.compile(model.forward_aux, fullgraph=True, backend=backend)
        self.attention: tuple[LayerAttention, ...] = model.attention
        self.embed = model.embed
        self.activation_dtype = model.activation_dtype
        self.num_bytes = model.num_bytes
        self.linear_name = f"{model.linear_name}, compiled"
        self.linear_reason = f"{model.linear_reason}; torch.compile was asked for"

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        return self.forward_aux(tokens_T, positions_T, attend, ())[0]

    def forward_aux(
        self, tokens_T: Tensor, positions_T: Tensor, attend: Attend, aux_layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        if len(tokens_T) > 1:
            for each_T in (tokens_T, positions_T):
                torch._dynamo.mark_dynamic(each_T, 0)
        _now.append(attend)
        try:
            found: tuple[Tensor, Tensor | None] = self._forward(tokens_T, positions_T, _attend, aux_layers)
        finally:
            _now.pop()
        return found

    def of_each_kind(self) -> Model:
        """All of it: the compiler makes the pass when that first runs. Not while launches are listed: what it
        has made launches kernels that are none of ours."""
        return self._model.of_each_kind() if is_listing() else self

    def logits(self, hidden_NH: Tensor) -> Tensor:
        return self._model.logits(hidden_NH)
