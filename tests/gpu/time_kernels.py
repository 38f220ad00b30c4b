"""How fast the kernels are: CUDA-graph replay at the shapes of Qwen3-0.6B, and a sweep of decode
configurations. check_kernels.py runs it."""

from __future__ import annotations

import itertools
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from kernel_cases import rope_table

from slipstream.kernels import (
    decode_attention,
    greedy,
    qkv_write,
    rms_norm,
    silu_and_mul,
    varlen_attention,
)
from slipstream.kernels.attention_common import LayerAttention
from slipstream.kernels.decode_config import DecodeConfig, DecodeScratch, choose_decode
from slipstream.kernels.lane_order import order_lanes
from slipstream.kernels.paged import PagedLanes, PagedPool
from slipstream.kernels.qkv_write import HeadPrep
from slipstream.kernels.varlen_attention import VarlenConfig, choose_varlen, list_tiles

CUDA, BF16 = torch.device("cuda"), torch.bfloat16
# Measured: a read-only stream, and dense bfloat16 products.
BYTES_PER_US, FLOPS_PER_US = 4.59e6, 790e6
QWEN = LayerAttention(16, 8, 128, 128**-0.5)
MODULES = (greedy, rms_norm, silu_and_mul, qkv_write, decode_attention, varlen_attention)


@contextmanager
def without_pdl() -> Iterator[None]:
    kept = [module.pdl_options for module in MODULES]
    for module in MODULES:
        module.pdl_options = lambda tensor: {"PDL": False, "launch_pdl": False}
    try:
        yield
    finally:
        for module, options in zip(MODULES, kept, strict=True):
            module.pdl_options = options


def graph_us(runs: list[Callable[[], object]], repeats: int = 12) -> float:
    """Median microseconds of one of `runs`, captured one after the other in one graph."""
    for run in runs[:2]:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(runs))
    return statistics.median(times)


def report(name: str, runs: list[Callable[[], object]], floor: float) -> None:
    try:
        with_pdl = graph_us(runs)
        with without_pdl():
            plain = graph_us(runs)
        ratio = with_pdl / max(floor, 1e-3)
        print(f"{name:52s} {with_pdl:9.2f} {plain:9.2f} {floor:9.2f} {ratio:7.1f}x", flush=True)
    except Exception as problem:
        print(f"{name}: {problem!r}", flush=True)


