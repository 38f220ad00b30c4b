"""Linear layers and the one place that chooses their implementation, with the reason in words.

On an x86 CPU, half-precision weights go to FBGEMM (float16 weights packed once, float32 activations) and
float32 weights to oneDNN (packed once): both stream packed weights at memory speed for a few rows, where
F.linear does not. Everywhere else F.linear runs in the weights' own type. Legend: M rows, N outputs, K
inputs.
"""

from __future__ import annotations

import functools
import math
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

Tensor = torch.Tensor

HALF_MAX = 65504.0
# FBGEMM packs weights in blocks of 512 inputs by 16 outputs: a width of 576 takes the memory of 1,024.
PACKED_ROWS, PACKED_COLUMNS = 512, 16
# FBGEMM splits a batch into pieces of at most this many rows, and a piece into groups of a few.
PIECE_ROWS = 120
MAX_PADDING = 8
# Inputs of the products that are tried: kernels may cut long sums.
PROBED = (80, 1536)


class Linear(Protocol):
    """y = x W^T + b. num_bytes: memory of the weights as they are kept."""

    num_bytes: int

    def __call__(self, x_MK: Tensor) -> Tensor: ...


Make = Callable[[Tensor, Tensor | None], Linear]


@dataclass(frozen=True, slots=True)
class LinearBackend:
    """A choice. activation_dtype: what goes in and comes out. max_weight: the largest magnitude a weight may
    have. make(weight_NK, bias_N or None) packs one layer. padding: rows to add to 1, 2, ... PIECE_ROWS rows,
    if any.
    """

    name: str
    reason: str
    activation_dtype: torch.dtype
    make: Make
    max_weight: float = math.inf
    padding: tuple[int, ...] = ()

    def even_rows(self, rows: int) -> int:
        """The least count, at least rows, at which every row's result is the same, bit for bit, in any batch.
        A caller that pads to it gets answers that do not depend on who else is in the step. rows itself where
        the backend promises nothing."""
        return rows + self.padding[(rows - 1) % PIECE_ROWS] if self.padding else rows


def planned_activations(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What layers compute in, unless the weights turn out to be beyond what the backend can hold."""
    x86 = device.type == "cpu" and platform.machine().lower() in ("x86_64", "amd64")
    fbgemm = x86 and "fbgemm" in torch.backends.quantized.supported_engines
    return torch.float32 if fbgemm and dtype in (torch.bfloat16, torch.float16) else dtype


def choose_linear(
    dtype: torch.dtype, device: torch.device, *, batch_invariant: bool = False, refused: str = ""
) -> LinearBackend:
    """The backend for weights of dtype on device. refused: why FBGEMM, which would be chosen, cannot be used.

    float32 is batch-invariant wherever it can be, which costs little. Half precision is when asked for:
    FBGEMM needs a single row padded to three, and that makes it a third slower. Raises ValueError where
    batch_invariant cannot be had.
    """
    kind = str(dtype).removeprefix("torch.")
    x86 = device.type == "cpu" and platform.machine().lower() in ("x86_64", "amd64")
    if x86 and dtype is torch.float32 and torch.backends.mkldnn.enabled:
        reason = "float32 on an x86 CPU: oneDNN with packed weights"
        padding = _row_padding(_OnednnLinear)
        if padding or not batch_invariant:
            return LinearBackend("onednn", reason, dtype, _OnednnLinear, padding=padding)
    if planned_activations(dtype, device) is not dtype and not refused:
        reason = f"{kind} on an x86 CPU: FBGEMM, float16 packed weights with float32 activations"
        padding = _row_padding(_FbgemmLinear) if batch_invariant else ()
        if padding or not batch_invariant:
            return LinearBackend("fbgemm", reason, torch.float32, _FbgemmLinear, HALF_MAX, padding)
    reason = f"F.linear in {kind} on {device.type}" + (f": {refused}" if refused else "")
    if batch_invariant:
        raise ValueError(f"--batch-invariant: results would depend on the batch with {reason}")
    return LinearBackend("torch", reason, dtype, _TorchLinear)


class _TorchLinear:
    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None) -> None:
        self.weight_NK, self.bias_N = weight_NK, bias_N
        self.num_bytes = weight_NK.nbytes + (0 if bias_N is None else bias_N.nbytes)

    def __call__(self, x_MK: Tensor) -> Tensor:
        return F.linear(x_MK, self.weight_NK, self.bias_N)


class _OnednnLinear:
    """float32 weights in the order that oneDNN's kernel reads; the plain copy is not kept."""

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None) -> None:
        self.bias_N = bias_N
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight_NK.contiguous(), 16)
        self.num_bytes = weight_NK.nbytes + (0 if bias_N is None else bias_N.nbytes)

    def __call__(self, x_MK: Tensor) -> Tensor:
        y_MN: Tensor = torch.ops.mkldnn._linear_pointwise(x_MK, self.packed, self.bias_N, "none", [], "")
        return y_MN


class _FbgemmLinear:
    """float16 weights, packed. A bfloat16 weight w is exact where |w| >= 2^-14, else within 2^-25
    (subnormals)."""

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None) -> None:
        bias_N = None if bias_N is None else bias_N.float()
        self.packed = torch.ops.quantized.linear_prepack_fp16(weight_NK.float(), bias_N)
        outputs, inputs = weight_NK.shape
        packed = -(-outputs // PACKED_COLUMNS) * PACKED_COLUMNS * -(-inputs // PACKED_ROWS) * PACKED_ROWS
        self.num_bytes = 2 * packed + (0 if bias_N is None else bias_N.nbytes)

    def __call__(self, x_MK: Tensor) -> Tensor:
        y_MN: Tensor = torch.ops.quantized.linear_dynamic_fp16(x_MK, self.packed)
        return y_MN


@functools.cache
def _row_padding(make: Make) -> tuple[int, ...]:
    """Rows to add to 1 .. PIECE_ROWS rows, so that no row differs from its result in a large batch.

    Kernels for one or two left-over rows may add in another order, and so may a single row of many inputs.
    Which counts leave such rows depends on the processor, so it is found by trying. Empty where that would
    take many rows.
    """
    threads = torch.get_num_threads()
    # The order of additions does not depend on threads, but hundreds of tiny calls would wait for them.
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            even = [all(of) for of in zip(*(_even_counts(make, inputs) for inputs in PROBED), strict=True)]
    finally:
        torch.set_num_threads(threads)
    # Counts a piece apart behave alike, except where a piece is too small to split: both must be even.
    good = [m for m in range(2 * PIECE_ROWS) if even[m] and even[m + PIECE_ROWS]]
    never = 3 * PIECE_ROWS
    padding = [min((m for m in good if m >= m0), default=never) - m0 for m0 in range(PIECE_ROWS)]
    return tuple(padding) if max(padding) <= MAX_PADDING else ()


def _even_counts(make: Make, inputs: int) -> list[bool]:
    """Of 1 .. 3 PIECE_ROWS rows, whether each of that many gets what it gets among more."""
    draw = torch.Generator().manual_seed(0)
    linear = make(torch.randn(48, inputs, generator=draw), None)
    x_MK = torch.randn(4 * PIECE_ROWS, inputs, generator=draw)
    y_MN = linear(x_MK)
    return [torch.equal(linear(x_MK[: m + 1]), y_MN[: m + 1]) for m in range(3 * PIECE_ROWS)]
