"""The Triton kernels of linear.py that read weights from memory straight into the registers that multiply.

Neither weights nor x pass through shared memory, so many slabs of weights can be in flight, and they are
before the predecessor ends. Warps have parts of a slab's inputs; their sums are added once, at the end.
As everywhere, weights are the left operand.
"""

from __future__ import annotations

from typing import Any

from slipstream.kernels.backend import Arg, jit, jit_with, pdl_begin, tl
from slipstream.kernels.linear_kernels import (
    append,
    finish,
    load_bias,
    load_residual,
    load_scale,
    load_squares,
    load_weights,
    load_x,
    weight_rows,
)


@jit_with(do_not_specialize=("count",))
def direct_kernel(
    x: Arg, weight: Arg, bias: Arg, squares: Arg, scale: Arg, scaled: Arg, new_squares: Arg, out: Arg,
    partial: Arg, counter: Arg, count: Arg, eps: Arg, x_stride: Arg, out_stride: Arg,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, CHUNKS: tl.constexpr, SLABS: tl.constexpr, AHEAD: tl.constexpr,
    SPLITS: tl.constexpr, OP: tl.constexpr, PARTS: tl.constexpr, PARTS_PAD: tl.constexpr,
    SCALES: tl.constexpr, SHRINK: tl.constexpr, BIASED: tl.constexpr, EVEN: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
) -> None:
    """For tensor cores: 8 or 16 rows, of which some may be missing. AHEAD slabs are in flight.

    A product sums over inputs in any order, so each thread takes eight neighbouring inputs of a row as the
    eight that mma.m16n8k16 wants of it in two steps. A warp's chunk of a slab is PIECES x 32 inputs."""
    first_row, tile, split = tl.program_id(0) * ROWS, tl.program_id(1), tl.program_id(2)
    PIECES: tl.constexpr = DEPTH // CHUNKS // 32
    # Axes in the order in which Triton gives them to lanes, then warps, then registers.
    eighth = tl.arange(0, 8)[:, None, None, None, None]
    chunk = tl.arange(0, CHUNKS)[None, :, None, None, None]
    piece = tl.arange(0, PIECES)[None, None, None, :, None]
    k = chunk * (PIECES * 32) + piece * 32 + tl.arange(0, 32)[None, None, None, None, :]
    k += split * SLABS * DEPTH
    column = tl.arange(0, COLUMNS // 8)[None, None, :, None, None] * 8 + eighth
    source = weight_rows(tile, column, OUTPUTS, COLUMNS, OP)
    row = first_row + tl.arange(0, ROWS // 8)[None, None, :, None, None] * 8 + eighth
    at = weight + tl.maximum(source, 0).to(tl.int64) * INPUTS
    x_at = x + row.to(tl.int64) * x_stride
    bias_C = load_bias(bias, tile, OUTPUTS, COLUMNS, OP, BIASED)
    scale_C = load_scale(scale, tile, OUTPUTS, COLUMNS, SCALES)
    FIRST: tl.constexpr = min(SLABS, AHEAD)
    weights, values = (), ()
    for slab in tl.static_range(FIRST):
        weights = append(weights, load_weights(at, source, k + slab * DEPTH, INPUTS, EVEN))
    pdl_begin(PDL, EARLY)
    for slab in tl.static_range(FIRST):
        values = append(values, load_x(x_at, row, k + slab * DEPTH, count, INPUTS, EVEN))
    parts = load_squares(squares, first_row, count, ROWS, PARTS, PARTS_PAD)
    before = load_residual(
        out, tile, first_row, count, out_stride, OUTPUTS, ROWS, COLUMNS, OP == "add" and SPLITS == 1
    )
    acc = tl.zeros([CHUNKS, COLUMNS, ROWS], tl.float32)
    for slab in tl.static_range(SLABS):
        left = _operand(weights[slab], COLUMNS, CHUNKS, PIECES)
        right = _operand(values[slab], ROWS, CHUNKS, PIECES)
        if slab + AHEAD < SLABS:
            following = k + (slab + AHEAD) * DEPTH
            weights = append(weights, load_weights(at, source, following, INPUTS, EVEN))
            values = append(values, load_x(x_at, row, following, count, INPUTS, EVEN))
        acc = tl.dot(left, tl.permute(right, (0, 2, 1)), acc, input_precision="ieee")
    finish(
        tl.sum(acc, 0), parts, eps, before, bias_C, scale_C, scaled, new_squares, out, partial, counter, tile,
        first_row, split, count, out_stride, OUTPUTS, INPUTS, ROWS, COLUMNS, SPLITS, OP, PARTS, SCALES,
        SHRINK, BIASED,
    )


@jit_with(do_not_specialize=("count",))
def vector_kernel(
    x: Arg, weight: Arg, bias: Arg, squares: Arg, scale: Arg, scaled: Arg, new_squares: Arg, out: Arg,
    partial: Arg, counter: Arg, count: Arg, eps: Arg, x_stride: Arg, out_stride: Arg,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, CHUNKS: tl.constexpr, SLABS: tl.constexpr, AHEAD: tl.constexpr,
    SPLITS: tl.constexpr, OP: tl.constexpr, PARTS: tl.constexpr, PARTS_PAD: tl.constexpr,
    SCALES: tl.constexpr, SHRINK: tl.constexpr, BIASED: tl.constexpr, EVEN: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
) -> None:
    """For one to four rows, without tensor cores. With DEPTH = 256 CHUNKS every thread has eight inputs of
    each of a slab's COLUMNS weights, and a warp reads 512 bytes of a row at once."""
    first_row, tile, split = tl.program_id(0) * ROWS, tl.program_id(1), tl.program_id(2)
    k = split * SLABS * DEPTH + tl.arange(0, DEPTH)[None, None, :]
    source = weight_rows(tile, tl.arange(0, COLUMNS), OUTPUTS, COLUMNS, OP)[None, :, None]
    row = first_row + tl.arange(0, ROWS)[:, None, None]
    at = weight + tl.maximum(source, 0).to(tl.int64) * INPUTS
    x_at = x + row.to(tl.int64) * x_stride
    bias_C = load_bias(bias, tile, OUTPUTS, COLUMNS, OP, BIASED)
    scale_C = load_scale(scale, tile, OUTPUTS, COLUMNS, SCALES)
    FIRST: tl.constexpr = min(SLABS, AHEAD)
    weights, values = (), ()
    for slab in tl.static_range(FIRST):
        weights = append(weights, load_weights(at, source, k + slab * DEPTH, INPUTS, EVEN))
    pdl_begin(PDL, EARLY)
    for slab in tl.static_range(FIRST):
        values = append(values, load_x(x_at, row, k + slab * DEPTH, count, INPUTS, EVEN))
    parts = load_squares(squares, first_row, count, ROWS, PARTS, PARTS_PAD)
    before = load_residual(
        out, tile, first_row, count, out_stride, OUTPUTS, ROWS, COLUMNS, OP == "add" and SPLITS == 1
    )
    acc = tl.zeros([ROWS, COLUMNS, DEPTH // 8], tl.float32)
    for slab in tl.static_range(SLABS):
        sums = _sums_of_eight(weights[slab], values[slab], ROWS, COLUMNS, DEPTH)
        if slab + AHEAD < SLABS:
            following = k + (slab + AHEAD) * DEPTH
            weights = append(weights, load_weights(at, source, following, INPUTS, EVEN))
            values = append(values, load_x(x_at, row, following, count, INPUTS, EVEN))
        acc += sums
    finish(
        tl.trans(tl.sum(acc, 2)), parts, eps, before, bias_C, scale_C, scaled, new_squares, out, partial,
        counter, tile, first_row, split, count, out_stride, OUTPUTS, INPUTS, ROWS, COLUMNS, SPLITS, OP,
        PARTS, SCALES, SHRINK, BIASED,
    )


@jit
def _sums_of_eight(
    weights: Arg, value: Arg, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr
) -> Any:
    """What a thread can add by itself."""
    products = weights.to(tl.float32) * value.to(tl.float32)
    return tl.sum(tl.reshape(products, [ROWS, COLUMNS, DEPTH // 8, 8]), 3)


@jit
def _operand(loaded: Arg, WIDTH: tl.constexpr, CHUNKS: tl.constexpr, PIECES: tl.constexpr) -> Any:
    """[CHUNKS, WIDTH, inputs] from what threads have read. Four threads of a row have eight inputs each, and
    a step of the tensor core takes inputs 2 t, 2 t + 1, 2 t + 8, 2 t + 9 from thread t: the first four of
    its eight in one step, the others in the next."""
    each = tl.reshape(loaded, [8, CHUNKS, WIDTH // 8, PIECES, 4, 2, 2, 2])
    return tl.reshape(tl.permute(each, (1, 2, 0, 3, 5, 6, 4, 7)), [CHUNKS, WIDTH, PIECES * 32])
