"""Matrix products y = x W^T + b with what stands around them in a decoder: RMSNorm before, gate or residual
after. Made for few rows, where a product costs the time of reading its weights.

With a norm, x is the float32 residual and goes in normalised: y = (x norm / rms(x)) W^T + b. All sums are in
float32 and in a fixed order, so results repeat to the bit.

Legend: M rows, N outputs (rows of the weight), K inputs, I = N / 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from slipstream.kernels.backend import ceil_div, next_power_of_2, pdl_options, use_triton
from slipstream.kernels.linear_direct import direct_kernel, vector_kernel
from slipstream.kernels.linear_kernels import slab_kernel, tile_kernel
from slipstream.kernels.linear_table import MEASURED, read_cut
from slipstream.kernels.rms_norm import rms_norm, rms_norm_reference

Tensor = torch.Tensor
Op = Literal["plain", "gated", "add"]

@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm of the residual. weight_K: float32, adjacent."""

    weight_K: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """How a product is cut. A program makes `rows` x `columns` of y (gated: half of the columns are gate's)
    from slabs of `depth` inputs; `splits` programs share the inputs of a tile.

    kind: "slab" gives each warp a part of a slab; where weights are at most `stages` slabs deep, all are read
    before the predecessor ends, else one slab ahead. "vector" (of up to 4 rows) and "direct" (8 or 16) keep
    `stages` slabs in flight and use no shared memory; norms go before. "tile" is a plain product through
    shared memory with `stages` slabs in flight; the last `held` are read before the predecessor ends. early:
    the successor's prologue starts at once, not when this kernel's inputs are ready. folds: a norm is part of
    the product, not a kernel before it.
    """

    kind: Literal["slab", "vector", "direct", "tile"]
    rows: int
    columns: int
    depth: int
    splits: int = 1
    warps: int = 4
    stages: int = 4
    held: int = 0
    early: bool = False
    folds: bool = True


# Beyond these rows cuBLAS has work for all multiprocessors.
MOST_ROWS = 256
# Inputs of a slab, and the elements of a weight up to which a layer counts as small.
DEPTH, SMALL = 1024, 8 << 20
VECTOR = LinearConfig("vector", rows=1, columns=8, depth=DEPTH, stages=3, folds=False)
# One tile for any count of rows, so that a row's sums never depend on the batch.
INVARIANT = LinearConfig("tile", rows=64, columns=64, depth=128, stages=3, folds=False)
INVARIANT_FLOAT32 = LinearConfig("tile", rows=32, columns=32, depth=32, stages=2, folds=False)
# x * norm weight of float16 models: rows of large activations must not overflow before they are scaled.
FLOAT16_SHRINK = 2.0**-6


def choose_linear_config(
    op: Op, rows: int, outputs: int, inputs: int, dtype: torch.dtype, invariant: bool = False
) -> LinearConfig | None:
    """How to multiply up to `rows` rows by a weight [outputs, inputs]; None where cuBLAS with kernels of its
    own for norm, gate and addition measures better. invariant: the same choice for any rows, hence results
    that are the same to the bit alone and in any batch."""
    if invariant:
        return INVARIANT_FLOAT32 if dtype == torch.float32 else INVARIANT
    if dtype == torch.float32 or rows > MOST_ROWS:
        return None
    measured = MEASURED.get((op, outputs, inputs))
    if measured is not None:
        cut = measured[min(count for count in measured if count >= rows)]
        return None if cut is None else LinearConfig(**read_cut(cut))
    if outputs >= 1 << 16:
        return _many_outputs(rows)
    return _few_rows(op, rows, outputs, inputs) if rows <= 16 else _more_rows(op, rows, outputs, inputs)


# What follows extends the measured shapes to others: small layers gain from weights read straight into
# registers, large ones stream at cuBLAS's speed from two rows on.


def _many_outputs(rows: int) -> LinearConfig | None:
    """Projection to a vocabulary."""
    if rows > 64:
        return None
    if rows == 1:
        return VECTOR
    if rows in range(9, 17):
        return LinearConfig("tile", rows=16, columns=128, depth=128, warps=8, stages=3, folds=False)
    return LinearConfig("tile", rows=_tile_rows(rows), columns=64, depth=128, stages=4, folds=False)


