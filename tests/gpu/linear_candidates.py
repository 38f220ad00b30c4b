"""Configurations of the products in kernels/linear.py that are worth timing, by operation, rows and shape."""

from __future__ import annotations

from dataclasses import replace

import torch

from slipstream.kernels.backend import ceil_div
from slipstream.kernels.linear import LinearConfig, Op, choose_linear_config

BF16_BYTES = 2
SHARED_BYTES = 227 * 1024
# Rows of a slab's tile by rows of a step: fewer tiles than rows, for the sake of compile time.
SLAB_ROWS = {1: 1, 2: 4, 4: 4, 8: 8, 16: 16, 32: 32}


def slab(
    rows: int, columns: int, depth: int, warps: int, stages: int, splits: int = 1, folds: bool = True
) -> LinearConfig:
    return LinearConfig("slab", rows, columns, depth, splits, warps, stages, folds=folds)


def tile(
    rows: int, columns: int, depth: int, warps: int, stages: int, splits: int = 1, folds: bool = False
) -> LinearConfig:
    return LinearConfig("tile", rows, columns, depth, splits, warps, stages, folds=folds)


def candidates(op: Op, rows: int, outputs: int, inputs: int) -> list[LinearConfig]:
    """For bfloat16 weights. The chosen configuration first, where there is one."""
    found = []
    if rows in SLAB_ROWS:
        found += slabs(op, SLAB_ROWS[rows], outputs, inputs)
    if rows >= 16 or outputs * inputs >= 1 << 24:
        found += tiles(op, rows, outputs, inputs)
    found = [config for config in found if fits(config)]
    chosen = choose_linear_config(op, rows, outputs, inputs, torch.bfloat16)
    return list(dict.fromkeys(([chosen] if chosen else []) + found))


def slabs(op: Op, rows: int, outputs: int, inputs: int) -> list[LinearConfig]:
    deep = ceil_div(inputs, 1024)
    if rows == 32:
        return [slab(32, 16, 1024, 8, deep), slab(32, 32, 512, 8, 1)]
    if inputs > 3072:  # weights of which a program cannot hold all
        return deep_slabs(op, rows)
    found = [slab(rows, 16, 1024, 4, deep), slab(rows, 16, 1024, 8, deep)]
    if outputs > 1 << 14:
        return [*found, slab(rows, 32, 1024, 8, 1), slab(rows, 32, 512, 4, 1), slab(rows, 64, 256, 4, 1)]
    if op != "add":
        return [*found, slab(rows, 32, 1024, 8, deep), slab(rows, 8, 1024, 4, deep)]
    found += [slab(rows, 8, 1024, 8, deep), slab(rows, 8, 1024, 4, deep)]
    if deep > 1:
        found += [slab(rows, 16, 1024, 8, 1, deep), slab(rows, 16, 1024, 4, 1, deep)]
        found += [slab(rows, 16, 512, 4, deep, 2)]
    return found


def deep_slabs(op: Op, rows: int) -> list[LinearConfig]:
    """Folding the norm in takes registers that deep slabs of several rows do not have."""
    shapes = [(16, 512, 4, 1), (32, 512, 8, 1), (16, 1024, 8, 1), (8, 2048, 8, 1), (8, 1024, 4, 1)]
    if rows < 8:
        shapes += [(16, 1024, 4, 1), (16, 2048, 8, 1)]
    found = [slab(rows, *shape, folds=False) for shape in shapes]
    if op == "add":
        return [replace(config, splits=n, folds=True) for n in (1, 2) for config in found]
    return found + [slab(rows, *shape) for shape in ((16, 512, 4, 1), (8, 1024, 8, 1)) if rows < 16]


def tiles(op: Op, rows: int, outputs: int, inputs: int) -> list[LinearConfig]:
    few = 16 if rows <= 16 else 32 if rows <= 32 else 64
    wide, head = outputs > 1 << 13, outputs >= 1 << 15
    found = [tile(few, 64, 128, 4, 4), tile(few, 64, 64, 4, 6), tile(few, 128, 64, 4, 4)]
    if rows <= 64:
        found += [tile(few, 64, 256, 4, 2), tile(few, 128, 128, 8, 3)]
    if op != "add" and rows <= 64 and not head:
        found += [tile(few, 64, 64, 4, 4, folds=True), tile(few, 128, 64, 8, 3, folds=True)]
    if rows >= 128:
        found += [tile(128, 64, 64, 4, 4), tile(128, 128, 64, 8, 4)]
        if wide:
            found += [tile(128, 256, 64, 8, 3), tile(256, 128, 64, 8, 3)]
    if op == "add":
        most = (2, 4, 8) if outputs <= 2048 else (2, 4)
        found += [tile(few, 64, 128, 4, 3, n) for n in most if n * 128 <= inputs]
        found += [tile(few, 64, 64, 4, 4, n) for n in most[:2]]
        if rows >= 128:
            found += [tile(128, 64, 64, 4, 4, 2), tile(128, 64, 64, 4, 4, 4), tile(128, 128, 64, 8, 4, 4)]
    return found


def fits(config: LinearConfig) -> bool:
    """Whether the stages of a tile fit in shared memory, and the slabs of weights that are kept there."""
    width = config.columns + (config.rows if config.kind == "tile" else 0)
    return width * config.depth * config.stages * BF16_BYTES < SHARED_BYTES
