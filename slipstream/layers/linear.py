"""Linear layers and the one place that chooses their implementation, with the reason in words.

On an x86 CPU, half-precision weights go to FBGEMM (float16 weights packed once, float32 activations) and
float32 weights to oneDNN (packed once): both stream packed weights at memory speed for a few rows, where
F.linear does not. Everywhere else F.linear runs in the weights' own type. Legend: M rows, N outputs, K
inputs.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

Tensor = torch.Tensor

HALF_MAX = 65504.0
# FBGEMM splits a batch into pieces of at most this many rows before it chooses row groups.
FBGEMM_ROWS = 120


class Linear(Protocol):
    """y = x W^T + b. num_bytes: memory of the weights as they are kept."""

    num_bytes: int

    def __call__(self, x_MK: Tensor) -> Tensor: ...


class HalfRangeError(ValueError):
    """A weight that float16 cannot hold; the caller chooses again without FBGEMM."""


@dataclass(frozen=True, slots=True)
class LinearBackend:
    """A choice. activation_dtype: what goes in and comes out. make(weight_NK, bias_N or None, name) packs one
    layer.

    even_rows(M): the least count of rows, at least M, at which every row's result is the same, bit for bit,
    in any batch. A caller that pads its rows to it gets answers that do not depend on who else is in the
    step.
    """

    name: str
    reason: str
    activation_dtype: torch.dtype
    make: Callable[[Tensor, Tensor | None, str], Linear]
    even_rows: Callable[[int], int]


def choose_linear(dtype: torch.dtype, device: torch.device, refused: str = "") -> LinearBackend:
    """The backend for weights of dtype on device. refused: why FBGEMM cannot be used, after a
    HalfRangeError."""
    kind = str(dtype).removeprefix("torch.")
    x86 = device.type == "cpu" and platform.machine().lower() in ("x86_64", "amd64")
    if x86 and dtype is torch.float32 and torch.backends.mkldnn.enabled:
        reason = "float32 on an x86 CPU: oneDNN with packed weights"
        return LinearBackend("onednn", reason, dtype, _OnednnLinear, _even_rows_onednn)
    fbgemm = x86 and "fbgemm" in torch.backends.quantized.supported_engines
    if fbgemm and dtype in (torch.bfloat16, torch.float16) and not refused:
        reason = f"{kind} on an x86 CPU: FBGEMM, float16 packed weights with float32 activations"
        return LinearBackend("fbgemm", reason, torch.float32, _FbgemmLinear, _even_rows_fbgemm)
    reason = f"F.linear in {kind} on {device.type}" + (f": {refused}" if refused else "")
    return LinearBackend("torch", reason, dtype, _TorchLinear, _any_rows)


class _TorchLinear:
    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None, name: str) -> None:
        self.weight_NK, self.bias_N = weight_NK, bias_N
        self.num_bytes = weight_NK.nbytes + (0 if bias_N is None else bias_N.nbytes)

    def __call__(self, x_MK: Tensor) -> Tensor:
        return F.linear(x_MK, self.weight_NK, self.bias_N)


class _OnednnLinear:
    """float32 weights in the order that oneDNN's kernel reads; the plain copy is not kept."""

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None, name: str) -> None:
        self.bias_N = bias_N
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight_NK.contiguous(), 16)
        self.num_bytes = weight_NK.nbytes + (0 if bias_N is None else bias_N.nbytes)

    def __call__(self, x_MK: Tensor) -> Tensor:
        y_MN: Tensor = torch.ops.mkldnn._linear_pointwise(x_MK, self.packed, self.bias_N, "none", [], "")
        return y_MN


class _FbgemmLinear:
    """float16 weights, packed. A bfloat16 weight w is exact where |w| >= 2^-14, else within 2^-25
    (subnormals)."""

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None, name: str) -> None:
        largest = weight_NK.abs().max().item()
        if not largest <= HALF_MAX:
            raise HalfRangeError(f"{name} holds a weight of {largest:g}, beyond float16's {HALF_MAX:g}")
        bias_N = None if bias_N is None else bias_N.float()
        self.packed = torch.ops.quantized.linear_prepack_fp16(weight_NK.float(), bias_N)
        self.num_bytes = 2 * weight_NK.numel() + (0 if bias_N is None else bias_N.nbytes)

    def __call__(self, x_MK: Tensor) -> Tensor:
        y_MN: Tensor = torch.ops.quantized.linear_dynamic_fp16(x_MK, self.packed)
        return y_MN


def _any_rows(rows: int) -> int:
    return rows


def _even_rows_onednn(rows: int) -> int:
    return _next_even(rows, _probe(_OnednnLinear))


def _even_rows_fbgemm(rows: int) -> int:
    return _next_even(rows, _probe(_FbgemmLinear))


def _next_even(rows: int, uneven: frozenset[int]) -> int:
    whole, rest = divmod(rows - 1, FBGEMM_ROWS)
    rest += 1
    while rest in uneven or (whole and rest + FBGEMM_ROWS in uneven):
        rest += 1
    return whole * FBGEMM_ROWS + rest


@functools.cache
def _probe(make: Callable[[Tensor, Tensor | None, str], Linear]) -> frozenset[int]:
    """Counts of rows, up to two pieces, at which some row differs from its result in a large batch: kernels
    for one or two left-over rows add in another order. Found by trying, since it depends on the processor
    (about 10 ms)."""
    draw = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        linear = make(torch.randn(48, 80, generator=draw), None, "probe")
        x_MK = torch.randn(4 * FBGEMM_ROWS, 80, generator=draw)
        y_MN = linear(x_MK)
        counts = range(1, 2 * FBGEMM_ROWS + 1)
        return frozenset(m for m in counts if not torch.equal(linear(x_MK[:m]), y_MN[:m]))
