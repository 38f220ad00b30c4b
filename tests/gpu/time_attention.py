"""Attention natively on a CUDA device: right in every form, and how fast with each choice of its numbers.

    python tests/gpu/time_attention.py [--seconds 200] [--only decode|prefill]

All kernels are first compiled side by side. Then comes, for each load, the best configuration by CUDA-graph
replay (GB/s beside a read-only stream's 4,590, TFLOP/s beside 790), and behind it the others by how much more
time they take; and the best of each load as a table that Python reads. Exit status 1 where a check failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]

import check_kernels  # noqa: E402
from check_kernels import decode_error, mixed_error  # noqa: E402
from kernel_cases import attention_case, with_float8_pool  # noqa: E402
from time_kernels import (  # noqa: E402
    BF16,
    BYTES_PER_US,
    CUDA,
    FLOPS_PER_US,
    QWEN,
    DecodeLoad,
    graph_us,
    varlen_runs,
)

from slipstream.kernels.attention_common import LayerAttention  # noqa: E402
from slipstream.kernels.decode_config import DecodeConfig  # noqa: E402
from slipstream.kernels.lane_order import order_lanes  # noqa: E402
from slipstream.kernels.precompile import Workers, list_launches  # noqa: E402
from slipstream.kernels.varlen_attention import VarlenConfig, list_tiles  # noqa: E402

Launches = list[Callable[[], object]]
LLAMA = LayerAttention(32, 8, 128, 128**-0.5)
# What is possible in a microsecond, and how many are one of the unit.
PEAKS = {"GB/s": (BYTES_PER_US, 1e3), "TFLOP/s": (FLOPS_PER_US, 1e6)}
SHAPES = {"Qwen3-0.6B": QWEN, "Llama-8B": LLAMA}
# Lanes, context, ragged.
DECODES = [
    (1, 384, False), (8, 384, False), (64, 384, False), (256, 384, False), (256, 1024, False),
    (8, 12000, False), (64, 768, True), (256, 1500, True),
]  # fmt: skip
# Lanes, new tokens of each, tokens before them.
PREFILLS = [(4, 2048, 0), (8, 1024, 11000)]
GRID = {
    1: [DecodeConfig(16, 64, 4, 3), DecodeConfig(16, 32, 1, 3), DecodeConfig(32, 16, 1, 3),
        DecodeConfig(8, 64, 4, 3), DecodeConfig(16, 32, 2, 3)],
    8: [DecodeConfig(16, 32, 1, 3, 2), DecodeConfig(16, 16, 1, 4), DecodeConfig(8, 32, 2, 3),
        DecodeConfig(8, 64, 4, 3), DecodeConfig(32, 32, 1, 3)],
    64: [DecodeConfig(8, 32, 1, 3, 32), DecodeConfig(8, 32, 1, 4, 32), DecodeConfig(2, 32, 1, 3),
         DecodeConfig(1, 64, 4, 4), DecodeConfig(1, 64, 2, 3), DecodeConfig(2, 16, 1, 4),
         DecodeConfig(2, 64, 2, 2)],
    256: [DecodeConfig(4, 32, 1, 2, 64), DecodeConfig(4, 32, 1, 2, 64, ordered=True),
          DecodeConfig(4, 32, 1, 3, 64, ordered=True), DecodeConfig(4, 32, 1, 2, 32, ordered=True),
          DecodeConfig(1, 32, 1, 3, ordered=True), DecodeConfig(1, 32, 2, 2, ordered=True),
          DecodeConfig(1, 64, 4, 2, ordered=True)],
}  # fmt: skip
PREFILL = [
    VarlenConfig(128, 64, 8, 3),
    VarlenConfig(128, 64, 4, 3),
    VarlenConfig(128, 32, 4, 3),
    VarlenConfig(64, 64, 4, 3),
    VarlenConfig(64, 32, 4, 3),
]
# Of checks: what not every model has.
ODD = (
    LayerAttention(6, 2, 96, 0.1, window=21),
    LayerAttention(32, 8, 128, 0.09, soft_cap=20.0),
    LayerAttention(8, 1, 256, 0.07, window=300, soft_cap=30.0),
)
SMALL = DecodeConfig(4, 16, 1, 2, ordered=True)


def launch_all(parts: Sequence[str]) -> None:
    """Every kernel that is timed, on loads of few pages. No result counts."""
    for shape in SHAPES.values():
        load = DecodeLoad(2, 64, shape)
        del load.pools[1:]
        for config in itertools.chain(*GRID.values()) if "decode" in parts else ():
            load.runs(config)[0]()
        for config in PREFILL if "prefill" in parts else ():
            varlen_runs(2, 64, 0, shape, config)[0]()


def checks(parts: Sequence[str]) -> Iterator[tuple[str, Callable[[], float], float]]:
    """Names, what gives the worst error, and its limit."""
    if "prefill" in parts:
        for (name, shape), config in itertools.product(SHAPES.items(), PREFILL):
            yield f"{name} {brief(config)}", partial(mixed_error, shape, BF16, None, config), 1e-2
    if "decode" not in parts:
        return
    ragged = [(n % 1500, 1) for n in range(0, 137 * 64, 137)]
    ragged[40] = (12000, 1)
    for name, shape in SHAPES.items():
        case = attention_case(shape, ragged, dtype=BF16, device=CUDA)
        for config in itertools.chain(*GRID.values()):
            yield f"{name} {brief(config)}, ragged, 20 times", partial(decode_error, case, config, 20), 1e-2
    for shape in ODD:
        name = f"ordered, D {shape.head_dim} w {shape.window} cap {shape.soft_cap}"
        case = attention_case(shape, check_kernels.DECODES, dtype=BF16, device=CUDA)
        yield name, partial(decode_error, case, SMALL), 1e-2
        yield f"{name}, mixed", partial(mixed_error, shape, BF16, SMALL), 1e-2
    eight = with_float8_pool(attention_case(QWEN, ragged[:9], dtype=BF16, device=CUDA), 0.03, 0.02)
    yield "ordered, float8", partial(decode_error, eight, SMALL), 3e-2


def brief(config: Any) -> str:
    """A configuration without the names of its first four fields and without defaults."""
    usual = {"min_tiles": 1, "registers": None, "ordered": False}
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    parts = [
        str(value) if name not in usual else f"{name}={value}"
        for name, value in fields.items()
        if name not in usual or value != usual[name]
    ]
    return f"{type(config).__name__}({', '.join(parts)})"


class OutOfTime(Exception):
    pass


class Timer:
    """Times configurations until the deadline, and keeps the best of each load."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self.best: dict[str, str] = {}

    def race(self, load: str, amount: float, unit: str, runs: Iterator[tuple[Any, Launches]]) -> None:
        """amount: bytes or operations of a launch. runs: configurations and their launches. One line."""
        peak, size = PEAKS[unit]
        timed: list[tuple[float, str]] = []
        for config, launches in runs:
            if time.monotonic() > self._deadline:
                raise OutOfTime
            try:
                timed.append((graph_us(launches, 6), brief(config)))
            except Exception as problem:
                print(f"{load} {brief(config)}: {problem!r}"[:300])
        if not timed:
            return
        timed.sort()
        microseconds, self.best[load] = timed[0]
        rate, share = amount / microseconds / size, amount / microseconds / peak
        behind = " ".join(f"{inside(c)}+{100 * t / microseconds - 100:.0f}%" for t, c in timed[1:])
        print(f"{load:24s} {microseconds:8.2f} us {rate:6.0f} {unit} {100 * share:4.0f}%"
              f"  {self.best[load]} | {behind}", flush=True)  # fmt: skip


