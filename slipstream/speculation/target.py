"""What drafters with weights are made for, and how their weights get their place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from slipstream.config.model import ModelSpec
from slipstream.layers.embedding import Embedding
from slipstream.loading.drafter_files import DrafterFiles
from slipstream.loading.load import as_weight, with_maths
from slipstream.models.base import Model
from slipstream.models.maths import Maths

Tensor = torch.Tensor
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """model: the one that verifies. max_model_len: positions of a row at most. num_drafts: K. dtype: of the
    weights. The rest are load_model's."""

    model: Model
    spec: ModelSpec
    max_model_len: int
    num_drafts: int
    dtype: torch.dtype
    device: torch.device
    fused: bool = False
    batch_invariant: bool = False
    load_format: str = "auto"
    seed: int = 0

    @property
    def num_layers(self) -> int:
        """The number that the drafter's first attention layer has."""
        return len(self.model.attention)

    def build(self, make: Callable[[Maths], T]) -> T:
        """make(maths), in the maths that the target would use too."""
        with torch.inference_mode():
            return with_maths(
                make, self.dtype, self.device, fused=self.fused, batch_invariant=self.batch_invariant
            )


class Weights:
    """Tensors of a drafter's files on the target's device, counted."""

    def __init__(self, files: DrafterFiles, target: Target, maths: Maths) -> None:
        self.files, self._target, self.maths = files, target, maths

    def __call__(self, name: str, *shape: int) -> Tensor:
        target = self._target
        return as_weight(name, self.files.get(name, shape), target.dtype, target.device, self.maths)

    def embed(self, hidden: int) -> tuple[Embedding, int]:
        """The drafter's own token embedding and its bytes; the target's and none where it has the same, or
        none."""
        shared, name = self._target.model.embed, "embed_tokens.weight"
        shape = (self._target.spec.vocab_size, hidden)
        if name in self.files:
            own = Embedding(self(name, *shape))
            equal = own.weight_VH.shape == shared.weight_VH.shape
            if not (equal and torch.equal(own.weight_VH, shared.weight_VH)):
                return own, own.num_bytes
        elif shared.weight_VH.shape != shape:
            width = shared.weight_VH.shape[1]
            raise ValueError(
                f"{self.files.folder}: embed_tokens.weight is missing, and the model's has {width} columns, "
                f"not {hidden}"
            )
        return shared, 0

    def ids(self, values: Tensor, name: str) -> Tensor:
        """The target's ids of a drafter's tokens, int32 on the device."""
        return self.files.ids(values, name, self._target.spec.vocab_size, self._target.device)
