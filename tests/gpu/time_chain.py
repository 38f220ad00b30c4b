"""Cuts of the products of whole layers of the real models' shapes, many in one CUDA graph with attention, as
the engine runs them: which are the fastest beside each other.

    python tests/gpu/time_chain.py [--seconds 200] [--lanes 1,2,4,8] [--tokens 1]
        [--models llama,qwen,smollm2] [--context 384]
        [--what decode,shares,d,o,g,q,d early,o early,g early,q early]

For each model and count of lanes: microseconds a layer by graph replay, as the package chooses, and with the
best that was found, beside the floor of bytes over 4.59 TB/s. One thing is changed at a time: attention's
cut, whether norms are shared, each product's cut, who triggers early; what helps stays. Then the products'
cuts as kernels/linear_table.py has them. --tokens: of a lane, as in steps that verify drafts. --context: keys
of a lane, 384; 100-2000 draws each lane's, 384+12000 gives one of them more. --what: what is changed. Every
result must be finite, the same in 20 replays, and near the first.
Exit status 1 where one is not.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]

from linear_candidates import candidates  # noqa: E402
from time_kernels import BF16, BYTES_PER_US, CUDA, graph_us  # noqa: E402
from time_linear import short  # noqa: E402
from triton.runtime.errors import OutOfResources  # noqa: E402

from slipstream.attention import paged_triton  # noqa: E402
from slipstream.attention.paged_triton import PagedTritonAttention  # noqa: E402
from slipstream.attention.protocol import AttentionBatch  # noqa: E402
from slipstream.kernels.decode_config import DecodeConfig, choose_decode  # noqa: E402
from slipstream.kernels.linear import LinearConfig, choose_linear_config  # noqa: E402
from slipstream.kernels.precompile import Workers, list_launches  # noqa: E402
from slipstream.kernels.verify_attention import PROGRAMS, VerifyConfig, choose_verify  # noqa: E402
from slipstream.loading import read_spec  # noqa: E402
from slipstream.loading.load import load_model  # noqa: E402
from slipstream.models import maths_fused  # noqa: E402
from slipstream.models.maths_fused import FusedLinear  # noqa: E402

BLOCK_SIZE = 16
COMMON = {
    "vocab_size": 1024, "max_position_embeddings": 32768, "torch_dtype": "bfloat16", "head_dim": 128,
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
    "smollm2": COMMON | {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "intermediate_size": 1536, "head_dim": 64,
        "num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": 30,
        "tie_word_embeddings": True,
    },
}  # fmt: skip

# Splits, tile, warps, stages, least tiles, programs.
CUTS = (
    (32, 32, 1, 3, 1), (32, 32, 1, 3, 3), (16, 32, 1, 4, 3, 512), (16, 32, 1, 3, 6, 768),
    (16, 32, 1, 4, 6, 512), (32, 32, 1, 4, 6, 512), (16, 32, 1, 3, 16), (8, 32, 1, 3, 6), (8, 32, 1, 4, 16),
    (8, 32, 1, 2, 16), (8, 64, 4, 2, 8), (2, 64, 4, 3, 16),
)  # fmt: skip
DECODES = tuple(DecodeConfig(*cut, early=early) for cut in CUTS for early in (False, True))
DECODES += tuple(
    DecodeConfig(splits, 32, 1, stages, least, ordered=True)
    for splits, least in ((8, 32), (4, 64), (8, 64))
    for stages in (2, 3)
)
VERIFIES = tuple(
    VerifyConfig(0, 0, *cut)
    for cut in (
        (32, 32, 2, 3, 2), (32, 32, 1, 3, 4), (32, 32, 4, 3, 3), (8, 32, 2, 3, 6), (8, 32, 4, 3, 2),
        (2, 32, 2, 3, 2), (32, 64, 4, 3, 2), (32, 64, 4, 3, 4), (32, 64, 4, 3, 16), (8, 64, 4, 3, 3),
        (2, 64, 4, 3, 16), (1, 64, 4, 3, 1), (32, 64, 2, 2, 3), (2, 64, 2, 2, 1), (1, 64, 4, 4, 1),
        (1, 128, 4, 2, 1),
    )
)
# What is tried one after the other, and in which of three rounds: kernels are compiled before each.
ROUNDS = (("decode", "shares", "d", "o"), ("g", "q"), ("d early", "o early", "g early", "q early"))
failures: list[str] = []


@dataclass(frozen=True)
class Choice:
    """cuts: of products that are not as the package chooses. shares: whether norms are shared; None as it
    chooses."""

    decode: DecodeConfig | VerifyConfig | None = None
    shares: bool | None = None
    cuts: tuple[tuple[str, LinearConfig | None], ...] = ()

    def cut(self, name: str, config: LinearConfig | None) -> Choice:
        return replace(self, cuts=(*(each for each in self.cuts if each[0] != name), (name, config)))


def lengths(context: str, lanes: int) -> torch.Tensor:
    """Keys of each lane, as --context says it."""
    if "-" in context:
        low, high = map(int, context.split("-"))
        return torch.randint(low, high + 1, (lanes,), generator=torch.Generator().manual_seed(lanes))
    usual, _, one = context.partition("+")
    length_L = torch.full((lanes,), int(usual))
    length_L[lanes // 2] += int(one or usual) - int(usual)
    return length_L


class Chain:
    """A model's layers and one decode batch over random pages. context: see lengths."""

    def __init__(self, name: str, folder: Path, context: str) -> None:
        folder.mkdir(parents=True)
        self.context = context
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
        self.bytes, self.key_bytes = weights, 2 * spec.num_kv_heads * spec.head_dim * 2

    def floor(self, lanes: int) -> float:
        """Microseconds a layer."""
        return (self.bytes + int(lengths(self.context, lanes).sum()) * self.key_bytes) / BYTES_PER_US

    def step(self, lanes: int, each: int) -> Callable[[], torch.Tensor]:
        """each: tokens of a lane."""
        length = lengths(self.context, lanes)
        blocks = (length + BLOCK_SIZE - 1) // BLOCK_SIZE
        pages = int(blocks.sum())
        attention = PagedTritonAttention(self.model.attention, BLOCK_SIZE, BF16, CUDA, max_lanes=lanes)
        attention.allocate(pages + 1)
        generator = torch.Generator(device=CUDA).manual_seed(lanes)
        for pool in attention.pools:
            pool.keys.normal_(generator=generator)
            pool.values.normal_(generator=generator)
        ids = (torch.randperm(pages, generator=torch.Generator().manual_seed(lanes)) + 1).int()
        table = torch.nn.utils.rnn.pad_sequence(ids.split(blocks.tolist()), batch_first=True)
        own = length[:, None] - each + torch.arange(each)
        slot = (table.gather(1, own // BLOCK_SIZE).long() * BLOCK_SIZE + own % BLOCK_SIZE).flatten().to(CUDA)
        position, table, length = own.flatten().to(CUDA), table.to(CUDA), length.int().to(CUDA)
        start = torch.arange(lanes + 1, device=CUDA).int() * each
        tokens = torch.arange(lanes * each, device=CUDA) + 7
        none = np.zeros(0, np.int32)
        batch = AttentionBatch(
            start, length, position, slot, torch.arange(lanes, device=CUDA), table, none, none, lanes, each
        )
        return lambda: self.model.forward(tokens, position, attention.bind(batch))

    def config(self, choice: Choice, name: str, lanes: int) -> LinearConfig | None:
        op, outputs, inputs = self.products[name]
        return dict(choice.cuts).get(name, choose_linear_config(op, lanes, outputs, inputs, BF16))

    def alternatives(self, choice: Choice, what: str, lanes: int, each: int) -> list[Choice]:
        """The choice with one thing changed."""
        if what == "decode":
            return [replace(choice, decode=config) for config in (DECODES if each == 1 else VERIFIES)]
        rows = lanes * each
        if what == "shares":
            return [replace(choice, shares=shares) for shares in (False, True)]
        name = what[0]
        now = self.config(choice, name, rows)
        if what.endswith("early"):
            return [choice.cut(name, replace(now, early=not now.early))] if now else []
        op, outputs, inputs = self.products[name]
        return [choice.cut(name, config) for config in (None, *candidates(op, rows, outputs, inputs))]

    @contextmanager
    def choosing(self, choice: Choice) -> Iterator[None]:
        names = {size: name for name, size in self.products.items()}

        def attention(*given: Any) -> DecodeConfig:
            return choice.decode if isinstance(choice.decode, DecodeConfig) else choose_decode(*given)

        def verify(lanes: int, tokens: int, *rest: Any) -> VerifyConfig:
            usual = choose_verify(lanes, tokens, *rest)
            if not isinstance(choice.decode, VerifyConfig):
                return usual
            work = lanes * self.spec.num_kv_heads * usual.chunks(self.model.attention[0])
            splits = min(choice.decode.splits, 1 << (max(1, PROGRAMS // work).bit_length() - 1))
            return replace(choice.decode, tokens=tokens, rows=usual.rows, splits=splits)

        def product(op: Any, rows: int, outputs: int, inputs: int, *rest: Any) -> LinearConfig | None:
            return self.config(choice, names[op, outputs, inputs], rows)

        def shares(linear: Any, rows: int, config: LinearConfig) -> bool:
            return usual_shares(linear, rows, config) if choice.shares is None else choice.shares

        usual_shares = FusedLinear.shares
        kept = paged_triton.choose_decode, paged_triton.choose_verify, maths_fused.choose_linear_config
        paged_triton.choose_decode, paged_triton.choose_verify = attention, verify
        maths_fused.choose_linear_config = product
        FusedLinear.shares = shares
        try:
            yield
        finally:
            paged_triton.choose_decode, paged_triton.choose_verify, maths_fused.choose_linear_config = kept
            FusedLinear.shares = usual_shares


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


class Search:
    """Of one model at one count of lanes."""

    def __init__(self, name: str, chain: Chain, lanes: int, each: int) -> None:
        self.name, self.chain, self.lanes, self.each = name, chain, lanes, each
        self.choice, self.notes = Choice(), []
        self.first: torch.Tensor | None = None
        self.before = self.least = 0.0

    def alternatives(self, what: str) -> list[Choice]:
        return self.chain.alternatives(self.choice, what, self.lanes, self.each)

    def launch_all(self, what: tuple[str, ...]) -> None:
        """Every kernel of what is tried of these."""
        whole, self.chain.model = self.chain.model, self.chain.model.of_each_kind()
        others = [c for each in what for c in self.alternatives(each)]
        for choice in (self.choice, *others):
            with self.chain.choosing(choice):
                self.chain.step(self.lanes, self.each)()
        self.chain.model = whole

    def us(self, choice: Choice) -> float:
        """A layer's microseconds; infinite where the result is wrong or there is no room for the kernel."""
        with self.chain.choosing(choice):
            step = self.chain.step(self.lanes, self.each)
            try:
                out = repeats(step).double()
            except OutOfResources:
                return float("inf")
            us = min(graph_us([step], 10) for _ in range(2)) / self.chain.spec.num_layers
        if self.first is None:
            self.first = out
        off = float((out - self.first).norm() / self.first.norm())
        if not off < 0.05:
            failures.append(f"{self.name} {self.lanes} lanes, off {off:.1e}: {choice}")
            return float("inf")
        return us

    def descend(self, what: tuple[str, ...], deadline: float) -> None:
        if not self.before:
            self.before = self.least = self.us(self.choice)
        for each in what:
            if time.monotonic() > deadline:
                return
            tried = [(self.us(c), c) for c in self.alternatives(each)]
            tried.sort(key=lambda pair: pair[0])
            best = ", ".join(f"{self._text(each, c)} {us:.2f}" for us, c in tried[:4])
            self.notes.append(f"{each}: {best}")
            if tried and tried[0][0] < self.least - 0.05:
                self.least, self.choice = tried[0]

    def _text(self, what: str, choice: Choice) -> str:
        if what == "decode":
            decode = choice.decode
            assert decode is not None
            cut = f"{decode.splits}x{decode.tile}w{decode.warps}n{decode.stages}m{decode.min_tiles}"
            if isinstance(decode, DecodeConfig):
                cut += f"p{decode.programs}" if decode.programs else ""
                cut += "o" * decode.ordered + "e" * decode.early
            return cut
        if what == "shares":
            return str(choice.shares)
        return short(self.chain.config(choice, what[0], self.lanes * self.each))

    def report(self) -> None:
        print(
            f"{self.name} {self.lanes} lanes of {self.each}: {self.before:.2f}, best {self.least:.2f}, floor "
            f"{self.chain.floor(self.lanes):.1f} us a layer; decode {self.choice.decode}, shares "
            f"{self.choice.shares}", *self.notes, sep="\n  ",
        )  # fmt: skip
        for name, size in self.chain.products.items():
            rows = self.lanes * self.each
            print(f"  {size}: {rows}: {short(self.chain.config(self.choice, name, rows))}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--lanes", default="1,2,4,8")
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--models", default="llama,qwen")
    parser.add_argument("--context", default="384")
    parser.add_argument("--what", default=",".join(itertools.chain(*ROUNDS)))
    args = parser.parse_args()
    begin = time.monotonic()
    capability = torch.cuda.get_device_capability()
    workers = Workers(capability)
    maths_fused._most_scratch = lambda *given: (8 * 256 * 4096, 1 << 14)  # whatever is tried
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        chains = {name: Chain(name, Path(folder) / name, args.context) for name in args.models.split(",")}
        counts = [int(lanes) for lanes in args.lanes.split(",")]
        searches = [
            Search(name, chain, lanes, args.tokens) for lanes in counts for name, chain in chains.items()
        ]
        asked = args.what.split(",")
        for each_round in ROUNDS:
            what = tuple(each for each in each_round if each in asked)
            if not what:
                continue
            launches = list_launches(lambda what=what: [search.launch_all(what) for search in searches])
            workers.compile(launches)
            workers = Workers(capability)
            print(f"{len(launches)} kernels, {time.monotonic() - begin:.0f} s", flush=True)
            for search in searches:
                search.descend(what, begin + args.seconds - 10)
        for search in searches:
            search.report()
    workers.stop()
    print(*failures, f"{len(failures)} wrong; {time.monotonic() - begin:.0f} s", sep="\n", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
