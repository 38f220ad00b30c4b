"""The Triton kernels of linear.py: products of a few rows with large weights, what comes before, and after.

Weights are the left operand, so that their rows fill the tensor core's 16 or 64 and x may be narrow: a tile
of y^T = W x^T. A norm of the residual is shared out: the kernel that adds to the residual writes it times the
norm's weight, too, and its tiles' sums of squares (SCALES); the product that follows multiplies a row's
1 / RMS in at the end (PARTS; SHRINK keeps what is between in float16's range). Weights are constants:
reading them before pdl_begin overlaps with the predecessor, which is what makes chains of small products
fast.

In tile shapes: COLUMNS of y, ROWS of y, CHUNKS x PIECE = DEPTH of a slab.
"""

from __future__ import annotations

from typing import Any

from slipstream.kernels.backend import Arg, jit, jit_with, pdl_begin, tl


@jit_with(do_not_specialize=("count",))
def slab_kernel(
    x: Arg, weight: Arg, bias: Arg, squares: Arg, scale: Arg, scaled: Arg, new_squares: Arg, out: Arg,
    partial: Arg, counter: Arg, count: Arg, eps: Arg, x_stride: Arg, out_stride: Arg,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, CHUNKS: tl.constexpr, SLABS: tl.constexpr, AHEAD: tl.constexpr,
    SPLITS: tl.constexpr, OP: tl.constexpr, PARTS: tl.constexpr, PARTS_PAD: tl.constexpr,
    SCALES: tl.constexpr, SHRINK: tl.constexpr, BIASED: tl.constexpr, EVEN: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
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
    scale_C = load_scale(scale, tile, OUTPUTS, COLUMNS, SCALES)
    acc = tl.zeros([CHUNKS, COLUMNS, ROWS], tl.float32)
    if SLABS <= AHEAD:
        weights = ()
        for slab in tl.static_range(SLABS):
            weights = append(weights, load_weights(at, source, k + slab * DEPTH, INPUTS, EVEN))
        pdl_begin(PDL, EARLY)
        value = load_x(x_at, row, k, count, INPUTS, EVEN)
        parts = load_squares(squares, first_row, count, ROWS, PARTS, PARTS_PAD)
        before = load_residual(
            out, tile, first_row, count, out_stride, OUTPUTS, ROWS, COLUMNS, OP == "add" and SPLITS == 1
        )
        for slab in tl.static_range(SLABS):
            following = value
            if slab + 1 < SLABS:
                following = load_x(x_at, row, k + (slab + 1) * DEPTH, count, INPUTS, EVEN)
            acc = tl.dot(weights[slab], tl.permute(value, (0, 2, 1)), acc, input_precision="ieee")
            value = following
    else:
        slab_weights = load_weights(at, source, k, INPUTS, EVEN)
        pdl_begin(PDL, EARLY)
        value = load_x(x_at, row, k, count, INPUTS, EVEN)
        parts = load_squares(squares, first_row, count, ROWS, PARTS, PARTS_PAD)
        before = load_residual(
            out, tile, first_row, count, out_stride, OUTPUTS, ROWS, COLUMNS, OP == "add" and SPLITS == 1
        )
        for _ in range(SLABS - 1):
            k += DEPTH
            next_weights = load_weights(at, source, k, INPUTS, EVEN)
            following = load_x(x_at, row, k, count, INPUTS, EVEN)
            acc = tl.dot(slab_weights, tl.permute(value, (0, 2, 1)), acc, input_precision="ieee")
            slab_weights, value = next_weights, following
        acc = tl.dot(slab_weights, tl.permute(value, (0, 2, 1)), acc, input_precision="ieee")
    finish(
        tl.sum(acc, 0), parts, eps, before, bias_C, scale_C, scaled, new_squares, out, partial, counter, tile,
        first_row, split, count, out_stride, OUTPUTS, INPUTS, ROWS, COLUMNS, SPLITS, OP, PARTS, SCALES,
        SHRINK, BIASED,
    )


@jit_with(do_not_specialize=("count",))
def tile_kernel(
    x: Arg, weight: Arg, bias: Arg, squares: Arg, scale: Arg, scaled: Arg, new_squares: Arg, out: Arg,
    partial: Arg, counter: Arg, count: Arg, eps: Arg, x_stride: Arg, out_stride: Arg,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, SLABS: tl.constexpr, HELD: tl.constexpr, SPLITS: tl.constexpr, OP: tl.constexpr,
    PARTS: tl.constexpr, PARTS_PAD: tl.constexpr, SCALES: tl.constexpr, SHRINK: tl.constexpr,
    BIASED: tl.constexpr, EVEN: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
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
    scale_C = load_scale(scale, tile, OUTPUTS, COLUMNS, SCALES)
    acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    held, values = (), ()
    for slab in tl.static_range(HELD):
        held = append(held, load_weights(at, source, k + (SLABS - HELD + slab) * DEPTH, INPUTS, EVEN))
    pdl_begin(PDL, EARLY)
    for slab in tl.static_range(HELD):
        values = append(values, load_x(x_at, row, k + (SLABS - HELD + slab) * DEPTH, count, INPUTS, EVEN))
    parts = load_squares(squares, first_row, count, ROWS, PARTS, PARTS_PAD)
    for _ in range(SLABS - HELD):
        weights = load_weights(at, source, k, INPUTS, EVEN)
        value = load_x(x_at, row, k, count, INPUTS, EVEN)
        acc = tl.dot(weights, tl.trans(value), acc, input_precision="ieee")
        k += DEPTH
    for slab in tl.static_range(HELD):
        # Masked again: else Triton moves x to shared memory before the loop, which would begin later for it.
        value = tl.where(row < count, values[slab], 0.0).to(weight.dtype.element_ty)
        acc = tl.dot(held[slab], tl.trans(value), acc, input_precision="ieee")
    before = load_residual(
        out, tile, first_row, count, out_stride, OUTPUTS, ROWS, COLUMNS, OP == "add" and SPLITS == 1
    )
    finish(
        acc, parts, eps, before, bias_C, scale_C, scaled, new_squares, out, partial, counter, tile, first_row,
        split, count, out_stride, OUTPUTS, INPUTS, ROWS, COLUMNS, SPLITS, OP, PARTS, SCALES, SHRINK, BIASED,
    )


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
def load_scale(
    scale: Arg, tile: Arg, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, SCALES: tl.constexpr
) -> Any:
    """The next norm's weight [COLUMNS] for a tile of the residual, or nothing of use."""
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    return tl.load(scale + column, mask=column < OUTPUTS, other=0.0) if SCALES else column


@jit
def load_squares(
    squares: Arg, first_row: Arg, count: Arg,
    ROWS: tl.constexpr, PARTS: tl.constexpr, PARTS_PAD: tl.constexpr,
) -> Any:
    """The sums of squares of rows' PARTS parts [PARTS_PAD, ROWS], or nothing of use. Only read here: adding
    them up before the product would hold it up."""
    row = first_row + tl.arange(0, ROWS)
    if PARTS > 0:
        part = tl.arange(0, PARTS_PAD)[:, None]
        inside = (part < PARTS) & (row < count)[None, :]
        parts = tl.load(squares + part * count + row[None, :], mask=inside, other=0.0)
    else:
        parts = row
    return parts


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
    total: Arg, parts: Arg, eps: Arg, before: Arg, bias_C: Arg, scale_C: Arg, scaled: Arg,
    new_squares: Arg, out: Arg, partial: Arg, counter: Arg, tile: Arg, first_row: Arg, split: Arg, count: Arg,
    out_stride: Arg,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr, OP: tl.constexpr, PARTS: tl.constexpr, SCALES: tl.constexpr, SHRINK: tl.constexpr,
    BIASED: tl.constexpr,
) -> None:
    """From sums [COLUMNS, ROWS] to y. parts: see load_squares; before: the residual's tile. Of a split
    tile, the last program to come adds the partial sums, always in the same order."""
    if PARTS > 0:
        rstd = tl.rsqrt(tl.sum(parts, 0) / INPUTS + eps) / SHRINK
        total = total * rstd[None, :]
    if SPLITS == 1:
        _store(
            total, before, bias_C, scale_C, scaled, new_squares, out, tile, first_row, count, out_stride,
            OUTPUTS, ROWS, COLUMNS, OP, SCALES, SHRINK, BIASED,
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
                total, before, bias_C, scale_C, scaled, new_squares, out, tile, first_row, count, out_stride,
                OUTPUTS, ROWS, COLUMNS, OP, SCALES, SHRINK, BIASED,
            )
            tl.store(at, 0)


@jit
def _store(
    total: Arg, before: Arg, bias_C: Arg, scale_C: Arg, scaled: Arg, new_squares: Arg, out: Arg, tile: Arg,
    first_row: Arg, count: Arg, out_stride: Arg,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, OP: tl.constexpr, SCALES: tl.constexpr,
    SHRINK: tl.constexpr, BIASED: tl.constexpr,
) -> None:
    """The epilogue: bias, then as they are, gated, or added to the residual, with what its norm needs."""
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
    if SCALES:
        value = (total * (scale_C * SHRINK)[:, None]).to(scaled.dtype.element_ty)
        tl.store(scaled + row.to(tl.int64) * OUTPUTS + column, value, mask=inside)
        rows = first_row + tl.arange(0, ROWS)
        tl.store(new_squares + tile * count + rows, tl.sum(total * total, 0), mask=rows < count)
