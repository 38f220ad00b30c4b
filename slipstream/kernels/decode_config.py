"""How decode attention cuts its work, and its scratch memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.kernels.attention_common import MIN_ROWS, LayerAttention
from slipstream.kernels.backend import next_power_of_2


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """splits: most pieces of a lane's keys; tile: keys of one loop step; min_tiles: least piece, in tiles.
    ordered: the longest lanes start first, for more programs than run at once. early: the successor may start
    at once, so that a product reads its weights while attention, and what is before it, still runs."""

    splits: int
    tile: int
    warps: int
    stages: int
    min_tiles: int = 1
    ordered: bool = False
    early: bool = False


def choose_decode(lanes: int, shape: LayerAttention, dtype: torch.dtype) -> DecodeConfig:
    """By sweeps on an H200 at head size 128 and contexts of 384 to 12,000 tokens, alone (tests/gpu/
    time_attention.py) and between products (time_chain.py): few lanes want many pieces, many lanes small
    programs."""
    programs = lanes * shape.num_kv_heads
    # Tiles of 8 KiB, so that every choice below fits in shared memory.
    tile = max(MIN_ROWS, min(32, 8192 // (next_power_of_2(shape.head_dim) * dtype.itemsize)))
    if programs <= 16:
        return DecodeConfig(splits=32, tile=tile, warps=1, stages=3, early=True)
    if programs <= 64:
        return DecodeConfig(splits=32, tile=tile, warps=1, stages=3, min_tiles=3, early=programs <= 32)
    if programs <= 256:
        return DecodeConfig(splits=8, tile=tile, warps=1, stages=3, min_tiles=3)
    if programs <= 1024:
        return DecodeConfig(splits=8, tile=tile, warps=1, stages=4, min_tiles=32)
    # With two stages ten programs share a multiprocessor, which small groups gain from.
    stages = 2 if shape.group <= 2 else 3
    return DecodeConfig(splits=4, tile=tile, warps=1, stages=stages, min_tiles=64, ordered=True)


class DecodeScratch:
    """Partial results of pieces, and counters of lanes: zero between launches (one stream). pieces: of all
    lanes together."""

    def __init__(self, lanes: int, shape: LayerAttention, pieces: int, device: torch.device) -> None:
        places = pieces * shape.num_heads
        self.acc = torch.empty(places * shape.head_dim, dtype=torch.float32, device=device)
        self.lse = torch.empty(places, dtype=torch.float32, device=device)
        self.counter = torch.zeros(lanes * shape.num_kv_heads, dtype=torch.int32, device=device)

    def holds(self, lanes: int, shape: LayerAttention, pieces: int) -> bool:
        """Whether there is room for these lanes in so many pieces altogether."""
        places = pieces * shape.num_heads
        room = places * shape.head_dim <= self.acc.shape[0] and places <= self.lse.shape[0]
        return room and lanes * shape.num_kv_heads <= self.counter.shape[0]
