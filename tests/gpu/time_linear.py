"""Products of kernels/linear.py on a CUDA device: right, and how fast in chains of layers.

    python tests/gpu/time_linear.py [--models qwen,llama,smol] [--rows 1,8,64] [--seconds 200] [--out FILE]

For each count of rows, a graph of all the products of several layers (so that weights come from memory) is
timed with cuBLAS and separate kernels, then as kernels/linear_table.py has it, then changing one product at a
time; each change that helps stays. Norms are kernels of their own here, so that a product's kernel does not
depend on the one before it; time_chain.py times what they share. Every configuration is checked against
float64 before it is timed. Prints microseconds a layer, and the best configurations as lines of that table.
FILE gets every figure. Exit status 1 where a check failed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.nn.functional as F

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from linear_candidates import candidates  # noqa: E402
from linear_cases import LinearCase, linear_case, normalised  # noqa: E402
from time_kernels import BYTES_PER_US, graph_us  # noqa: E402

from slipstream.kernels import linear as linears  # noqa: E402
from slipstream.kernels.linear import LinearConfig, LinearScratch, Norm, Op, scratch_size  # noqa: E402
from slipstream.kernels.linear_table import read_cut  # noqa: E402
from slipstream.kernels.rms_norm import add_rms_norm, rms_norm  # noqa: E402
from slipstream.kernels.silu_and_mul import silu_and_mul  # noqa: E402

CUDA, BF16 = torch.device("cuda"), torch.bfloat16
ROWS = (1, 8, 64, 4, 32, 16, 2, 256, 128)
Config = LinearConfig | None
failures: list[str] = []


@dataclass(frozen=True)
class Product:
    name: str
    op: Op
    outputs: int
    inputs: int

    @property
    def normed(self) -> bool:
        """The head's input was normed before."""
        return self.op != "add" and self.name != "head"

    def default(self, rows: int) -> Config:
        return linears.choose_linear_config(self.op, rows, self.outputs, self.inputs, BF16)

    def choices(self, rows: int) -> list[LinearConfig]:
        return candidates(self.op, rows, self.outputs, self.inputs)


def layer_of(hidden: int, qkv: int, heads: int, inner: int) -> list[Product]:
    return [
        Product("qkv", "plain", qkv, hidden),
        Product("o", "add", hidden, heads),
        Product("gate_up", "gated", 2 * inner, hidden),
        Product("down", "add", hidden, inner),
    ]


def alone(*sizes: int) -> list[Product]:
    return [Product("head", "plain", *sizes)]


# Products that are timed in one chain.
MODELS = {
    "qwen": (layer_of(1024, 4096, 2048, 3072), alone(151936, 1024)),
    "llama": (layer_of(4096, 6144, 4096, 14336), alone(128256, 4096)),
    "smol": (layer_of(576, 960, 576, 1536), alone(49152, 576)),
    # What an EAGLE-3 drafter for llama has of its own.
    "eagle3": (alone(4096, 12288), alone(6144, 8192), alone(32000, 4096)),
}


def short(config: Config) -> str:
    if config is None:
        return "cuBLAS"
    c = config
    splits, held = f"/{c.splits}" * (c.splits > 1), f"h{c.held}" * (c.held > 0)
    text = f"{c.kind[0]}{c.rows}x{c.columns}x{c.depth}{splits}w{c.warps}n{c.stages}{held}"
    return text + "e" * c.early


def other_trigger(config: LinearConfig) -> LinearConfig:
    return replace(config, early=not config.early)


