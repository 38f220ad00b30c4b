"""How decode attention cuts its work, and its scratch memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.kernels.attention_common import MIN_ROWS, LayerAttention
from slipstream.kernels.backend import next_power_of_2, num_multiprocessors


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """tile: keys of one loop step; min_tiles: least piece of a lane's keys, in tiles.

    per_sm 0: a program for each lane, KV head and piece, at most `splits` pieces a lane. Else a persistent
    grid of per_sm programs a multiprocessor, which share all tiles evenly (see decode_work); splits is then
    how many partial results are merged at a time. ordered: of the first form, the longest lanes start first,
    for more programs than run at once.
    """

    splits: int
    tile: int
    warps: int
    stages: int
    min_tiles: int = 1
    per_sm: int = 0
    ordered: bool = False

    def shares(self, num_kv_heads: int, device: torch.device) -> int:
        """Programs of each KV head in the persistent form."""
        return max(1, num_multiprocessors(device) * self.per_sm // num_kv_heads)

    def pieces(self, lanes: int, num_kv_heads: int, device: torch.device) -> int:
        """Most pieces of a KV head over all lanes."""
        return lanes + self.shares(num_kv_heads, device) if self.per_sm else lanes * self.splits


def choose_decode(lanes: int, shape: LayerAttention, dtype: torch.dtype) -> DecodeConfig:
    """By a sweep on an H200 at head size 128 and contexts of 384 to 12,000 tokens (tests/gpu/
    time_attention.py): few lanes want many pieces, some lanes even shares, many lanes small programs."""
    programs = lanes * shape.num_kv_heads
    # Tiles of 8 KiB, so that every choice below fits in shared memory.
    tile = max(MIN_ROWS, min(32, 8192 // (next_power_of_2(shape.head_dim) * dtype.itemsize)))
    if programs <= 16:
        return DecodeConfig(splits=32, tile=MIN_ROWS, warps=1, stages=3)
    if programs <= 256:
        return DecodeConfig(splits=8, tile=tile, warps=1, stages=3, per_sm=6)
    if programs <= 1024:
        return DecodeConfig(splits=8, tile=tile, warps=1, stages=4, min_tiles=32)
    # With two stages ten programs share a multiprocessor, which small groups gain from.
    stages = 2 if shape.group <= 2 else 3
    return DecodeConfig(splits=4, tile=tile, warps=1, stages=stages, min_tiles=64, ordered=True)


class DecodeScratch:
    """Partial results of pieces, and counters of lanes: zero between launches (one stream). splits: pieces
    a lane in the mean; a launch may give some lanes more and others fewer."""

    def __init__(self, lanes: int, shape: LayerAttention, splits: int, device: torch.device) -> None:
        places = lanes * shape.num_heads * splits
        self.acc = torch.empty(places * shape.head_dim, dtype=torch.float32, device=device)
        self.lse = torch.empty(places, dtype=torch.float32, device=device)
        self.counter = torch.zeros(lanes * shape.num_kv_heads, dtype=torch.int32, device=device)

    def holds(self, lanes: int, shape: LayerAttention, pieces: int) -> bool:
        """Whether there is room for these lanes in so many pieces altogether."""
        places = pieces * shape.num_heads
        room = places * shape.head_dim <= self.acc.shape[0] and places <= self.lse.shape[0]
        return room and lanes * shape.num_kv_heads <= self.counter.shape[0]
