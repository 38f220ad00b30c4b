"""How decode attention cuts its work, and its scratch memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.kernels.attention_common import MIN_ROWS, LayerAttention
from slipstream.kernels.backend import next_power_of_2


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """splits: most pieces of a lane's keys; tile: keys of one loop step; min_tiles: least piece, in tiles.
    programs: about how many pieces all lanes have together at most, since more than run at once wait and each
    costs its merge; 0 for any number. ordered: the longest lanes start first, for more programs than run at
    once. early: the successor may start at once, so that a product reads its weights while attention, and
    what is before it, still runs."""

    splits: int
    tile: int
    warps: int
    stages: int
    min_tiles: int = 1
    programs: int = 0
    ordered: bool = False
    early: bool = False


# Up to so many lanes times KV heads: splits, stages, min_tiles, programs, early.
FEW_PROGRAMS = (
    (8, 32, 3, 1, 0, True),
    (32, 16, 4, 3, 512, True),
    (64, 16, 3, 6, 768, False),
    (128, 16, 3, 6, 768, True),
    (256, 16, 3, 16, 0, False),
    (512, 8, 4, 24, 0, False),
)


def choose_decode(lanes: int, shape: LayerAttention, dtype: torch.dtype) -> DecodeConfig:
    """By sweeps on an H200 at head size 128, alone (tests/gpu/time_attention.py) and between products
    (time_chain.py), over lanes of 384, 4,000, 12,000 and 100 to 2,000 tokens, and one of 12,000 among short
    ones: pieces are for lanes that would keep the others waiting."""
    work = lanes * shape.num_kv_heads
    # Tiles of 8 KiB, so that every choice below fits in shared memory.
    tile = max(MIN_ROWS, min(32, 8192 // (next_power_of_2(shape.head_dim) * dtype.itemsize)))
    for most, splits, stages, min_tiles, programs, early in FEW_PROGRAMS:
        if work <= most:
            return DecodeConfig(splits, tile, 1, stages, min_tiles, programs, early=early)
    if work <= 1024:
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
