"""Where Triton is: the one module that imports it. Without Triton, launchers use their torch references."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from slipstream.kernels.cache import keep_compiled_kernels

log = logging.getLogger("slipstream.kernels")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# A process that only compiles kernels, for a GPU that need not be there, says so.
COMPILING = os.environ.get("SLIPSTREAM_COMPILE_KERNELS") == "1"

triton: Any = None
tl: Any = SimpleNamespace(constexpr=lambda value: value)
# Torch's CPU builds have no use for it, and where it is installed it costs time at import and words at exit.
if INTERPRETED or COMPILING or torch.version.cuda is not None:
    keep_compiled_kernels()
    try:
        triton, tl = import_module("triton"), import_module("triton.language")
    except ImportError:
        log.info("there is no Triton: kernels run in torch operations")

# The type of what a kernel is given: Triton looks its annotations up, and accepts only its own names.
if TYPE_CHECKING:
    Arg = Any
else:
    Arg = getattr(tl, "tensor", None)

HOPPER = (9, 0)
# Blocks over lanes are at least this wide, so that one compiled kernel serves any smaller count.
FEW_LANES = 256


def jit(function: Callable[..., Any]) -> Any:
    """triton.jit, or the bare function where there is no Triton to call it."""
    return function if triton is None else triton.jit(function)


def jit_with(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """jit with Triton's options.

    Numbers that change from step to step belong in do_not_specialize (pointers into the middle of a buffer in
    do_not_specialize_on_alignment): Triton would compile again, while requests wait, when one first becomes 1
    or a multiple of 16.
    """
    return lambda function: function if triton is None else triton.jit(function, **options)


def use_triton(tensor: torch.Tensor) -> bool:
    """True for CUDA tensors, and for any tensor under TRITON_INTERPRET=1, where Triton is installed."""
    return triton is not None and (tensor.is_cuda or INTERPRETED)


def pdl_options(tensor: torch.Tensor) -> dict[str, bool]:
    """Launch options for programmatic dependent launch, where the GPU has it (Hopper and later).

    A kernel launched with them starts while its predecessor still runs, so it must call `pdl_begin` before it
    touches anything that another kernel writes.
    """
    on = tensor.is_cuda and not INTERPRETED and _capability(tensor.get_device()) >= HOPPER
    return {"PDL": on, "launch_pdl": on}


@functools.cache
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def next_power_of_2(count: int) -> int:
    """The least power of two that is at least count."""
    return 1 << max(count - 1, 0).bit_length()


def ceil_div(count: int, size: int) -> int:
    """How many pieces of `size` hold `count`."""
    return -(-count // size)


@jit
def pdl_begin(PDL: tl.constexpr, EARLY: tl.constexpr = False) -> None:
    """Wait for the predecessor's writes, and let the successor's prologue start: afterwards, or with EARLY
    at once (several prologues are then in flight: for a few small programs)."""
    if PDL:
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        if not EARLY:
            tl.extra.cuda.gdc_launch_dependents()
