"""Scales of a float8 KV cache, as calibrated checkpoints store them: one number for K and one for V, a layer.

A pool holds K / k_scale and V / v_scale. A checkpoint without scales is served with 1.0.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch

from slipstream.loading.gguf_file import is_gguf
from slipstream.loading.sources import SafetensorsSource

KvScales = tuple[tuple[float, float], ...]

# Where they are: beside the projection's weight, or of the attention as a whole.
PLACES = (
    "model.layers.{layer}.self_attn.{kind}_scale",
    "model.layers.{layer}.self_attn.{kind}_proj.{kind}_scale",
)
SUFFIXES = (".k_scale", ".v_scale")


def read_kv_scales(path: str | Path, num_layers: int) -> KvScales:
    """(k_scale, v_scale) of each layer; empty where the checkpoint has none. Raises ValueError that names a
    scale which is missing, or no positive number."""
    path = Path(path).expanduser()
    if path.is_file() and is_gguf(path):
        return ()
    source = SafetensorsSource(path, torch.device("cpu"))
    try:
        if not any(name.endswith(SUFFIXES) for name in source.shapes):
            return ()
        layers = range(num_layers)
        return tuple((_scale(source, path, i, "k"), _scale(source, path, i, "v")) for i in layers)
    finally:
        source.close()


def _scale(source: SafetensorsSource, path: Path, layer: int, kind: str) -> float:
    names = [place.format(layer=layer, kind=kind) for place in PLACES]
    found = [name for name in names if name in source.shapes]
    if not found:
        raise ValueError(f"{path}: it has scales of a float8 KV cache, but not {names[0]}")
    values = source.get(found[0]).float().flatten()
    if len(values) != 1 or not (math.isfinite(value := float(values[0])) and value > 0):
        raise ValueError(f"{path}: {found[0]} must be one positive number")
    return value