def _few_rows(op: Op, rows: int, outputs: int, inputs: int) -> LinearConfig | None:
    if outputs * inputs > SMALL:
        return VECTOR if rows == 1 else None
    if rows <= 8:
        stages = min(6, ceil_div(inputs, 512))
        return LinearConfig("direct", rows=8, columns=16, depth=512, stages=stages, folds=False)
    if op != "add":
        return LinearConfig("tile", rows=16, columns=64, depth=128, stages=4, folds=False)
    columns = 8 if outputs <= 2048 else 16
    return LinearConfig("slab", 16, columns=columns, depth=DEPTH, stages=min(3, ceil_div(inputs, DEPTH)))


def _more_rows(op: Op, rows: int, outputs: int, inputs: int) -> LinearConfig | None:
    if rows > 64 or outputs * inputs > SMALL:
        return None
    if op != "add":
        return LinearConfig("tile", rows=_tile_rows(rows), columns=64, depth=64, stages=6, folds=False)
    splits = min(4, ceil_div(inputs, 512)) if outputs <= 2048 else 1
    return LinearConfig("tile", _tile_rows(rows), columns=64, depth=128, splits=splits, stages=3, folds=False)


def _tile_rows(rows: int) -> int:
    return max(16, min(64, next_power_of_2(rows)))


class LinearScratch:
    """Partial sums and counters of split products. Counters are zero between launches; one stream only."""

    def __init__(self, sums: int, tiles: int, device: torch.device) -> None:
        self.partial = torch.empty(sums, dtype=torch.float32, device=device)
        self.counter = torch.zeros(tiles, dtype=torch.int32, device=device)

    def holds(self, rows: int, outputs: int, config: LinearConfig) -> bool:
        """Whether there is room for a product of this size."""
        sums, tiles = scratch_size(rows, outputs, config)
        return sums <= self.partial.shape[0] and tiles <= self.counter.shape[0]


def scratch_size(rows: int, outputs: int, config: LinearConfig) -> tuple[int, int]:
    """Partial sums and counters that a product needs."""
    if config.splits == 1:
        return 0, 0
    tiles = ceil_div(rows, config.rows) * ceil_div(outputs, config.columns)
    return config.splits * rows * ceil_div(outputs, config.columns) * config.columns, tiles


def linear(
    x_MK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    config: LinearConfig,
    norm: Norm | None = None,
    scratch: LinearScratch | None = None,
) -> Tensor:
    """Returns y [M, N] in the weight's type. x: the weight's type, or the float32 residual with a norm.
    scratch: for products that are split, which do not fold a norm."""
    x_MK, norm = _check(x_MK, weight_NK, bias_N, config, norm)
    if not use_triton(x_MK):
        return linear_reference(x_MK, weight_NK, bias_N, norm)
    y_MN = weight_NK.new_empty(x_MK.shape[0], weight_NK.shape[0])
    _launch(x_MK, weight_NK, bias_N, config, norm, y_MN, "plain", scratch)
    return y_MN


def linear_reference(
    x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, norm: Norm | None = None
) -> Tensor:
    """The same in torch operations."""
    return F.linear(_normed(x_MK, weight_NK, norm), weight_NK, bias_N)


