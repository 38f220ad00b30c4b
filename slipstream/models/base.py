"""What a model is to the runner and the loader.

Legend: T tokens of the step, N tokens whose logits are wanted, H hidden size, A auxiliary layers, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from slipstream.attention.protocol import Attend, LayerAttention
from slipstream.config.model import ModelSpec
from slipstream.layers.embedding import Embedding
from slipstream.models.maths import Maths

Tensor = torch.Tensor
Weight = Callable[[str], Tensor]


class Model(Protocol):
    """attention: one entry a layer. embed: of its tokens; drafters may share it. activation_dtype: of q, k, v
    and the hidden states. num_bytes: weights and tables. linear_name, linear_reason: how its linear layers
    run and why, for the plan."""

    attention: tuple[LayerAttention, ...]
    embed: Embedding
    activation_dtype: torch.dtype
    num_bytes: int
    linear_name: str
    linear_reason: str

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """tokens_T, positions_T: int64 [T]; positions are below spec.max_model_len. Returns the normalised
        hidden states [T, H] in activation_dtype. Each row depends on its own token, position and what attend
        returns."""
        ...

    def forward_aux(
        self, tokens_T: Tensor, positions_T: Tensor, attend: Attend, aux_layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """forward's result, and the residual streams that go into these layers (the count of layers: that
        comes out of the last), side by side [T, A * H] in activation_dtype; None for no layers."""
        ...

    def of_each_kind(self) -> Model:
        """The same model with few layers, some of each kind: it runs the same kernels, and means nothing."""
        ...

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """[N, V], float32, or the weights' type where the sampler reads that (see Maths.logits)."""
        ...


class ModelClass(Protocol):
    """How the loader makes a model."""

    def __call__(self, spec: ModelSpec, weight: Weight, maths: Maths, device: torch.device) -> Model:
        """weight(name) gives a tensor in the model's dtype on device; every name of weight_shapes is asked
        for once."""
        ...

    def weight_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Names as Hugging Face stores them, and shapes, in the order in which the model asks for them."""
        ...
