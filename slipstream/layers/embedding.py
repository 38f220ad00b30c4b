"""Token embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


class Embedding:
    """weight_VH in the model's dtype. Rows come out as float32: they start the residual, which is kept in
    float32."""

    def __init__(self, weight_VH: Tensor) -> None:
        self.weight_VH = weight_VH
        self.num_bytes = weight_VH.nbytes

    def __call__(self, tokens_T: Tensor) -> Tensor:
        """tokens_T: integer ids below V. Returns a new float32 [T, H]."""
        return F.embedding(tokens_T, self.weight_VH).float()