def gated_linear(
    x_MK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    config: LinearConfig,
    norm: Norm | None = None,
    scratch: LinearScratch | None = None,
) -> Tensor:
    """Returns silu(gate) * up [M, I] in the weight's type; the weight's rows are gate's, then up's.
    scratch: as for linear."""
    x_MK, norm = _check(x_MK, weight_NK, bias_N, config, norm)
    if weight_NK.shape[0] % 2:
        raise ValueError("gate and up must have as many rows each")
    if not use_triton(x_MK):
        return gated_linear_reference(x_MK, weight_NK, bias_N, norm)
    y_MI = weight_NK.new_empty(x_MK.shape[0], weight_NK.shape[0] // 2)
    _launch(x_MK, weight_NK, bias_N, config, norm, y_MI, "gated", scratch)
    return y_MI


def gated_linear_reference(
    x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, norm: Norm | None = None
) -> Tensor:
    """The same in torch operations."""
    gate_MI, up_MI = linear_reference(x_MK, weight_NK, bias_N, norm).chunk(2, -1)
    return F.silu(gate_MI).mul_(up_MI)


def add_linear(
    x_MK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    residual_MN: Tensor,
    config: LinearConfig,
    scratch: LinearScratch,
) -> None:
    """Adds y to the float32 residual in place. x: the weight's type."""
    _check(x_MK, weight_NK, bias_N, config, None)
    rows, outputs = x_MK.shape[0], weight_NK.shape[0]
    is_float32 = residual_MN.dtype == torch.float32
    if residual_MN.shape != (rows, outputs) or not is_float32 or residual_MN.stride(1) != 1:
        raise ValueError("the residual must be float32 [M, N], with rows of adjacent elements")
    if not use_triton(x_MK):
        add_linear_reference(x_MK, weight_NK, bias_N, residual_MN)
        return
    _launch(x_MK, weight_NK, bias_N, config, None, residual_MN, "add", scratch)


def add_linear_reference(
    x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, residual_MN: Tensor
) -> None:
    """The same in torch operations."""
    residual_MN.add_(F.linear(x_MK, weight_NK, bias_N))


def _normed(x_MK: Tensor, weight_NK: Tensor, norm: Norm | None) -> Tensor:
    return x_MK if norm is None else rms_norm_reference(x_MK, norm.weight_K, norm.eps, weight_NK.dtype)


def _check(
    x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, config: LinearConfig, norm: Norm | None
) -> tuple[Tensor, Norm | None]:
    """x and norm as the kernel takes them: normalised already where the norm is a kernel of its own."""
    if weight_NK.dim() != 2 or not weight_NK.is_contiguous():
        raise ValueError("the weight must be [N, K], contiguous")
    if x_MK.dim() != 2 or x_MK.shape[1] != weight_NK.shape[1] or x_MK.stride(1) != 1:
        raise ValueError("x must be [M, K], with rows of adjacent elements")
    if x_MK.dtype != (weight_NK.dtype if norm is None else torch.float32):
        raise ValueError("x must be of the weight's type, or the float32 residual where there is a norm")
    if bias_N is not None and (bias_N.shape != weight_NK.shape[:1] or bias_N.stride(0) != 1):
        raise ValueError("the bias must be [N], adjacent")
    if norm is None:
        return x_MK, None
    weight_K = norm.weight_K
    if weight_K.shape != x_MK.shape[1:] or weight_K.dtype != torch.float32 or weight_K.stride(0) != 1:
        raise ValueError("the norm's weight must be float32 [K], adjacent")
    if config.folds and config.kind in ("slab", "tile"):
        return x_MK, norm
    return rms_norm(x_MK, weight_K, norm.eps, weight_NK.dtype), None


def _launch(
    x_MK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    config: LinearConfig,
    norm: Norm | None,
    out: Tensor,
    op: Op,
    scratch: LinearScratch | None,
) -> None:
    (rows, inputs), outputs = x_MK.shape, weight_NK.shape[0]
    if rows == 0:
        return
    if config.splits > 1 and norm is not None:
        raise ValueError("products that fold a norm cannot be split")
    if config.splits > 1 and (scratch is None or not scratch.holds(rows, outputs, config)):
        raise ValueError(f"scratch is too small for {rows} x {outputs} sums in {config.splits} splits")
    slabs = ceil_div(ceil_div(inputs, config.depth), config.splits)
    tile_outputs = config.columns // 2 if op == "gated" else config.columns
    each = outputs // 2 if op == "gated" else outputs
    even = inputs == slabs * config.depth * config.splits and each % tile_outputs == 0
    partial, counter = (out, out) if scratch is None else (scratch.partial, scratch.counter)
    extra = {"CHUNKS": config.warps, "AHEAD": config.stages}
    if config.kind == "tile":
        extra = {"HELD": min(config.held, slabs), "num_stages": config.stages}
    kernels = {"slab": slab_kernel, "vector": vector_kernel, "direct": direct_kernel, "tile": tile_kernel}
    kernels[config.kind][(ceil_div(rows, config.rows), ceil_div(each, tile_outputs), config.splits)](
        x_MK, weight_NK, weight_NK if bias_N is None else bias_N, x_MK if norm is None else norm.weight_K,
        out, partial, counter, rows, 0.0 if norm is None else norm.eps, x_MK.stride(0), out.stride(0),
        OUTPUTS=outputs, INPUTS=inputs, ROWS=config.rows, COLUMNS=config.columns, DEPTH=config.depth,
        SLABS=slabs, SPLITS=config.splits, OP=op, NORMED=norm is not None,
        SHRINK=FLOAT16_SHRINK if weight_NK.dtype == torch.float16 else 1.0, BIASED=bias_N is not None,
        EVEN=even, EARLY=config.early, **extra, **pdl_options(out), num_warps=config.warps,
    )
