"""Matrix products y = x W^T + b with what stands around them in a decoder: RMSNorm before, gate or residual
after. Made for few rows, where a product costs the time of reading its weights.

A norm needs no kernel of its own between two such products: what adds to the residual also returns it
`Scaled` by the norm's weight, and the product that takes this divides by the RMS at the end: y = (x norm) W^T
/ rms(x) + b. All sums are in float32 and in a fixed order, so results repeat to the bit.

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

Tensor = torch.Tensor
Op = Literal["plain", "gated", "add"]

@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm of the residual. weight_K: float32, adjacent."""

    weight_K: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Scaled:
    """A residual on its way through a norm: times the norm's weight (and FLOAT16_SHRINK, in float16), not yet
    divided by its RMS. x_MK: of the weights' type. squares_PM: float32, sums of squares of P parts of each of
    the residual's rows. Both adjacent."""

    x_MK: Tensor
    squares_PM: Tensor
    norm: Norm


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """How a product is cut. A program makes `rows` x `columns` of y (gated: half of the columns are gate's)
    from slabs of `depth` inputs; `splits` programs share the inputs of a tile.

    kind: "slab" gives each warp a part of a slab; where weights are at most `stages` slabs deep, all are read
    before the predecessor ends, else one slab ahead. "vector" (of up to 4 rows) and "direct" (8 or 16) keep
    `stages` slabs in flight and use no shared memory. "tile" is a plain product through shared memory with
    `stages` slabs in flight; the last `held` are read before the predecessor ends. early: the successor's
    prologue starts at once, not when this kernel's inputs are ready.
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


# Beyond these rows cuBLAS has work for all multiprocessors.
MOST_ROWS = 256
# Up to these rows products share a norm. Beyond, small ones do where a sum has no more tiles than these, each
# with squares of its own that the next product must read; large ones are mostly cuBLAS's then.
SHARING_ROWS, SHARING_TILES = 8, 96
# Inputs of a slab, and the elements of a weight up to which a layer counts as small.
DEPTH, SMALL = 1024, 8 << 20
VECTOR = LinearConfig("vector", rows=1, columns=8, depth=DEPTH, stages=3)
# Tiles that add up a row's products in one order, so that its sums never depend on the batch: 64 outputs an
# instruction, one sum for all inputs. tests/gpu/check_invariance.py shows that they give the same bits.
INVARIANT = (
    LinearConfig("tile", rows=16, columns=64, depth=128, stages=5),
    LinearConfig("tile", rows=64, columns=64, depth=128, stages=3),
    LinearConfig("tile", rows=128, columns=128, depth=64, warps=8, stages=3),
    LinearConfig("tile", rows=128, columns=256, depth=64, warps=16, stages=3),
)
INVARIANT_FLOAT32 = LinearConfig("tile", rows=32, columns=32, depth=32, stages=2)
# Invariant tiles that keep most multiprocessors busy; rows of which there are enough for the largest ones.
BUSY_TILES, LONG_STEP = 96, 4096
# x * norm weight of float16 models: rows of large activations must not overflow before they are scaled.
FLOAT16_SHRINK = 2.0**-6


def choose_linear_config(
    op: Op, rows: int, outputs: int, inputs: int, dtype: torch.dtype, invariant: bool = False
) -> LinearConfig | None:
    """How to multiply up to `rows` rows by a weight [outputs, inputs]; None where cuBLAS with kernels of its
    own for norm, gate and addition measures better. invariant: one whose results are the same to the bit
    for any rows, alone and in any batch."""
    if invariant:
        return INVARIANT_FLOAT32 if dtype == torch.float32 else _invariant_tile(rows, outputs)
    if dtype == torch.float32 or rows > MOST_ROWS:
        return None
    measured = MEASURED.get((op, outputs, inputs))
    if measured is not None:
        cut = measured[min(count for count in measured if count >= rows)]
        return None if cut is None else LinearConfig(**read_cut(cut))
    if outputs >= 1 << 16:
        return _many_outputs(rows)
    return _few_rows(op, rows, outputs, inputs) if rows <= 16 else _more_rows(op, rows, outputs, inputs)


def _invariant_tile(rows: int, outputs: int) -> LinearConfig:
    """The largest that is not mostly padding and leaves few multiprocessors idle."""
    few, some, many, most = INVARIANT
    if rows >= LONG_STEP:
        return most
    for smaller, tile in ((some, many), (few, some)):
        tiles = ceil_div(rows, tile.rows) * ceil_div(outputs, tile.columns)
        if rows > smaller.rows and tiles >= BUSY_TILES:
            return tile
    return few


# What follows extends the measured shapes to others: small layers gain from weights read straight into
# registers, large ones stream at cuBLAS's speed from two rows on.


def _many_outputs(rows: int) -> LinearConfig | None:
    """Projection to a vocabulary."""
    if rows > 64:
        return None
    if rows == 1:
        return VECTOR
    if rows in range(9, 17):
        return LinearConfig("tile", rows=16, columns=128, depth=128, warps=8, stages=3)
    return LinearConfig("tile", rows=_tile_rows(rows), columns=64, depth=128, stages=4)


def _few_rows(op: Op, rows: int, outputs: int, inputs: int) -> LinearConfig | None:
    if outputs * inputs > SMALL:
        return VECTOR if rows == 1 else None
    if rows <= 8:
        stages = min(6, ceil_div(inputs, 512))
        return LinearConfig("direct", rows=8, columns=16, depth=512, stages=stages)
    if op != "add":
        return LinearConfig("tile", rows=16, columns=64, depth=128, stages=4)
    columns = 8 if outputs <= 2048 else 16
    return LinearConfig("slab", 16, columns=columns, depth=DEPTH, stages=min(3, ceil_div(inputs, DEPTH)))


def _more_rows(op: Op, rows: int, outputs: int, inputs: int) -> LinearConfig | None:
    if rows > 64 or outputs * inputs > SMALL:
        return None
    if op != "add":
        return LinearConfig("tile", rows=_tile_rows(rows), columns=64, depth=64, stages=6)
    splits = min(4, ceil_div(inputs, 512)) if outputs <= 2048 else 1
    return LinearConfig("tile", _tile_rows(rows), columns=64, depth=128, splits=splits, stages=3)


def _tile_rows(rows: int) -> int:
    return max(16, min(64, next_power_of_2(rows)))


def shares_norm(rows: int, outputs: int, inputs: int, config: LinearConfig) -> bool:
    """Whether a sum should do its part of the norm that follows, as measures best in whole layers."""
    few = outputs * inputs <= SMALL and ceil_div(outputs, config.columns) <= SHARING_TILES
    return rows <= SHARING_ROWS or few


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
    x_MK: Tensor | Scaled,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    config: LinearConfig,
    scratch: LinearScratch | None = None,
) -> Tensor:
    """Returns y [M, N] in the weight's type, which is x's. scratch: for products that are split."""
    rows = _check(x_MK, weight_NK, bias_N)
    if not use_triton(weight_NK):
        return linear_reference(x_MK, weight_NK, bias_N)
    y_MN = weight_NK.new_empty(rows, weight_NK.shape[0])
    _launch(x_MK, weight_NK, bias_N, config, y_MN, "plain", scratch)
    return y_MN


def linear_reference(x_MK: Tensor | Scaled, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """The same in torch operations."""
    return F.linear(_normed(x_MK), weight_NK, bias_N)


def gated_linear(
    x_MK: Tensor | Scaled,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    config: LinearConfig,
    scratch: LinearScratch | None = None,
) -> Tensor:
    """Returns silu(gate) * up [M, I] in the weight's type; the weight's rows are gate's, then up's.
    scratch: as for linear."""
    rows = _check(x_MK, weight_NK, bias_N)
    if weight_NK.shape[0] % 2:
        raise ValueError("gate and up must have as many rows each")
    if not use_triton(weight_NK):
        return gated_linear_reference(x_MK, weight_NK, bias_N)
    y_MI = weight_NK.new_empty(rows, weight_NK.shape[0] // 2)
    _launch(x_MK, weight_NK, bias_N, config, y_MI, "gated", scratch)
    return y_MI


def gated_linear_reference(x_MK: Tensor | Scaled, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """The same in torch operations."""
    gate_MI, up_MI = linear_reference(x_MK, weight_NK, bias_N).chunk(2, -1)
    return F.silu(gate_MI).mul_(up_MI)


def add_linear(
    x_MK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    residual_MN: Tensor,
    config: LinearConfig,
    scratch: LinearScratch,
    norm: Norm | None = None,
) -> Scaled | None:
    """Adds y to the float32 residual in place. x: the weight's type. Returns the residual scaled for the norm
    that follows, if there is one."""
    rows, outputs = _check(x_MK, weight_NK, bias_N), weight_NK.shape[0]
    is_float32 = residual_MN.dtype == torch.float32
    if residual_MN.shape != (rows, outputs) or not is_float32 or residual_MN.stride(1) != 1:
        raise ValueError("the residual must be float32 [M, N], with rows of adjacent elements")
    scaled = None
    if norm is not None:
        weight_K = norm.weight_K
        if weight_K.shape != (outputs,) or weight_K.dtype != torch.float32 or weight_K.stride(0) != 1:
            raise ValueError("the norm's weight must be float32 [N], adjacent")
        squares_PM = residual_MN.new_empty(ceil_div(outputs, config.columns), rows)
        scaled = Scaled(weight_NK.new_empty(rows, outputs), squares_PM, norm)
    if not use_triton(weight_NK):
        add_linear_reference(x_MK, weight_NK, bias_N, residual_MN, scaled)
    else:
        _launch(x_MK, weight_NK, bias_N, config, residual_MN, "add", scratch, scaled)
    return scaled


def add_linear_reference(
    x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, residual_MN: Tensor, scaled: Scaled | None = None
) -> None:
    """The same in torch operations. scaled: what to fill, all squares in its first part."""
    residual_MN.add_(F.linear(x_MK, weight_NK, bias_N))
    if scaled is not None:
        scaled.x_MK.copy_(residual_MN * (scaled.norm.weight_K * _shrink(weight_NK)))
        scaled.squares_PM.zero_()[0] = residual_MN.square().sum(1)


def _normed(x_MK: Tensor | Scaled) -> Tensor:
    """x as a product's sums should be of it."""
    if isinstance(x_MK, Tensor):
        return x_MK
    mean_M = x_MK.squares_PM.sum(0) / x_MK.x_MK.shape[1]
    rstd_M1 = torch.rsqrt(mean_M + x_MK.norm.eps)[:, None] / _shrink(x_MK.x_MK)
    return (x_MK.x_MK * rstd_M1).to(x_MK.x_MK.dtype)


