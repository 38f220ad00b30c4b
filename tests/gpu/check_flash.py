"""FlashAttention 3 as an attention backend on a Hopper GPU: right, also from a graph whose lengths change,
and how fast beside Triton's varlen kernel, in other forms too (varlen_candidates.py), and with larger blocks.

    PYTHONPATH=FOLDER_WITH_FA3_FWD python tests/gpu/check_flash.py [--seconds 95] [--only check|time]

A line a check (worst relative error of a token against float64 formulas), then a line a load: microseconds
and TFLOP/s of one layer by CUDA-graph replay over several pools. Exit status 1 where a check failed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]

from check_kernels import check, error_of, failures  # noqa: E402
from kernel_cases import AttentionCase, attention_case  # noqa: E402
from time_kernels import BF16, CUDA, QWEN, graph_us  # noqa: E402
from varlen_candidates import CANDIDATES, Candidate, candidate_attention  # noqa: E402

from slipstream.attention.paged_flash import PagedFlashAttention  # noqa: E402
from slipstream.attention.protocol import AttentionBatch  # noqa: E402
from slipstream.config.flash import TILE_KEYS  # noqa: E402
from slipstream.kernels.attention_common import LayerAttention  # noqa: E402
from slipstream.kernels.flash_attention import flash_attention, flash_lanes, installed_build  # noqa: E402
from slipstream.kernels.paged import PagedLanes, PagedPool  # noqa: E402
from slipstream.kernels.precompile import Workers, list_launches  # noqa: E402
from slipstream.kernels.qkv_write import HeadPrep  # noqa: E402
from slipstream.kernels.varlen_attention import choose_varlen, list_tiles, varlen_attention  # noqa: E402

Runs = list[Callable[[], object]]
LLAMA = LayerAttention(32, 8, 128, 128**-0.5)
# Each pair has the same lanes and tokens, 600, and other lengths.
FIRST = [(40, 1), (0, 1), (0, 300), (333, 70), (3, 2), (0, 1), (900, 225)]
SECOND = [(0, 130), (700, 1), (1, 1), (1200, 1), (127, 2), (128, 256), (0, 209)]
CHECKED = (
    (QWEN, 128), (LLAMA, 128), (LLAMA, 256), (LayerAttention(9, 3, 64, 0.125), 128),
    (LayerAttention(32, 8, 128, 0.09, soft_cap=20.0), 128), (LayerAttention(6, 2, 96, 0.1), 144),
    (LayerAttention(8, 1, 256, 0.07), 80),
)  # fmt: skip
# What a build without FlashAttention's other paths refuses.
PATHS = ((QWEN, 16), (QWEN, 64), (LayerAttention(16, 8, 128, 0.09, window=100), 128))
# Lanes, new tokens of each, tokens before them, and beside them as many lanes of one token.
LOADS = [
    (4, 2048, 0, 0), (8, 1024, 11000, 0), (1, 8192, 0, 0), (4, 1984, 64, 256), (8, 128, 2000, 0),
    (4, 128, 4000, 0), (64, 8, 1000, 0),
]  # fmt: skip
SHAPES = {"Llama-8B": LLAMA, "Qwen3-0.6B": QWEN}
POOLS = 3


class Captured:
    """One layer's step in a graph, over memory that takes either of two cases."""

    def __init__(self, shape: LayerAttention, block_size: int) -> None:
        self.cases = [
            attention_case(
                shape, lanes, dtype=BF16, device=CUDA, block_size=block_size, mixed=True, seed=seed,
                normed=shape.head_dim != 64,
            )
            for seed, lanes in enumerate((FIRST, SECOND))
        ]  # fmt: skip
        a, b = self.cases
        blocks = max(len(case.pool.keys) for case in self.cases)
        width = max(case.lanes.blocks_RB.shape[1] for case in self.cases)
        self.backend = PagedFlashAttention(
            [shape], block_size, BF16, CUDA, max_lanes=len(FIRST), max_len=10**9, least_tokens=1
        )
        self.backend.allocate(blocks)
        rows = a.lanes.blocks_RB.shape[0]
        start = a.lanes.query_start_L1
        assert start is not None
        self.qkv, self.position, self.slot = a.qkv_TXD.contiguous(), a.position_T.clone(), a.slot_T.clone()
        self.row, self.length, self.start = a.lanes.row_L.clone(), a.lanes.length_L.clone(), start.clone()
        self.table = torch.zeros(rows, width, dtype=torch.int32, device=CUDA)
        rope = max((case.prep.rope_P2D for case in self.cases), key=len)
        self.norm = None if a.prep.norm_YD is None else a.prep.norm_YD.clone()
        self.prep = HeadPrep(rope, self.norm, 1e-6)
        self.put(b)

    def put(self, case: AttentionCase) -> None:
        """Places that no key was written to hold zeros, as in a fresh pool."""
        assert case.lanes.query_start_L1 is not None
        pool = self.backend.pools[0]
        for whole, part in ((pool.keys, case.pool.keys), (pool.values, case.pool.values)):
            whole.zero_()[: len(part)] = part.nan_to_num(0.0)
        for target, source in (
            (self.qkv, case.qkv_TXD), (self.position, case.position_T), (self.slot, case.slot_T),
            (self.row, case.lanes.row_L), (self.length, case.lanes.length_L),
            (self.start, case.lanes.query_start_L1),
        ):  # fmt: skip
            target.copy_(source)
        if self.norm is not None and case.prep.norm_YD is not None:
            self.norm.copy_(case.prep.norm_YD)
        # Ids past a lane's length are out of any pool: nothing may follow them.
        self.table.fill_(2**30)
        self.table[:, : case.lanes.blocks_RB.shape[1]] = case.lanes.blocks_RB

    def run(self) -> torch.Tensor:
        none = np.zeros(0, np.int32)
        batch = AttentionBatch(
            self.start, self.length, self.position, self.slot, self.row, self.table, none, none, 0
        )
        return self.backend.bind(batch).from_qkv(0, self.qkv, self.prep)

    def error(self) -> float:
        """Of both cases by replay, in turns; repeats agree to the bit."""
        self.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = self.run()
        worst, seen = 0.0, dict[int, torch.Tensor]()
        for number in (0, 1, 0, 1):
            case = self.cases[number]
            self.put(case)
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, seen.setdefault(number, out.clone())), "repeats differ"
            worst = max(worst, error_of(out, case.expected()))
        return worst


