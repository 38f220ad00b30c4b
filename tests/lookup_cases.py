"""Rows with texts that lookup has to get right, on any device, and what plain Python drafts for them: for
unit tests, the interpreter's cases and the GPU check."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import torch
from lookup_reference import SuffixReference, draft_ngram

from slipstream.speculation.ngram import Ngram
from slipstream.speculation.protocol import Drafter, DraftStep
from slipstream.speculation.suffix import Suffix

SCALARS = ("alive", "length", "prompt_len", "suffix_logged")
NGRAMS = [(1, 1, 4), (2, 4, 16), (5, 5, 3), (1, 8, 1), (3, 63, 7)]
OPTIONS = ("max_tree_depth", "max_cached_requests", "max_spec_factor", "min_token_prob", "num_drafts")
SUFFIXES: list[dict[str, Any]] = [
    dict(zip(OPTIONS, each, strict=True))
    for each in ((24, 6, 1.0, 0.1, 16), (2, 1, 3.5, 0.0, 5), (64, 0, 0.7, 0.9, 1), (9, 40, 2.0, 0.5, 8))
]


def make_text(rng: random.Random, length: int) -> list[int]:
    """Noise of few or many tokens, periods, one token only, copies with faults, an end seen before."""
    kind, vocab = rng.randrange(6), rng.choice([2, 3, 50, 49152])
    noise = [rng.randrange(vocab) for _ in range(length)]
    if kind == 0:
        return noise
    if kind == 1:
        period = rng.randrange(1, 12)
        return [noise[i % min(period, length)] for i in range(length)]
    if kind == 2:
        return [49151] * length
    part = noise[: max(length // rng.randrange(2, 5), 1)]
    text = (part * length)[:length]
    if kind == 3:
        for _ in range(length // 8):
            text[rng.randrange(length)] = rng.randrange(vocab)
    if kind == 4:
        text[-1] = 7
    return text


class Rows:
    """A table of rows, as columns that are views with gaps, and as lists. The last row is padding."""

    def __init__(self, rows: int, width: int, device: torch.device | str, seed: int) -> None:
        self.rng, self.width, self.rows = random.Random(seed), width, rows
        record = torch.zeros(rows + 1, 7, dtype=torch.int32, device=device)
        self.columns = {name: record[:, 2 * i] for i, name in enumerate(SCALARS[:3])}
        self.columns["suffix_logged"] = record[:, 5]
        self.columns["tokens"] = torch.full((rows + 1, width), 3, dtype=torch.int32, device=device)
        self.columns["length"][-1] = 9
        self.texts: list[list[int]] = [[] for _ in range(rows)]
        self.prompt_len = [0] * rows

    def admit(self, row: int, text: list[int], prompt_len: int) -> None:
        self.texts[row], self.prompt_len[row] = text, prompt_len
        self.columns["tokens"][row, : len(text)] = torch.tensor(text, dtype=torch.int32)
        for name, value in zip(SCALARS, (1, len(text), prompt_len, 0), strict=True):
            self.columns[name][row] = value

    def admit_any(self, row: int) -> None:
        length = self.rng.choice([1, 2, 3, self.width, self.rng.randrange(1, self.width + 1)])
        self.admit(row, make_text(self.rng, length), self.rng.randrange(length + 1))

    def step(self, lanes: list[int], appended: list[int]) -> DraftStep:
        device = self.columns["tokens"].device
        unused: Any = None
        return DraftStep(
            inputs=SimpleNamespace(row_L=torch.tensor(lanes, device=device)),  # type: ignore[arg-type]
            batch=unused, columns=self.columns, attention=unused, block_size=16,
            appended_L=torch.tensor(appended, dtype=torch.int32, device=device),
            source_L=unused, hidden_TH=unused, aux_TX=None, length_bound=self.width,
        )  # fmt: skip


def propose(drafter: Drafter, rows: Rows, lanes: list[int], appended: list[int]) -> list[list[int]]:
    drafts = drafter.propose(rows.step(lanes, appended))
    assert drafts.token_LK.dtype == drafts.count_L.dtype == torch.int32
    counts = drafts.count_L.tolist()
    return [line[:n] for line, n in zip(drafts.token_LK.tolist(), counts, strict=True)]


def compare_ngrams(device: torch.device | str, seed: int, rows: int = 12, width: int = 150) -> int:
    """Lanes that drafted. Every fourth lane is in its prompt, and some rows are dead."""
    drafted = 0
    for case, (least, most, count) in enumerate(NGRAMS):
        table = Rows(rows, width, device, seed + case)
        for row in range(rows):
            table.admit_any(row)
        lanes = [*table.rng.sample(range(rows), rows - 1), rows]
        appended = [lane % 4 for lane in range(rows)]
        for row in lanes[:3]:
            table.columns["alive"][row] = 0
        got = propose(Ngram(lookup_min=least, lookup_max=most, num_drafts=count), table, lanes, appended)
        for lane, row in enumerate(lanes):
            lives = 3 <= lane < rows - 1 and appended[lane]
            want = draft_ngram(table.texts[row], least, most, count) if lives else []
            assert got[lane] == want, (case, lane, table.texts[row])
            drafted += bool(want)
    return drafted


def compare_suffixes(
    device: torch.device | str, seed: int, rounds: int = 6, rows: int = 10, width: int = 90
) -> int:
    """Lanes that drafted. In every round some rows end, of which half are taken anew in the next."""
    drafted = 0
    for case, options in enumerate(SUFFIXES):
        table = Rows(rows, width, device, seed + case)
        drafter = Suffix(**options, max_model_len=width, device=torch.device(device))
        reference = SuffixReference(
            options["max_tree_depth"], options["max_spec_factor"], options["min_token_prob"],
            options["max_cached_requests"], len(drafter._log.token_S), len(drafter._log.place_BW),
        )  # fmt: skip
        alive: set[int] = set()
        for _ in range(rounds):
            for row in range(rows):
                if row not in alive and table.rng.random() < 0.6:
                    table.admit_any(row)
                    alive.add(row)
            ended = [row for row in sorted(alive) if table.rng.random() < 0.3]
            for row in ended:
                table.columns["alive"][row] = 0
                reference.finish(table.texts[row][table.prompt_len[row] :])
            alive -= set(ended)
            lanes = [*table.rng.sample(range(rows), rows), rows]
            appended = [(lane + 1) % 4 for lane in range(rows + 1)]
            got = propose(drafter, table, lanes, appended)
            for lane, row in enumerate(lanes):
                lives = row in alive and appended[lane]
                want = reference.draft(table.texts[row], options["num_drafts"]) if lives else []
                assert got[lane] == want, (case, lane, table.texts[row])
                drafted += bool(want)
    return drafted
