"""PYTHONPATH=.:tests python tests/gpu/time_lookup.py [--times]: n-gram and suffix drafts on a GPU against
plain Python, from run to run and in a CUDA graph; then their cost in one. --times: no checks. About a minute.

A step is the drafter's propose(): for suffix drafts it looks for outputs to log, too.
"""

from __future__ import annotations

import random
import sys

import torch
from lookup_cases import Rows, compare_ngrams, compare_suffixes
from time_kernels import graph_us

from slipstream.speculation.ngram import Ngram
from slipstream.speculation.protocol import Drafter, DraftStep
from slipstream.speculation.suffix import Suffix

CUDA, WIDTH = torch.device("cuda"), 4096
LIMIT_US = {"ngram": 60.0, "suffix": 300.0}


def make_suffix() -> Suffix:
    return Suffix(
        max_tree_depth=24, max_cached_requests=10_000, max_spec_factor=1.0, min_token_prob=0.1,
        num_drafts=16, max_model_len=WIDTH, device=CUDA,
    )  # fmt: skip


def make_texts(kind: str, rows: int, rng: random.Random) -> list[list[int]]:
    """prose: words of uneven frequency with copied phrases; loops: a period of 40 tokens; noise: no match."""
    texts = []
    for row in range(rows):
        if kind == "loops":
            texts.append([(7 * i + row) % 40 for i in range(WIDTH - 20)])
        elif kind == "noise":
            texts.append([rng.randrange(49152) for _ in range(WIDTH - 20)])
        else:
            text = [int(49152 * rng.random() ** 6) for _ in range(WIDTH - 20)]
            for _ in range(60):
                source, target = rng.randrange(4000), rng.randrange(4000)
                text[target : target + 30] = text[source : source + 30]
            texts.append(text[: WIDTH - 20])
    return texts


def fill(kind: str, lanes: int, log_outputs: int, drafter: Drafter) -> DraftStep:
    """Rows of nearly 4,096 tokens, after past outputs of the same kind have been logged."""
    rng = random.Random(lanes)
    table = Rows(lanes, WIDTH, CUDA, 0)
    texts, lane = make_texts(kind, lanes, rng), list(range(lanes))
    step = table.step(lane, [1] * lanes)
    for begin in range(0, log_outputs, lanes):
        for row in range(min(lanes, log_outputs - begin)):
            table.admit(row, texts[(begin + row) % lanes], WIDTH - 1000)
        table.columns["alive"].zero_()
        drafter.propose(step)
    for row, text in enumerate(texts):
        table.admit(row, text, 100)
    return step


def same_every_time(drafter: Drafter, step: DraftStep) -> bool:
    """The same drafts from a graph as from launches, and in five replays."""
    want = drafter.propose(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = drafter.propose(step)
    counts, inside = want.count_L, torch.arange(16, device=CUDA) < want.count_L[:, None]
    for _ in range(5):
        got.token_LK.fill_(-5)
        graph.replay()
        if not torch.equal(got.count_L, counts):
            return False
        if not torch.equal(got.token_LK * inside, want.token_LK * inside):
            return False
    return True


def check() -> int:
    failures = 0
    for seed in range(3):
        try:
            ngrams = compare_ngrams(CUDA, seed, rows=64, width=700)
            suffixes = compare_suffixes(CUDA, seed, rows=24, width=300)
            print(f"seed {seed}: {ngrams} n-gram and {suffixes} suffix drafts as in plain Python", flush=True)
        except AssertionError as problem:
            failures += 1
            print(f"seed {seed}: DIFFERS {str(problem)[:300]}", flush=True)
    for kind in ("prose", "loops"):
        for drafter in (Ngram(lookup_min=2, lookup_max=5, num_drafts=16), make_suffix()):
            if not same_every_time(drafter, fill(kind, 32, 64, drafter)):
                failures += 1
                print(f"{drafter.name}, {kind}: NOT THE SAME every time", flush=True)
    print(f"{failures} checks failed", flush=True)
    return failures


def time_all() -> int:
    """Also with 64 outputs of 1,000 tokens that end in the step."""
    over = 0
    heads = " ".join(f"{each:>8s}" for each in ("prose", "loops", "noise"))
    print(f"{'microseconds a step':24s} {'lanes':>5s} {heads} {'limit':>6s}", flush=True)
    for name in ("ngram", "suffix"):
        for lanes in (256, 64, 1):
            spent = []
            for kind in ("prose", "loops", "noise"):
                drafter = make_suffix() if name == "suffix" else Ngram(
                    lookup_min=2, lookup_max=5, num_drafts=16
                )  # fmt: skip
                step = fill(kind, lanes, 512 if name == "suffix" else 0, drafter)
                spent.append(graph_us([lambda d=drafter, s=step: d.propose(s)] * 8, repeats=30))
            over += max(spent) > LIMIT_US[name]
            line = " ".join(f"{each:8.2f}" for each in spent)
            print(f"{name:24s} {lanes:5d} {line} {LIMIT_US[name]:6.0f}", flush=True)
    drafter = make_suffix()
    step = fill("prose", 256, 0, drafter)
    columns = step.columns
    columns["alive"][:64] = 0
    columns["prompt_len"][:64] = WIDTH - 1020

    def ending() -> None:
        columns["suffix_logged"].zero_()
        drafter.propose(step)

    print(f"{'suffix, 64 outputs end':24s} {256:5d} {graph_us([ending] * 8, repeats=30):8.2f}", flush=True)
    return over


def main() -> int:
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    failures = 0 if "--times" in sys.argv[1:] else check()
    return 1 if failures + time_all() else 0


if __name__ == "__main__":
    sys.exit(main())