def inside(config: str) -> str:
    return config[config.index("(") : config.index(")") + 1]


def time_decode(timer: Timer) -> None:
    for (lanes, context, ragged), (name, shape) in itertools.product(DECODES, SHAPES.items()):
        load = DecodeLoad(lanes, context, shape)
        if ragged:
            load.make_ragged()
        title = f"{name[:5]} {lanes} x {'<= ' if ragged else ''}{context}"
        timer.race(title, load.bytes, "GB/s", ((config, load.runs(config)) for config in GRID[lanes]))
    length_L = DecodeLoad(256, 64).paged.length_L
    ordering = graph_us([lambda: order_lanes(length_L)] * 8)
    print(f"order of 256 lanes, once a step: {ordering:.1f} us")


def time_prefill(timer: Timer) -> None:
    for (lanes, tokens, context), (name, shape) in itertools.product(PREFILLS, SHAPES.items()):
        seen = lanes * (tokens * context + tokens * (tokens + 1) / 2)
        work = seen * 4 * shape.num_heads * shape.head_dim
        runs = ((config, varlen_runs(lanes, tokens, context, shape, config)) for config in PREFILL)
        timer.race(f"{name[:5]} {lanes} x {tokens} after {context}", work, "TFLOP/s", runs)
    start = torch.arange(257, device=CUDA).int() * 32
    paged = dataclasses.replace(DecodeLoad(256, 64).paged, query_start_L1=start)
    listing = graph_us([lambda: list_tiles(paged, 8192, 64)] * 8)
    print(f"list of query tiles, 256 lanes, 8192 tokens, once a step: {listing:.1f} us")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--check", action="store_true", help="afterwards, every configuration")
    parser.add_argument("--only", choices=("decode", "prefill"))
    args = parser.parse_args()
    begin = time.monotonic()
    timer = Timer(begin + args.seconds - 5)
    parts = (args.only,) if args.only else ("prefill", "decode")
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    workers = Workers(torch.cuda.get_device_capability())
    launches = list_launches(lambda: launch_all(parts))
    workers.compile(launches)
    print(torch.cuda.get_device_name(), torch.__version__, f"{len(launches)} kernels compiled in "
          f"{time.monotonic() - begin:.0f} s", flush=True)  # fmt: skip
    try:
        for part in parts:
            {"decode": time_decode, "prefill": time_prefill}[part](timer)
    except OutOfTime:
        print("(out of time)")
    print("BEST = {" + ",\n        ".join(f'"{load}": {config}' for load, config in timer.best.items()) + "}")
    print(f"{time.monotonic() - begin:.0f} s", flush=True)
    for name, run, limit in checks(parts) if args.check else ():
        check_kernels.check(name, run, limit)
    failed = check_kernels.failures
    print(f"{len(failed)} checks failed; {time.monotonic() - begin:.0f} s gone", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
