"""The tiles of --batch-invariant on a CUDA device: that all of them give a row the same bits, and how fast.

    python tests/gpu/check_invariance.py [--models qwen,llama] [--rows 1,8,64,256,2048,8192]

Every tile in three types, with rows here and there in batches of any size, against the first tile and against
float64. Then microseconds a layer, in chains of layers as in time_linear.py, with one product's tile changed
at a time; * marks those that kernels/linear.py chooses. Exit status 1 where bits differ.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import get_args

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]

from linear_cases import linear_case  # noqa: E402
from time_linear import BF16, CUDA, MODELS, Chain, Config, product_of_case, short  # noqa: E402

from slipstream.kernels.linear import (  # noqa: E402
    INVARIANT,
    INVARIANT_FLOAT32,
    LinearConfig,
    LinearScratch,
    Op,
    choose_linear_config,
)
from slipstream.kernels.linear_table import read_cut  # noqa: E402
from slipstream.kernels.precompile import Workers, is_listing, list_launches  # noqa: E402

# Beside those in use: others that should give the same bits.
OTHERS = (
    "t16x64x64w4n6 t16x64x128w4n4 t32x64x128w4n4 t64x64x64w4n6 t64x128x64w8n4 t128x64x64w4n4 "
    "t128x128x64w8n4"
)
TILES = [*INVARIANT, *(LinearConfig(**read_cut(cut)) for cut in OTHERS.split())]
SIZES = ((960, 576), (1024, 3072), (1030, 4088))  # the last fits no tile
SPANS = ((0, 200), (0, 1), (199, 200), (13, 30), (7, 135))
failures: list[str] = []


def check() -> None:
    """Launches everything that is to be compared; compares, where launches are done. No norm is shared by
    products that must not depend on the batch."""
    for dtype, op, size in itertools.product((BF16, torch.float16, torch.float32), get_args(Op), SIZES):
        case = linear_case(200, *size, dtype, biased=True, gap=16, device=CUDA)
        tiles, limit = (TILES, 1e-2) if dtype != torch.float32 else ([INVARIANT_FLOAT32], 1e-5)
        every = product_of_case(op, case, tiles[0])
        what = f"{op} {size} {dtype}"
        if not is_listing():
            expected = case.expected(op)
            error = float((every.double() - expected).norm() / expected.norm())
            if not error < limit:
                failures.append(f"{what}: error {error:.1e}")
        for tile, (first, last) in itertools.product(tiles, SPANS):
            got = product_of_case(op, case.only(first, last), tile)
            if not is_listing() and not torch.equal(got, every[first:last]):
                failures.append(f"{what}: rows {first} to {last} differ in {short(tile)}")


def time_tiles(model: str, chain: Chain, rows: int) -> None:
    """A line a product: microseconds a layer with each tile for it, beside what is chosen for the others."""
    chosen: dict[str, Config] = {
        p.name: choose_linear_config(p.op, rows, p.outputs, p.inputs, BF16, invariant=True)
        for p in chain.products
    }
    print(f"{model} M {rows}: chosen {chain.us(rows, chosen):.2f} floor {chain.floor:.2f}", flush=True)
    for p in chain.products:
        tried = [(chain.us(rows, chosen | {p.name: tile}), short(tile), tile) for tile in TILES]
        marks = (f"{name}{'*' * (tile == chosen[p.name])} {us:.2f}" for us, name, tile in sorted(tried))
        print(f"  {p.name}: {' '.join(marks)}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="qwen,llama")
    parser.add_argument("--rows", default="1,8,64,256,2048,8192")
    args = parser.parse_args()
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    chains = [
        (model, Chain(products, LinearScratch(0, 0, CUDA)))
        for model in args.models.split(",")
        for products in MODELS[model]
    ]

    def launch_all() -> None:
        check()
        for _, chain in chains:
            for tile in TILES:
                chain.run(chain.residual(1), {product.name: tile for product in chain.products})

    Workers(torch.cuda.get_device_capability()).compile(list_launches(launch_all))
    check()
    print(f"{len(failures)} failed", *failures[:20], sep="\n", flush=True)
    for rows, (model, chain) in itertools.product(map(int, args.rows.split(",")), chains):
        if chain.products[0].name != "head" or rows <= 256:  # no more rows are sampled in a step
            time_tiles(model, chain, rows)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
