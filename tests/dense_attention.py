"""Attention written out in full: the reference that models are tested with, one sequence, keys kept in a
list."""

from __future__ import annotations

import torch

from slipstream.attention.protocol import LayerAttention

Tensor = torch.Tensor


class DenseAttend:
    """Causal attention of one growing sequence; every call appends a layer's keys and values."""

    def __init__(self, layers: tuple[LayerAttention, ...]) -> None:
        self.layers = layers
        self.keys: list[list[Tensor]] = [[] for _ in layers]
        self.values: list[list[Tensor]] = [[] for _ in layers]

    def __call__(self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        shape = self.layers[layer]
        assert q_THD.shape[1:] == (shape.num_heads, shape.head_dim)
        assert k_TGD.shape == v_TGD.shape == (len(q_THD), shape.num_kv_heads, shape.head_dim)
        self.keys[layer].append(k_TGD.float())
        self.values[layer].append(v_TGD.float())
        group = shape.num_heads // shape.num_kv_heads
        k_SHD = torch.cat(self.keys[layer]).repeat_interleave(group, 1)
        v_SHD = torch.cat(self.values[layer]).repeat_interleave(group, 1)
        scores = torch.einsum("thd,shd->hts", q_THD.float(), k_SHD) * shape.scale
        key, query = torch.arange(len(k_SHD)), torch.arange(len(k_SHD) - len(q_THD), len(k_SHD))[:, None]
        seen = key <= query
        if shape.window is not None:
            seen &= key > query - shape.window
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return torch.einsum("hts,shd->thd", weights, v_SHD).to(q_THD.dtype)