def _shrink(weight: Tensor) -> float:
    return FLOAT16_SHRINK if weight.dtype == torch.float16 else 1.0


def _check(x_MK: Tensor | Scaled, weight_NK: Tensor, bias_N: Tensor | None) -> int:
    """How many rows there are."""
    if isinstance(x_MK, Scaled):
        x_MK = x_MK.x_MK
    if weight_NK.dim() != 2 or not weight_NK.is_contiguous():
        raise ValueError("the weight must be [N, K], contiguous")
    if x_MK.dim() != 2 or x_MK.shape[1] != weight_NK.shape[1] or x_MK.stride(1) != 1:
        raise ValueError("x must be [M, K], with rows of adjacent elements")
    if x_MK.dtype != weight_NK.dtype:
        raise ValueError("x must be of the weight's type")
    if bias_N is not None and (bias_N.shape != weight_NK.shape[:1] or bias_N.stride(0) != 1):
        raise ValueError("the bias must be [N], adjacent")
    return x_MK.shape[0]


def _launch(
    x_MK: Tensor | Scaled,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    config: LinearConfig,
    out: Tensor,
    op: Op,
    scratch: LinearScratch | None,
    scaled: Scaled | None = None,
) -> None:
    """scaled: what an addition fills besides the residual."""
    squares, parts, eps = out, 0, 0.0
    if isinstance(x_MK, Scaled):
        squares, parts, eps, x_MK = x_MK.squares_PM, len(x_MK.squares_PM), x_MK.norm.eps, x_MK.x_MK
    (rows, inputs), outputs = x_MK.shape, weight_NK.shape[0]
    if rows == 0:
        return
    if config.splits > 1 and (scratch is None or not scratch.holds(rows, outputs, config)):
        raise ValueError(f"scratch is too small for {rows} x {outputs} sums in {config.splits} splits")
    slabs = ceil_div(ceil_div(inputs, config.depth), config.splits)
    tile_outputs = config.columns // 2 if op == "gated" else config.columns
    each = outputs // 2 if op == "gated" else outputs
    even = inputs == slabs * config.depth * config.splits and each % tile_outputs == 0
    partial, counter = (out, out) if scratch is None else (scratch.partial, scratch.counter)
    scale, scaled_out, sums = (out, out, out) if scaled is None else (
        scaled.norm.weight_K, scaled.x_MK, scaled.squares_PM
    )
    extra = {"CHUNKS": config.warps, "AHEAD": config.stages}
    if config.kind == "tile":
        extra = {"HELD": min(config.held, slabs), "num_stages": config.stages}
    kernels = {"slab": slab_kernel, "vector": vector_kernel, "direct": direct_kernel, "tile": tile_kernel}
    kernels[config.kind][(ceil_div(rows, config.rows), ceil_div(each, tile_outputs), config.splits)](
        x_MK, weight_NK, weight_NK if bias_N is None else bias_N, squares, scale, scaled_out, sums, out,
        partial, counter, rows, eps, x_MK.stride(0), out.stride(0),
        OUTPUTS=outputs, INPUTS=inputs, ROWS=config.rows, COLUMNS=config.columns, DEPTH=config.depth,
        SLABS=slabs, SPLITS=config.splits, OP=op, PARTS=parts, PARTS_PAD=next_power_of_2(parts),
        SCALES=scaled is not None, SHRINK=_shrink(weight_NK), BIASED=bias_N is not None, EVEN=even,
        EARLY=config.early, **extra, **pdl_options(out), num_warps=config.warps,
    )
