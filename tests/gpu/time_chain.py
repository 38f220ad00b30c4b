"""Which kernels of a decode step at few lanes let their successor start at once: whole layers of the real
models' shapes, many in one CUDA graph, as the engine runs them.

    python tests/gpu/time_chain.py [--seconds 95] [--lanes 1,2,4,8] [--models llama,qwen]

A line a model and count of lanes: microseconds a layer by graph replay, as the package chooses, then with
other choices (a attention, q o g d products qkv, o, gate_up, down trigger early), and the floor of bytes over
4.59 TB/s. Every choice must give the same bits, 20 replays long. Exit status 1 where one does not.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]

from time_kernels import BF16, BYTES_PER_US, CUDA, graph_us  # noqa: E402

from slipstream.attention import paged_triton  # noqa: E402
from slipstream.attention.paged_triton import PagedTritonAttention  # noqa: E402
from slipstream.attention.protocol import AttentionBatch  # noqa: E402
from slipstream.kernels.decode_config import DecodeConfig, choose_decode  # noqa: E402
from slipstream.kernels.linear import LinearConfig, choose_linear_config  # noqa: E402
from slipstream.kernels.precompile import Workers, list_launches  # noqa: E402
from slipstream.loading import read_spec  # noqa: E402
from slipstream.loading.load import load_model  # noqa: E402
from slipstream.models import maths_fused  # noqa: E402

CONTEXT, BLOCK_SIZE = 384, 16
COMMON = {
    "vocab_size": 1024, "max_position_embeddings": 1024, "torch_dtype": "bfloat16", "head_dim": 128,
    "num_key_value_heads": 8,
}  # fmt: skip
# Layers enough for weights to come from memory.
MODELS: dict[str, dict[str, Any]] = {
    "llama": COMMON | {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
        "num_attention_heads": 32, "num_hidden_layers": 12, "tie_word_embeddings": False,
    },
    "qwen": COMMON | {
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "intermediate_size": 3072,
        "num_attention_heads": 16, "num_hidden_layers": 28, "tie_word_embeddings": True,
    },
}  # fmt: skip
# Who triggers early; and with a decode configuration of its own.
TRIALS: tuple[tuple[str, DecodeConfig | None], ...] = (
    ("", None), ("a", None), ("ao", None), ("aq", None), ("ag", None), ("aqo", None), ("aqogd", None),
    ("qogd", None), ("a", DecodeConfig(8, 64, 4, 3)), ("a", DecodeConfig(16, 32, 1, 3)),
)  # fmt: skip
failures: list[str] = []


class Chain:
    """A model's layers and one decode batch of equal lengths over random pages."""

    def __init__(self, name: str, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(MODELS[name]))
        self.spec = spec = read_spec(str(folder))
        self.model = load_model(
            str(folder), spec, dtype=BF16, device=CUDA, load_format="dummy", seed=1, fused=True,
            batch_invariant=False,
        )  # fmt: skip
        heads = spec.num_heads + 2 * spec.num_kv_heads
        self.products = {
            "q": ("plain", heads * spec.head_dim, spec.hidden_size),
            "o": ("add", spec.hidden_size, spec.num_heads * spec.head_dim),
            "g": ("gated", 2 * spec.intermediate_size, spec.hidden_size),
            "d": ("add", spec.hidden_size, spec.intermediate_size),
        }
        weights = sum(outputs * inputs * 2 for _, outputs, inputs in self.products.values())
        self.bytes, self.lane_bytes = weights, CONTEXT * 2 * spec.num_kv_heads * spec.head_dim * 2

    def floor(self, lanes: int) -> float:
        """Microseconds a layer."""
        return (self.bytes + lanes * self.lane_bytes) / BYTES_PER_US

    def step(self, lanes: int) -> Callable[[], torch.Tensor]:
        blocks = CONTEXT // BLOCK_SIZE
        attention = PagedTritonAttention(self.model.attention, BLOCK_SIZE, BF16, CUDA, max_lanes=lanes)
        attention.allocate(lanes * blocks + 1)
        generator = torch.Generator(device=CUDA).manual_seed(lanes)
        for pool in attention.pools:
            pool.keys.normal_(generator=generator)
            pool.values.normal_(generator=generator)
        ids = torch.randperm(lanes * blocks, device=CUDA, generator=generator)
        table = (ids + 1).int().view(lanes, blocks)
        length = torch.full((lanes,), CONTEXT, dtype=torch.int32, device=CUDA)
        slot = table[:, -1].long() * BLOCK_SIZE + BLOCK_SIZE - 1
        start = torch.arange(lanes + 1, device=CUDA).int()
        tokens, position = torch.arange(lanes, device=CUDA) + 7, length.long() - 1
        none = np.zeros(0, np.int32)
        batch = AttentionBatch(
            start, length, position, slot, torch.arange(lanes, device=CUDA), table, none, none, lanes
        )
        return lambda: self.model.forward(tokens, position, attention.bind(batch))

    @contextmanager
    def choosing(self, early: str, decode: DecodeConfig | None) -> Iterator[None]:
        """The package's choices, with these kernels early."""
        wanted = [self.products[name] for name in early if name != "a"]

        def attention(lanes: int, *rest: Any) -> DecodeConfig:
            return replace(decode or choose_decode(lanes, *rest), early="a" in early)

        def product(op: Any, rows: int, outputs: int, inputs: int, *rest: Any) -> LinearConfig | None:
            config = choose_linear_config(op, rows, outputs, inputs, *rest)
            here = (op, outputs, inputs) in wanted
            return replace(config, early=True) if config is not None and here else config

        kept = paged_triton.choose_decode, maths_fused.choose_linear_config
        paged_triton.choose_decode = attention
        maths_fused.choose_linear_config = product
        try:
            yield
        finally:
            paged_triton.choose_decode, maths_fused.choose_linear_config = kept


