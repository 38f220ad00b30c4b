"""Configurations of the products in kernels/linear.py that are worth timing, by operation, rows and shape, in
the notation of kernels/linear_table.py. The likeliest come first."""

from __future__ import annotations

import torch

from slipstream.kernels.linear import LinearConfig, Op, choose_linear_config
from slipstream.kernels.linear_table import read_cut

BF16_BYTES = 2
SHARED_BYTES = 227 * 1024
# Weights of more elements stream: their bytes, not their kernels' latency, take the time.
STREAMS = 1 << 23


def candidates(op: Op, rows: int, outputs: int, inputs: int) -> list[LinearConfig]:
    """For bfloat16 weights. Last what is chosen now, where it is no other."""
    if outputs * inputs > STREAMS:
        cuts = streams(op, rows, outputs, inputs)
    else:
        cuts = small(op, rows, inputs // 1024)
    found = [config for cut in cuts.split() if fits(config := LinearConfig(**read_cut(cut)), inputs)]
    chosen = choose_linear_config(op, rows, outputs, inputs, torch.bfloat16)
    return list(dict.fromkeys([*found, *([chosen] if chosen else [])]))


def streams(op: Op, rows: int, outputs: int, inputs: int) -> str:
    cuts = ""
    if rows <= 4:
        r = 1 << (rows - 1).bit_length()
        cuts += f"v{r}x8x1024w4n4 v{r}x8x1024w4n3 v{r}x8x2048w8n2 v{r}x4x1024w4n7 s{r}x16x1024w4n1 "
        cuts += f"v{r}x8x512w2n8 v{r}x16x1024w8n2 v{r}x16x512w4n4 v{r}x4x512w2n14 v{r}x4x1024w4n4 "
        cuts += f"v{r}x4x2048w8n4 " if op == "add" else f"s{r}x8x1024w4n4 "
    if rows <= 16:
        r = 8 if rows <= 8 else 16
        cuts += f"d{r}x16x512w4n3 d{r}x32x256w4n3 d{r}x16x1024w8n2 d{r}x16x256w4n6 d{r}x32x512w8n2 "
        cuts += "d8x16x512w4n4 d8x8x512w4n7 d8x16x256w2n8 d8x32x256w2n4 " if rows <= 8 else ""
        if op == "add":
            cuts += f"d{r}x32x256/2w4n3 d{r}x16x512/2w4n3 d{r}x32x512/4w8n2 "
    if 8 <= rows <= 64:
        r = max(16, rows)
        cuts += f"t{r}x128x64w4n3h2 t{r}x64x64w4n3h3 t{r}x64x64w4n4h4 t{r}x64x128w4n2h2 "
        cuts += f"t{r}x128x64w4n4 t{r}x128x64w8n4h4 t{r}x64x64w4n6 t{r}x256x64w8n4 t{r}x256x64w8n3h1 "
        cuts += f"t{r}x64x128w4n4 t{r}x64x256w4n2 t{r}x64x256w8n3 t{r}x128x128w8n3 t{r}x128x128w8n4 "
        if outputs <= 1 << 13:
            cuts += f"t{r}x64x64/4w4n3h3 t{r}x64x64/2w4n4h4 t{r}x128x64/4w4n3h2 t{r}x64x128/4w4n3 "
            cuts += f"t{r}x128x64/8w4n4 t{r}x128x64/4w4n5 t{r}x128x128/4w8n3 t{r}x256x64/8w8n3 "
    if rows > 64:
        cuts += "t128x128x64w8n3h2 t128x128x64w8n4 t256x128x64w8n3 t128x256x64w8n3 "
        cuts += "t128x128x64/4w8n3 t128x64x64/2w4n4 " if op == "add" else ""
    return cuts


def small(op: Op, rows: int, deep: int) -> str:
    """deep: how many 1024 inputs a weight has."""
    cuts = ""
    if rows <= 4:
        r = 1 << (rows - 1).bit_length()
        cuts += f"v{r}x8x1024w4n{deep} v{r}x4x1024w4n{deep} s{r}x16x1024w4n{deep} s{r}x8x1024w8n{deep} "
        cuts += f"v{r}x16x1024w8n{deep} v{r}x2x1024w4n{deep} v{r}x8x512w2n{min(2 * deep, 4)} "
    if rows <= 8:
        cuts += f"d8x16x512w4n{2 * deep} d8x16x1024w8n{deep} d8x8x1024w8n{deep} d8x8x512w4n{2 * deep} "
        cuts += f"d8x32x512w4n{min(2 * deep, 3)} d8x32x1024w8n{deep} d8x16x256w2n{min(4 * deep, 6)} "
        cuts += f"d8x16x256w2n{4 * deep} d8x8x256w2n{4 * deep} d8x32x256w2n4 d8x16x128w1n{min(8 * deep, 12)} "
        cuts += f"d8x16x512w2n{min(2 * deep, 4)} d8x16x256w4n{4 * deep} "
    elif rows <= 64:
        cuts += f"d16x16x1024w8n{deep} d16x16x512w4n{min(2 * deep, 3)} d16x32x512w4n2 d16x32x1024w8n1 "
        cuts += "d32x16x1024w8n1 d32x16x512w4n2 d32x32x512w8n2 " if rows > 16 else ""
        r, splits = rows, ("/4", "/2") if op == "add" else ("", "/2")
        for split in splits:
            cuts += f"t{r}x64x64{split}w4n3h3 t{r}x64x64{split}w4n4h4 t{r}x64x128{split}w4n3h2 "
        cuts += f"t{r}x32x64w4n4h4 t{r}x64x64w4n6 t{r}x64x128/8w4n2h2 "
    else:
        for split in ("", "/2", "/4") if op == "add" else ("",):
            cuts += f"t64x64x64{split}w4n3h3 t128x64x64{split}w4n3h2 t128x128x64{split}w8n3h2 "
        cuts += "t64x64x128w4n2h2 t64x128x64w4n3h2 t128x64x64w4n4h4 t128x128x64w8n4h4 t64x64x64w4n4h4 "
    return cuts


def fits(config: LinearConfig, inputs: int) -> bool:
    """Whether the slabs that are in shared memory fit there, and the splits in the inputs."""
    width, slabs = config.columns + (config.rows if config.kind == "tile" else 0), config.stages
    in_flight = (width * slabs + config.columns * config.held) * config.depth * BF16_BYTES
    is_shared = config.kind in ("slab", "tile")
    return (not is_shared or in_flight < SHARED_BYTES) and config.splits * config.depth <= inputs
