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


# Most programs of one piece a lane, and what they take: splits, stages, min_tiles, early.
FEW_PROGRAMS = (
    (16, 32, 3, 1, True),
    (32, 32, 3, 3, True),
    (64, 16, 3, 6, False),
    (128, 16, 3, 6, True),
    (256, 16, 3, 16, False),
    (512, 8, 4, 16, False),
)


def choose_decode(lanes: int, shape: LayerAttention, dtype: torch.dtype) -> DecodeConfig:
    """By sweeps on an H200 at head size 128, alone (tests/gpu/time_attention.py) and between products
    (time_chain.py), over equal lanes, lanes of 100 to 2,000 tokens and one of 12,000 among short ones: pieces
    are for lanes that would keep the others waiting, and each costs its merge."""
    programs = lanes * shape.num_kv_heads
    # Tiles of 8 KiB, so that every choice below fits in shared memory.
    tile = max(MIN_ROWS, min(32, 8192 // (next_power_of_2(shape.head_dim) * dtype.itemsize)))
    for most, splits, stages, min_tiles, early in FEW_PROGRAMS:
        if programs <= most:
            return DecodeConfig(splits, tile, 1, stages, min_tiles, early=early)
    if programs <= 1024:
        return DecodeConfig(8, tile, 1, 3, 32, ordered=True)
    # With two stages ten programs share a multiprocessor, which small groups gain from.
    return DecodeConfig(4, tile, 1, 2 if shape.group <= 2 else 3, 64, ordered=True)


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