def run_checks(lacks: frozenset[str], made: list[Captured]) -> None:
    for (shape, block_size), captured in zip(CHECKED, made, strict=True):
        name = f"{shape.num_heads}/{shape.num_kv_heads} x {shape.head_dim} cap {shape.soft_cap}"
        check(f"{name}, blocks of {block_size}, in a graph", captured.error, 1e-2)
    for shape, block_size in PATHS:
        name = f"blocks of {block_size}, window {shape.window}"
        if "LOCAL" not in lacks and "PAGEDKV" not in lacks:
            check(name, Captured(shape, block_size).error, 1e-2)
            continue
        try:
            error = Captured(shape, block_size).error()
            print(f"note {name}: works all the same, error {error:.1e}", flush=True)
        except RuntimeError as problem:
            print(f"note {name}: {str(problem).splitlines()[0][:100]}", flush=True)
    tma = [each for each in CANDIDATES if each.tma]
    for config in (CANDIDATES[0], *tma):
        for shape in SHAPES.values():
            name = f"{brief(config)} {shape.num_heads}/{shape.num_kv_heads}"
            check(name, lambda c=config, s=shape: candidate_error(s, c), 1e-2)


def candidate_error(shape: LayerAttention, config: Candidate) -> float:
    case = attention_case(
        shape, FIRST, dtype=BF16, device=CUDA, block_size=128 if config.tma else 16, mixed=True
    ).with_step_stored()
    pool = PagedPool(case.pool.keys.nan_to_num(0.0), case.pool.values.nan_to_num(0.0))
    out = torch.full(case.q_prepared.shape, float("nan"), dtype=BF16, device=CUDA)
    tiles = list_tiles(case.lanes, len(out), config.rows // shape.group)
    candidate_attention(case.q_prepared.to(BF16), tiles, case.lanes, pool, shape, config, out)
    several = torch.bincount(case.lane_T)[case.lane_T] > 1
    return error_of(out[several], case.expected()[several])


class Load:
    """A step's lanes over random pages."""

    def __init__(
        self, lanes: int, tokens: int, context: int, singles: int, shape: LayerAttention, block_size: int
    ) -> None:
        self.shape = shape
        counts = torch.tensor([1] * singles + [tokens] * lanes)
        ends = torch.tensor([384] * singles + [context + tokens] * lanes)
        blocks = -(-int(ends.max()) // block_size)
        ids = (torch.randperm(len(counts) * blocks, device=CUDA) + 1).int()
        start = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).int().to(CUDA)
        self.lanes = PagedLanes(
            torch.arange(len(counts), device=CUDA), ends.int().to(CUDA), ids.view(-1, blocks), start
        )
        size = (len(counts) * blocks + 1, shape.num_kv_heads, block_size, shape.head_dim)
        self.pools = [
            PagedPool(*(torch.randn(size, device=CUDA, dtype=BF16) for _ in range(2))) for _ in range(POOLS)
        ]
        self.q = torch.randn(int(counts.sum()), shape.num_heads, shape.head_dim, device=CUDA, dtype=BF16)
        self.out = torch.empty_like(self.q)
        seen = lanes * (tokens * context + tokens * (tokens + 1) / 2)
        self.operations = seen * 4 * shape.num_heads * shape.head_dim

    def triton(self) -> Runs:
        config = choose_varlen(self.shape, BF16)
        tiles = list_tiles(self.lanes, len(self.q), config.queries(self.shape))
        return [
            lambda p=pool: varlen_attention(self.q, tiles, self.lanes, p, self.shape, config, self.out)
            for pool in self.pools
        ]

    def candidate(self, config: Candidate) -> Runs:
        tiles = list_tiles(self.lanes, len(self.q), config.rows // self.shape.group)
        return [
            lambda p=pool: candidate_attention(self.q, tiles, self.lanes, p, self.shape, config, self.out)
            for pool in self.pools
        ]

    def flash(self) -> Runs:
        own = flash_lanes(self.lanes)
        return [
            lambda p=pool: flash_attention(self.q, own, self.lanes, p, self.shape, self.out)
            for pool in self.pools
        ]


def brief(config: Candidate) -> str:
    extra = "tma" * config.tma + f"r{config.registers}" * (config.registers is not None)
    return f"{config.rows}x{config.tile}w{config.warps}n{config.stages}{extra}"


def racers(load: Load, block_size: int, flash_sizes: tuple[int, ...]) -> Iterator[tuple[str, Runs]]:
    """Who runs on blocks of this size."""
    yield f"triton@{block_size}", load.triton()
    if block_size in flash_sizes:
        yield f"flash@{block_size}", load.flash()
    for config in CANDIDATES:
        if block_size == (128 if config.tma else 16):
            yield brief(config), load.candidate(config)


def time_loads(deadline: float, block_sizes: tuple[int, ...], flash_sizes: tuple[int, ...]) -> None:
    print("microseconds (TFLOP/s) of a layer, @ block size; others: rows x tile, warps, stages, registers")
    for (lanes, tokens, context, singles), (name, shape) in (
        (load, item) for load in LOADS for item in SHAPES.items()
    ):
        if time.monotonic() > deadline:
            print("(out of time)")
            return
        parts = []
        for block_size in block_sizes:
            load = Load(lanes, tokens, context, singles, shape, block_size)
            for who, runs in racers(load, block_size, flash_sizes):
                try:
                    us = graph_us(runs, 5)
                    parts.append(f"{who} {us:.0f} ({load.operations / us / 1e6:.0f})")
                except Exception as problem:
                    parts.append(f"{who}: {str(problem).splitlines()[0][:60]}")
            del load
        beside = f" + {singles} x 1" * (singles > 0)
        print(f"{name} {lanes} x {tokens} after {context}{beside}: " + ", ".join(parts), flush=True)


def launch_all(block_sizes: tuple[int, ...], made: list[Captured]) -> None:
    """Every Triton kernel that is checked or timed, on loads of few pages."""
    for captured in made:
        captured.run()
    for shape in SHAPES.values():
        for block_size in block_sizes:
            load = Load(2, 64, 0, 0, shape, block_size)
            for _, runs in racers(load, block_size, ()):
                runs[0]()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=95.0)
    parser.add_argument("--only", choices=("check", "time"))
    args = parser.parse_args()
    begin = time.monotonic()
    torch.manual_seed(0)
    lacks = installed_build()
    if lacks is None:
        print("fa3-fwd is not on the path: Triton alone is timed", flush=True)
    keys = TILE_KEYS[QWEN.head_dim]
    block_sizes = (16, 64, 128, 256)
    flash_sizes = tuple(
        size for size in block_sizes if lacks is not None and (size % keys == 0 or "PAGEDKV" not in lacks)
    )
    workers = Workers(torch.cuda.get_device_capability())
    checked = args.only != "time" and lacks is not None
    made = [Captured(*each) for each in CHECKED] if checked else []
    workers.compile(list_launches(lambda: launch_all(block_sizes, made)))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, the build lacks "
          f"{', '.join(sorted(lacks or ()))}; {time.monotonic() - begin:.0f} s", flush=True)  # fmt: skip
    if checked and lacks is not None:
        run_checks(lacks, made)
        print(f"{len(failures)} checks failed; {time.monotonic() - begin:.0f} s", flush=True)
    if args.only != "check":
        time_loads(begin + args.seconds - 8, block_sizes, flash_sizes)
    print(f"{time.monotonic() - begin:.0f} s", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