class DecodeLoad:
    """Lanes of equal context over random pages; a pool for each of several layers, so that nothing stays in
    the L2 cache."""

    def __init__(self, lanes: int, context: int, shape: LayerAttention = QWEN) -> None:
        self.shape, self.lanes = shape, lanes
        self.bytes = lanes * context * 2 * shape.num_kv_heads * shape.head_dim * 2
        blocks = -(-context // 16)
        layers = max(4, min(28, int(3e8 // self.bytes)))
        size = (lanes * blocks + 1, shape.num_kv_heads, 16, shape.head_dim)
        self.pools = [
            PagedPool(*(torch.randn(size, device=CUDA, dtype=BF16) for _ in range(2))) for _ in range(layers)
        ]
        table = (torch.randperm(lanes * blocks, device=CUDA) + 1).int().view(lanes, blocks)
        length = torch.full((lanes,), context, dtype=torch.int32, device=CUDA)
        self.paged = PagedLanes(torch.arange(lanes, device=CUDA), length, table)
        self.slot = table[:, -1].long() * 16 + (context - 1) % 16
        heads = shape.num_heads + 2 * shape.num_kv_heads
        self.qkv = torch.randn(lanes, heads, shape.head_dim, device=CUDA, dtype=BF16)
        norm = torch.ones(1, shape.head_dim, device=CUDA).expand(heads - shape.num_kv_heads, -1)
        self.prep = HeadPrep(rope_table(context, shape.head_dim, CUDA), norm, 1e-6)

    def runs(self, config: DecodeConfig) -> list[Callable[[], object]]:
        """A launch a pool; the order of lanes is made here, once."""
        scratch = DecodeScratch(self.lanes, self.shape, self.lanes * config.splits, CUDA)
        order_L = order_lanes(self.paged.length_L) if config.ordered else None
        return [
            lambda p=pool: decode_attention.decode_from_qkv(
                self.qkv, self.slot, self.prep, self.paged, p, self.shape, config, scratch, order_L
            )
            for pool in self.pools
        ]

    def make_ragged(self) -> DecodeLoad:
        """Lengths from 1 to the context, the same each time."""
        generator = torch.Generator(device=CUDA).manual_seed(self.lanes)
        length = self.paged.length_L
        length.random_(1, int(length.max()) + 1, generator=generator)
        last = (length.long() - 1) // 16
        self.slot = self.paged.blocks_RB.gather(1, last[:, None])[:, 0].long() * 16 + (length - 1) % 16
        self.bytes = int(length.sum()) * 2 * self.shape.num_kv_heads * self.shape.head_dim * 2
        return self


def varlen_runs(
    lanes: int, tokens: int, context: int, shape: LayerAttention = QWEN, config: VarlenConfig | None = None
) -> list[Callable[[], object]]:
    """lanes x tokens new tokens after `context` others. config: the one chosen, unless given."""
    load = DecodeLoad(lanes, context + tokens, shape)
    start = torch.arange(0, lanes * tokens + 1, tokens, dtype=torch.int32, device=CUDA)
    paged = PagedLanes(load.paged.row_L, load.paged.length_L, load.paged.blocks_RB, start)
    q = torch.randn(lanes * tokens, shape.num_heads, shape.head_dim, device=CUDA, dtype=BF16)
    chosen = config or choose_varlen(shape, BF16)
    tiles, out = list_tiles(paged, len(q), chosen.queries(shape)), torch.empty_like(q)
    return [
        lambda p=pool: varlen_attention.varlen_attention(q, tiles, paged, p, shape, chosen, out)
        for pool in load.pools[:4]
    ]


def time_all() -> None:
    """One line a kernel and load."""
    print(f"\n{'microseconds a launch':52s} {'PDL':>9s} {'plain':>9s} {'floor':>9s}")
    for lanes, context in (*itertools.product((1, 8, 64, 256), (384, 1024)), (8, 12000)):
        load = DecodeLoad(lanes, context)
        runs, floor = load.runs(choose_decode(lanes, QWEN, BF16)), load.bytes / BYTES_PER_US
        report(f"decode from qkv, {lanes} lanes, context {context}", runs, floor)
    for lanes, tokens, context in ((8, 1024, 0), (1, 8192, 0), (1, 2048, 10000)):
        seen = tokens * context + tokens * (tokens + 1) / 2
        floor = lanes * seen * 4 * 16 * 128 / FLOPS_PER_US
        runs = varlen_runs(lanes, tokens, context)
        report(f"varlen, {lanes} x {tokens} tokens after {context}", runs, floor)
    for lanes in (1, 8, 64, 256):
        logits = [torch.randn(lanes, 151936, device=CUDA) for _ in range(3)]
        runs = [lambda x=each: greedy.choose_greedy(x) for each in logits]
        report(f"greedy choice, {lanes} lanes", runs, logits[0].nbytes / BYTES_PER_US)
    for tokens in (1, 8, 64, 256, 8192):
        time_layer_kernels(tokens)


def time_layer_kernels(tokens: int) -> None:
    weight, pool = torch.ones(1024, device=CUDA), DecodeLoad(8, 1024).pools[0]
    prep = HeadPrep(rope_table(1024, 128, CUDA), torch.ones(24, 128, device=CUDA), 1e-6)
    residual = torch.randn(tokens, 1024, device=CUDA)
    delta, gate_up = (torch.randn(tokens, n, device=CUDA, dtype=BF16) for n in (1024, 6144))
    qkv = torch.randn(tokens, 32, 128, device=CUDA, dtype=BF16)
    place = torch.arange(tokens, device=CUDA) % 1024
    slot = place + 16
    for name, run, size in (
        ("add and RMSNorm", lambda: rms_norm.add_rms_norm(residual, delta, weight, 1e-6, BF16), 1024 * 12),
        ("silu and mul", lambda: silu_and_mul.silu_and_mul(gate_up), 3072 * 6),
        ("q/k norm and KV write", lambda: qkv_write.write_qkv(qkv, place, slot, 8, prep, pool), 4096 * 4),
    ):
        report(f"{name}, {tokens} tokens", [run] * 20, tokens * size / BYTES_PER_US)


def configs(splits: tuple[int, ...], *choices: tuple[int, int, int], least: int = 1) -> list[DecodeConfig]:
    """choices: tile, warps, stages."""
    return [DecodeConfig(s, t, w, n, least) for s in splits for t, w, n in choices]


SWEEP = {
    1: configs((8, 16, 32), (16, 1, 3), (32, 1, 3), (32, 2, 3), (64, 4, 3)),
    8: configs((4, 8, 16), (16, 1, 4), (32, 1, 3), (32, 2, 3), (64, 4, 3)),
    64: configs((1, 2), (16, 1, 3), (32, 1, 2), (32, 1, 3), (32, 2, 3), (64, 4, 2), (64, 4, 3))
    + configs((8,), (64, 4, 3), least=16),
    256: configs((1,), (16, 1, 2), (16, 1, 3), (16, 1, 4), (32, 1, 2), (32, 1, 3), (32, 2, 2), (32, 2, 3))
    + configs((1,), (64, 2, 2), (64, 4, 2))
    + configs((2, 4), (32, 1, 2), least=64),
}


def compile_part(part: int, parts: int) -> None:
    """Fill Triton's cache with a share of the sweep's kernels, alignment and all."""
    for lanes, choices in SWEEP.items():
        for config in choices[part::parts]:
            with torch.no_grad():
                DecodeLoad(lanes, 64).runs(config)[0]()
    torch.cuda.synchronize()


def sweep(deadline: float, workers: list[subprocess.Popen[bytes]]) -> None:
    for worker in workers:
        try:
            worker.wait(max(1.0, deadline - 25 - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()
    print("\nsweep: microseconds a launch at context 384 and 1024, best first")
    for lanes, choices in SWEEP.items():
        loads = [DecodeLoad(lanes, context) for context in (384, 1024)]
        results = []
        for config in choices:
            if time.monotonic() > deadline:
                print("(out of time)")
                break
            try:
                results.append(([graph_us(load.runs(config), 6) for load in loads], config))
            except Exception as problem:
                print(f"{config}: {problem!r}")
        results.sort(key=lambda each: sum(each[0]))
        for times, config in results:
            print(f"{lanes:4d} lanes {times[0]:8.2f} {times[1]:8.2f}  {config}", flush=True)
        del loads