def launch_all(chains: dict[str, Chain], counts: list[int]) -> None:
    for chain in chains.values():
        whole, chain.model = chain.model, chain.model.of_each_kind()
        for lanes in counts:
            for trial in TRIALS:
                with chain.choosing(*trial):
                    chain.step(lanes)()
        chain.model = whole


def repeats(step: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What a graph of the step gives, the same each time; infinite where it is not."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    graph.replay()
    first, same = out.clone(), True
    for _ in range(20):
        graph.replay()
        same &= torch.equal(out, first)
    return first if same else torch.full_like(first, float("inf"))


def race(name: str, chain: Chain, lanes: int) -> None:
    layers, found = chain.spec.num_layers, []
    expected: dict[DecodeConfig | None, torch.Tensor] = {}
    for early, decode in TRIALS:
        label = (early or "as chosen") + (f" {decode.splits}x{decode.tile}w{decode.warps}" if decode else "")
        with chain.choosing(early, decode):
            step = chain.step(lanes)
            out = repeats(step)
            us = min(graph_us([step], 10) for _ in range(2)) / layers
        # The same cut of attention gives the same sums, whoever triggers when.
        if not out.isfinite().all() or not torch.equal(out, expected.setdefault(decode, out)):
            failures.append(f"{name} {lanes} {label}")
            label += " WRONG"
        found.append(f"{label} {us:.2f}")
    print(f"{name} {lanes} lanes, floor {chain.floor(lanes):.1f}: " + ", ".join(found), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=95.0)
    parser.add_argument("--lanes", default="1,2,4,8")
    parser.add_argument("--models", default="llama,qwen")
    args = parser.parse_args()
    begin = time.monotonic()
    counts = [int(each) for each in args.lanes.split(",")]
    workers = Workers(torch.cuda.get_device_capability())
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        chains = {name: Chain(name, Path(folder) / name) for name in args.models.split(",")}
        launches = list_launches(functools.partial(launch_all, chains, counts))
        workers.compile(launches)
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {len(launches)} kernels, "
              f"{time.monotonic() - begin:.0f} s", flush=True)  # fmt: skip
        for lanes in counts:
            for name, chain in chains.items():
                if time.monotonic() < begin + args.seconds - 8:
                    race(name, chain, lanes)
    print(*failures, f"{len(failures)} wrong; {time.monotonic() - begin:.0f} s", sep="\n", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
