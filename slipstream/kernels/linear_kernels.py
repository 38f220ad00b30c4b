"""The Triton kernels of linear.py: products of a few rows with large weights, what comes before, and after.

Weights are the left operand, so that their rows fill the tensor core's 16 or 64 and x may be narrow: a tile
of y^T = W x^T. A norm is folded in: the sums are of (x * norm weight) W^T, and a row's 1 / RMS is multiplied
in at the end (SHRINK keeps those products in float16's range). Weights are constants: reading them before
pdl_begin overlaps with the predecessor, which is what makes chains of small products fast.

In tile shapes: COLUMNS of y, ROWS of y, CHUNKS x PIECE = DEPTH of a slab.
"""

from __future__ import annotations

from typing import Any

from slipstream.kernels.backend import Arg, jit, jit_with, pdl_begin, tl


@jit_with(do_not_specialize=("count",))
def slab_kernel(
    x: Arg, weight: Arg, bias: Arg, norm: Arg, out: Arg, partial: Arg, counter: Arg, count: Arg, eps: Arg,
    x_stride: Arg, out_stride: Arg,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, CHUNKS: tl.constexpr, SLABS: tl.constexpr, AHEAD: tl.constexpr,
    SPLITS: tl.constexpr, OP: tl.constexpr, NORMED: tl.constexpr, SHRINK: tl.constexpr,
    BIASED: tl.constexpr, EVEN: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
) -> None:
    """For few rows: each warp multiplies a chunk of a slab [COLUMNS x DEPTH] of weights, and the warps' sums
    are added once, at the end. (A plain product would give every warp all of x.)"""
    first_row, tile, split = tl.program_id(0) * ROWS, tl.program_id(1), tl.program_id(2)
    PIECE: tl.constexpr = DEPTH // CHUNKS
    chunk, piece = tl.arange(0, CHUNKS)[:, None, None], tl.arange(0, PIECE)[None, None, :]
    k = split * SLABS * DEPTH + chunk * PIECE + piece
    source = weight_rows(tile, tl.arange(0, COLUMNS), OUTPUTS, COLUMNS, OP)[None, :, None]
    row = first_row + tl.arange(0, ROWS)[None, :, None]
    at = weight + tl.maximum(source, 0).to(tl.int64) * INPUTS
    x_at = x + row.to(tl.int64) * x_stride
    bias_C = load_bias(bias, tile, OUTPUTS, COLUMNS, OP, BIASED)
    acc = tl.zeros([CHUNKS, COLUMNS, ROWS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    if SLABS <= AHEAD:
        weights, scales = (), ()
        for slab in tl.static_range(SLABS):
            weights = append(weights, load_weights(at, source, k + slab * DEPTH, INPUTS, EVEN))
            scales = append(scales, load_scale(norm, k + slab * DEPTH, INPUTS, NORMED))
        pdl_begin(PDL, EARLY)
        value = load_x(x_at, row, k, count, INPUTS, EVEN)
        before = load_residual(
            out, tile, first_row, count, out_stride, OUTPUTS, ROWS, COLUMNS, OP == "add" and SPLITS == 1
        )
        for slab in tl.static_range(SLABS):
            following = value
            if slab + 1 < SLABS:
                following = load_x(x_at, row, k + (slab + 1) * DEPTH, count, INPUTS, EVEN)
            acc, squares = _slab_step(weights[slab], scales[slab], value, acc, squares, NORMED, SHRINK)
            value = following
    else:
        slab_weights = load_weights(at, source, k, INPUTS, EVEN)
        scale = load_scale(norm, k, INPUTS, NORMED)
        pdl_begin(PDL, EARLY)
        value = load_x(x_at, row, k, count, INPUTS, EVEN)
        before = load_residual(
            out, tile, first_row, count, out_stride, OUTPUTS, ROWS, COLUMNS, OP == "add" and SPLITS == 1
        )
        for _ in range(SLABS - 1):
            k += DEPTH
            next_weights = load_weights(at, source, k, INPUTS, EVEN)
            next_scale = load_scale(norm, k, INPUTS, NORMED)
            following = load_x(x_at, row, k, count, INPUTS, EVEN)
            acc, squares = _slab_step(slab_weights, scale, value, acc, squares, NORMED, SHRINK)
            slab_weights, scale, value = next_weights, next_scale, following
        acc, squares = _slab_step(slab_weights, scale, value, acc, squares, NORMED, SHRINK)
    finish(
        tl.sum(acc, 0), squares, before, bias_C, out, partial, counter, tile, first_row, split, count, eps,
        out_stride, OUTPUTS, INPUTS, ROWS, COLUMNS, SPLITS, OP, NORMED, SHRINK, BIASED,
    )


@jit
def _slab_step(
    weights: Arg, scale: Arg, value: Arg, acc: Arg, squares: Arg, NORMED: tl.constexpr, SHRINK: tl.constexpr
) -> Any:
    """One slab's products, a chunk for itself."""
    if NORMED:
        squares += tl.sum(tl.sum(value * value, 2), 0)
        value = value * (scale * SHRINK)
    x_T = tl.permute(value.to(weights.dtype), (0, 2, 1))
    return tl.dot(weights, x_T, acc, input_precision="ieee"), squares


@jit_with(do_not_specialize=("count",))
def tile_kernel(
    x: Arg, weight: Arg, bias: Arg, norm: Arg, out: Arg, partial: Arg, counter: Arg, count: Arg, eps: Arg,
    x_stride: Arg, out_stride: Arg,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, SLABS: tl.constexpr, HELD: tl.constexpr, SPLITS: tl.constexpr, OP: tl.constexpr,
    NORMED: tl.constexpr, SHRINK: tl.constexpr, BIASED: tl.constexpr, EVEN: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
) -> None:
    """For more rows: slabs of x and of weights go through shared memory, several stages ahead. Those stages
    begin after the wait, so that memory would idle before it: the weights of the last HELD slabs are read
    then, into registers."""
    first_row, tile, split = tl.program_id(0) * ROWS, tl.program_id(1), tl.program_id(2)
    k = split * SLABS * DEPTH + tl.arange(0, DEPTH)[None, :]
    source = weight_rows(tile, tl.arange(0, COLUMNS), OUTPUTS, COLUMNS, OP)[:, None]
    row = first_row + tl.arange(0, ROWS)[:, None]
    at = weight + tl.maximum(source, 0).to(tl.int64) * INPUTS
    x_at = x + row.to(tl.int64) * x_stride
    bias_C = load_bias(bias, tile, OUTPUTS, COLUMNS, OP, BIASED)
    acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    held, scales, values = (), (), ()
    for slab in tl.static_range(HELD):
        last = k + (SLABS - HELD + slab) * DEPTH
        held = append(held, load_weights(at, source, last, INPUTS, EVEN))
        scales = append(scales, load_scale(norm, last, INPUTS, NORMED))
    pdl_begin(PDL, EARLY)
    for slab in tl.static_range(HELD):
        values = append(values, load_x(x_at, row, k + (SLABS - HELD + slab) * DEPTH, count, INPUTS, EVEN))
    for _ in range(SLABS - HELD):
        weights = load_weights(at, source, k, INPUTS, EVEN)
        value = load_x(x_at, row, k, count, INPUTS, EVEN)
        scale = load_scale(norm, k, INPUTS, NORMED)
        acc, squares = _tile_step(weights, scale, value, acc, squares, NORMED, SHRINK)
        k += DEPTH
    for slab in tl.static_range(HELD):
        # Masked again: else Triton moves x to shared memory before the loop, which would begin later for it.
        value = tl.where(row < count, values[slab], 0.0)
        acc, squares = _tile_step(held[slab], scales[slab], value, acc, squares, NORMED, SHRINK)
    before = load_residual(
        out, tile, first_row, count, out_stride, OUTPUTS, ROWS, COLUMNS, OP == "add" and SPLITS == 1
    )
    finish(
        acc, squares, before, bias_C, out, partial, counter, tile, first_row, split, count, eps, out_stride,
        OUTPUTS, INPUTS, ROWS, COLUMNS, SPLITS, OP, NORMED, SHRINK, BIASED,
    )


@jit
def _tile_step(
    weights: Arg, scale: Arg, value: Arg, acc: Arg, squares: Arg, NORMED: tl.constexpr, SHRINK: tl.constexpr
) -> Any:
    """One slab's products."""
    if NORMED:
        squares += tl.sum(value * value, 1)
        value = value * (scale * SHRINK)
    return tl.dot(weights, tl.trans(value.to(weights.dtype)), acc, input_precision="ieee"), squares


@jit
def weight_rows(
    tile: Arg, column: Arg, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, OP: tl.constexpr
) -> Any:
    """Rows of the weight that a tile needs, -1 past the end. Gated: half a tile of gate's, then up's."""
    if OP == "gated":
        HALF: tl.constexpr = COLUMNS // 2
        inner = tile * HALF + column % HALF
        source = tl.where(inner < OUTPUTS // 2, inner + column // HALF * (OUTPUTS // 2), -1)
    else:
        source = tile * COLUMNS + column
        source = tl.where(source < OUTPUTS, source, -1)
    return source


@jit
def append(items: Arg, item: Arg) -> Any:
    """A tuple with one item more."""
    return items + (item,)  # noqa: RUF005 (Triton has no unpacking)


@jit
def load_weights(at: Arg, source: Arg, k: Arg, INPUTS: tl.constexpr, EVEN: tl.constexpr) -> Any:
    """at: where the rows of the weight start."""
    return tl.load(at + k) if EVEN else tl.load(at + k, mask=(source >= 0) & (k < INPUTS), other=0.0)


@jit
def load_scale(norm: Arg, k: Arg, INPUTS: tl.constexpr, NORMED: tl.constexpr) -> Any:
    """The norm's weight, or nothing of use."""
    return tl.load(norm + k, mask=k < INPUTS, other=0.0) if NORMED else k


@jit
def load_x(x_at: Arg, row: Arg, k: Arg, count: Arg, INPUTS: tl.constexpr, EVEN: tl.constexpr) -> Any:
    """x_at: where the rows of x start."""
    inside = row < count
    if not EVEN:
        inside = inside & (k < INPUTS)
    return tl.load(x_at + k, mask=inside, other=0.0)


@jit
def load_bias(
    bias: Arg, tile: Arg, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, OP: tl.constexpr,
    BIASED: tl.constexpr,
) -> Any:
    """A tile's bias [COLUMNS] in float32, or nothing of use."""
    source = weight_rows(tile, tl.arange(0, COLUMNS), OUTPUTS, COLUMNS, OP)
    return tl.load(bias + source, mask=source >= 0, other=0.0).to(tl.float32) if BIASED else source


@jit
def load_residual(
    out: Arg, tile: Arg, first_row: Arg, count: Arg, out_stride: Arg,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WANTED: tl.constexpr,
) -> Any:
    """A tile of the residual [COLUMNS, ROWS], or zeros."""
    row = first_row + tl.arange(0, ROWS)[None, :]
    column = tile * COLUMNS + tl.arange(0, COLUMNS)[:, None]
    if WANTED:
        inside = (row < count) & (column < OUTPUTS)
        before = tl.load(out + row.to(tl.int64) * out_stride + column, mask=inside, other=0.0)
    else:
        before = tl.zeros([COLUMNS, ROWS], tl.float32)
    return before


@jit
def finish(
    total: Arg, squares: Arg, before: Arg, bias_C: Arg, out: Arg, partial: Arg, counter: Arg, tile: Arg,
    first_row: Arg, split: Arg, count: Arg, eps: Arg, out_stride: Arg,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr, OP: tl.constexpr, NORMED: tl.constexpr, SHRINK: tl.constexpr, BIASED: tl.constexpr,
) -> None:
    """From sums [COLUMNS, ROWS] to y; before: the residual's tile. Of a split tile, the last program to come
    adds the partial sums, always in the same order."""
    if NORMED:
        total = total * (tl.rsqrt(squares / INPUTS + eps) / SHRINK)[None, :]
    if SPLITS == 1:
        _store(
            total, before, bias_C, out, tile, first_row, count, out_stride,
            OUTPUTS, ROWS, COLUMNS, OP, BIASED,
        )
    else:
        row = first_row + tl.arange(0, ROWS)[None, :]
        column = tile * COLUMNS + tl.arange(0, COLUMNS)[:, None]
        inside, width = row < count, tl.num_programs(1) * COLUMNS
        place = partial + row.to(tl.int64) * width + column
        size = count.to(tl.int64) * width
        tl.store(place + split * size, total, mask=inside)
        # One thread's release covers its whole program's stores only after a barrier.
        tl.debug_barrier()
        at = counter + tl.program_id(0) * tl.num_programs(1) + tile
        if tl.atomic_add(at, 1, sem="acq_rel") == SPLITS - 1:
            # Past the L1 cache: other programs wrote them.
            total = tl.load(place, mask=inside, other=0.0, cache_modifier=".cg")
            for other in tl.static_range(1, SPLITS):
                total += tl.load(place + other * size, mask=inside, other=0.0, cache_modifier=".cg")
            before = load_residual(
                out, tile, first_row, count, out_stride, OUTPUTS, ROWS, COLUMNS, OP == "add"
            )
            _store(
                total, before, bias_C, out, tile, first_row, count, out_stride,
                OUTPUTS, ROWS, COLUMNS, OP, BIASED,
            )
            tl.store(at, 0)


@jit
def _store(
    total: Arg, before: Arg, bias_C: Arg, out: Arg, tile: Arg, first_row: Arg, count: Arg, out_stride: Arg,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, OP: tl.constexpr, BIASED: tl.constexpr,
) -> None:
    """The epilogue: bias, then as they are, gated, or added to the residual."""
    row = first_row + tl.arange(0, ROWS)[None, :]
    at = out + row.to(tl.int64) * out_stride
    if BIASED:
        total += bias_C[:, None]
    if OP == "gated":
        HALF: tl.constexpr = COLUMNS // 2
        column = tile * HALF + tl.arange(0, HALF)[:, None]
        gate, up = tl.split(tl.permute(tl.reshape(total, [2, HALF, ROWS]), (1, 2, 0)))
        total = gate / (1.0 + tl.exp(-gate)) * up
        inside = (row < count) & (column < OUTPUTS // 2)
    else:
        column = tile * COLUMNS + tl.arange(0, COLUMNS)[:, None]
        inside = (row < count) & (column < OUTPUTS)
    if OP == "add":
        total += before
    tl.store(at + column, total.to(out.dtype.element_ty), mask=inside)