class Chain:
    """Several layers' products, each with weights of its own, on one residual. As in the decoder: what cuBLAS
    adds to the residual waits for the next norm, and attention is left out."""

    def __init__(self, products: list[Product], scratch: LinearScratch) -> None:
        self.products, self.scratch = products, scratch
        each = sum(product.outputs * product.inputs * 2 for product in products)
        self.floor = each / BYTES_PER_US
        copies = int(min(28, max(3, 1e9 // each)))
        self.weights = [[self._weight(p) for p in products] for _ in range(copies)]
        first = products[0].inputs
        self.norm = Norm(torch.ones(first, device=CUDA), 1e-6)

    def _weight(self, product: Product) -> torch.Tensor:
        shape = (product.outputs, product.inputs)
        return torch.empty(shape, device=CUDA, dtype=BF16).normal_(0, 0.02)

    def us(self, rows: int, configs: dict[str, Config], repeats: int = 8) -> float:
        """Microseconds a layer."""
        residual = self.residual(rows)
        run = graph_us([lambda: self.run(residual, configs)], repeats)
        return run / len(self.weights)

    def residual(self, rows: int) -> torch.Tensor:
        """What goes in."""
        dtype = BF16 if self.products[0].name == "head" else torch.float32
        return torch.randn(rows, self.products[0].inputs, device=CUDA).to(dtype)

    def run(self, residual: torch.Tensor, configs: dict[str, Config]) -> None:
        delta = None
        for weights in self.weights:
            x = residual
            for product, weight in zip(self.products, weights, strict=True):
                config = configs[product.name]
                if product.op == "add":
                    x = x[:, : product.inputs]
                    if config is None:
                        delta = F.linear(x, weight)
                    else:
                        linears.add_linear(x, weight, None, residual, config, self.scratch)
                    continue
                x = self._normed(product, residual, delta, weight, config)
                delta = None

    def _normed(
        self, product: Product, residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor,
        config: Config,
    ) -> torch.Tensor:
        """A product that begins with a norm, or the head, whose input was normed before."""
        x = residual
        if product.normed:
            weight_K, eps = self.norm.weight_K, self.norm.eps
            x = rms_norm(x, weight_K, eps, BF16) if delta is None else (
                add_rms_norm(x, delta, weight_K, eps, BF16)
            )
        if config is None:
            y = F.linear(x, weight)
            return silu_and_mul(y) if product.op == "gated" else y
        product_of = linears.gated_linear if product.op == "gated" else linears.linear
        return product_of(x, weight, None, config, self.scratch)


class Checker:
    """Results against float64, once for each configuration, shape and count of rows."""

    def __init__(self, scratch: LinearScratch) -> None:
        self.scratch = scratch
        self.verdicts: dict[tuple[Product, int, LinearConfig], bool] = {}
        self.case: Any = None

    def good(self, product: Product, rows: int, config: Config) -> bool:
        if config is None:
            return True
        key = (product, rows, config)
        if key not in self.verdicts:
            self.verdicts[key] = self._try(product, rows, config)
        return self.verdicts[key]

    def _try(self, product: Product, rows: int, config: LinearConfig) -> bool:
        try:
            error = self._error(product, rows, config)
        except Exception as problem:
            if "shared memory" not in str(problem) and "OutOfResources" not in repr(problem):
                failures.append(f"{product.name} {rows} {short(config)}: {str(problem)[:200]}")
            return False
        if not error < 1e-2:
            failures.append(f"{product.name} {rows} {short(config)}: error {error:.1e}")
        return error < 1e-2

    def _error(self, product: Product, rows: int, config: LinearConfig) -> float:
        if self.case is None or self.case[0] != (product, rows):
            case = linear_case(rows, product.outputs, product.inputs, BF16, gap=16, device=CUDA)
            self.case = ((product, rows), case, case.expected(product.op))
        _, case, expected = self.case
        outs = []
        for _ in range(2):
            poison = torch.full(expected.shape, float("nan"), device=CUDA, dtype=BF16)
            del poison  # most likely the place of the result
            outs.append(product_of_case(product.op, case, config, self.scratch))
        if not torch.equal(*outs) or self.scratch.counter.any():
            return float("inf")
        off = (outs[0].double() - expected).norm(dim=1) / expected.norm(dim=1)
        return float(off.nan_to_num(float("inf")).max())


class Search:
    """Coordinate descent over a chain's configurations, one line a product."""

    def __init__(self, checker: Checker, out: TextIO, deadline: float) -> None:
        self.checker, self.out, self.deadline = checker, out, deadline
        self.best: list[tuple[Product, int, Config]] = []

    def _usable(self, product: Product, rows: int, config: Config) -> bool:
        return time.monotonic() < self.deadline and self.checker.good(product, rows, config)

    def descend(self, model: str, chain: Chain, rows: int) -> None:
        """Product after product, the likeliest first; once more among each one's fastest; then triggers."""
        products = chain.products
        nothing: dict[str, Config] = {product.name: None for product in products}
        table = {p.name: d if self._usable(p, rows, d := p.default(rows)) else None for p in products}
        choices = {p.name: [c for c in p.choices(rows) if self._usable(p, rows, c)] for p in products}
        now = {name: next(iter(found), None) for name, found in choices.items()}
        cublas, before, least = (chain.us(rows, each) for each in (nothing, table, now))
        fastest: dict[str, list[tuple[float, Config]]] = {}
        for turn, product in itertools.product(range(3), products):
            name, config = product.name, now[product.name]
            trials = [None, *choices[name]] if turn == 0 else [c for _, c in fastest[name][:4]]
            if turn == 2:
                trials = [other_trigger(config)] if config else []
            tried = sorted(
                ((chain.us(rows, now | {name: c}), c) for c in trials if self._usable(product, rows, c)),
                key=lambda each: each[0],
            )
            if turn == 0:
                fastest[name] = tried
            for us, each in tried:
                self.out.write(f"{model:5s} M {rows:3d} {name:7s} {us:8.2f} {short(each)} ({turn})\n")
            if tried and tried[0][0] < least:
                least, now[name] = tried[0]
        if before < least:
            least, now = before, table
        self.best += [(product, rows, now[product.name]) for product in products]
        torch.cuda.empty_cache()
        self.out.flush()
        notes = []
        for name, tried in fastest.items():
            others = " ".join(f"{short(c)} {us:.1f}" for us, c in tried[:3])
            without = next((f"{us:.1f}" for us, c in tried if c is None), "?")
            notes.append(f"\n  {name} {short(now[name])} (first {others}, cuBLAS {without})")
        times = f"cuBLAS {cublas:.2f} table {before:.2f} best {least:.2f} floor {chain.floor:.2f}"
        print(f"{model} M {rows}: {times}", *notes, sep="", flush=True)

    def table(self) -> str:
        """What is best, as kernels/linear_table.py has it."""
        cuts: dict[Product, dict[int, str | None]] = {}
        for product, rows, config in self.best:
            cuts.setdefault(product, {})[rows] = short(config) if config else None
        lines = []
        for p, found in cuts.items():
            each = [f"{rows}: " + (f'"{cut}"' if cut else "None") for rows, cut in sorted(found.items())]
            lines.append(f'("{p.op}", {p.outputs}, {p.inputs}): {{{", ".join(each)}}},')
        return "\n".join(lines)


def check_shared_norms() -> None:
    """A norm between a sum and a product that share it, for each kind of kernel."""
    cuts = ("v1x8x1024w4n3", "d8x16x512w4n3", "s16x16x512w4n1", "t64x64x128/2w4n3h2", "t16x64x128w4n4")
    for rows, (before, after) in itertools.product((1, 7, 16, 50), itertools.product(cuts, cuts)):
        first, second = (LinearConfig(**read_cut(cut)) for cut in (before, after))
        case = linear_case(rows, 1024, 2048, BF16, gap=16, device=CUDA)
        scratch = LinearScratch(1 << 18, 64, CUDA)
        norm, residual = Norm(0.5 + torch.rand(1024, device=CUDA), 1e-5), case.residual_MN.clone()
        scaled = linears.add_linear(case.x_MK, case.weight_NK, None, residual, first, scratch, norm)
        weight = torch.randn(1024, 1024, device=CUDA).div(32).to(BF16)
        assert scaled is not None
        expected = normalised(residual, norm) @ weight.double().T
        for _ in range(3):
            got = linears.linear(scaled, weight, None, second, scratch).double()
            error = float(((got - expected).norm(dim=1) / expected.norm(dim=1)).max())
            if not error < 1e-2:
                failures.append(f"norm between {before} and {after}, {rows} rows: error {error:.1e}")


def product_of_case(
    op: Op, case: LinearCase, config: LinearConfig, scratch: LinearScratch | None = None
) -> torch.Tensor:
    if op == "add":
        residual = case.residual_MN.clone()
        scratch = scratch or LinearScratch(0, 0, CUDA)
        linears.add_linear(case.x_MK, case.weight_NK, case.bias_N, residual, config, scratch)
        return residual
    product_of = linears.gated_linear if op == "gated" else linears.linear
    return product_of(case.given(), case.weight_NK, case.bias_N, config, scratch)


def all_kernels(models: list[str], counts: list[int]) -> list[tuple[Product, int, LinearConfig]]:
    """In the order of timing; kernels that several counts share are listed once."""
    seen: dict[tuple[Product, LinearConfig], int] = {}
    for model in models:
        for rows in counts:
            for product in itertools.chain(*MODELS[model]):
                for config in product.choices(rows):
                    seen.setdefault((product, config), rows)
                    # Those of tiles compile fast enough when they are wanted.
                    if config.kind != "tile":
                        seen.setdefault((product, other_trigger(config)), rows)
    return [(product, rows, config) for (product, config), rows in seen.items()]


class CompileOnly:
    """A Triton kernel whose launches only fill the cache on disk."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self.kernel.warmup(*args, grid=grid, **options)


def compile_part(part: int, parts: int, models: list[str], counts: list[int]) -> None:
    for name in ("slab_kernel", "vector_kernel", "direct_kernel", "tile_kernel"):
        setattr(linears, name, CompileOnly(getattr(linears, name)))
    weights: dict[Product, torch.Tensor] = {}
    for product, rows, config in all_kernels(models, counts)[part::parts]:
        if product not in weights:
            weights = {product: torch.empty(product.outputs, product.inputs, device=CUDA, dtype=BF16)}
        weight = weights[product]
        x = torch.empty(rows, product.inputs, device=CUDA, dtype=BF16)
        scratch = LinearScratch(*scratch_size(rows, product.outputs, config), CUDA)
        residual = torch.empty(rows, product.outputs, device=CUDA)
        try:
            product_of_case(product.op, LinearCase(x, weight, None, None, residual), config, scratch)
        except Exception as problem:
            print(f"{product.name} {short(config)}: {str(problem)[:100]}", flush=True)


def precompile(args: argparse.Namespace, deadline: float) -> None:
    count = max(1, min(14, (os.cpu_count() or 2) - 2))
    command = [sys.executable, __file__, "--models", args.models, "--rows", args.rows, "--compile-part"]
    start = time.monotonic()
    workers = [subprocess.Popen([*command, str(part), str(count)]) for part in range(count)]
    for worker in workers:
        try:
            worker.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()
    kernels = len(all_kernels(args.models.split(","), list(map(int, args.rows.split(",")))))
    print(f"{kernels} kernels compiled in {time.monotonic() - start:.0f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="qwen,llama,smol")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--out", default=os.devnull)
    parser.add_argument("--compile-part", type=int, nargs=2)
    args = parser.parse_args()
    models, counts = args.models.split(","), list(map(int, args.rows.split(",")))
    if args.compile_part:
        compile_part(*args.compile_part, models, counts)
        return 0
    begin = time.monotonic()
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    precompile(args, begin + 0.55 * args.seconds)
    check_shared_norms()
    scratch = LinearScratch(8 * 256 * 4096, 1 << 14, CUDA)
    with open(args.out, "w") as out:
        search = Search(Checker(scratch), out, begin + args.seconds - 5)
        for model in models:
            chains = [Chain(products, scratch) for products in MODELS[model]]
            for rows in counts:
                for chain in chains:
                    if time.monotonic() < search.deadline:
                        search.descend(model, chain, rows)
            del chains
        print(search.table())
    print(f"{len(failures)} failed", *failures[:20], sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
