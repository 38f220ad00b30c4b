"""Drafters by import path (method custom_class): for a CPU, one that knows what is to come and mostly says
so; for any device, one that a graph can hold. And a number of drafts that never changes."""

from __future__ import annotations

import random
from typing import ClassVar

import torch

from slipstream.config.speculation import SpeculativeConfig
from slipstream.contracts.request import EngineRequest
from slipstream.rows.columns import Column, RowWriter
from slipstream.scheduler.drafting import NoDrafting
from slipstream.speculation.protocol import Drafts, DraftStep
from slipstream.speculation.target import Target


class FixedDrafting(NoDrafting):
    """Always as many, whatever comes of them."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def choose(self, lanes: int, tokens: int) -> int:
        return self.limit


class LastAgain:
    """Guesses that the last token comes again, and again."""

    name = "custom_class"
    columns: tuple[Column, ...] = ()
    layers = ()
    aux_layers = ()
    num_bytes = 0

    def __init__(self, target: Target, config: SpeculativeConfig) -> None:
        self.num_drafts = config.num_speculative_tokens

    def admit(self, request: EngineRequest, write: RowWriter) -> None:
        """Everything is in the tokens."""

    def propose(self, step: DraftStep) -> Drafts:
        row_L = step.inputs.row_L
        last_L = step.columns["tokens"][row_L, (step.columns["length"][row_L] - 1).long()]
        token_LK = last_L[:, None].expand(-1, self.num_drafts).contiguous()
        return Drafts(token_LK, torch.full_like(last_L, self.num_drafts))


class Broken(LastAgain):
    """Cannot be made."""

    def __init__(self, target: Target, config: SpeculativeConfig) -> None:
        raise RuntimeError("no drafts today")


class Truthful:
    """Told by `learn` what each request (prompt and seed) says; drafts all of it, one token, or none, and is
    wrong about one draft in six."""

    name = "custom_class"
    columns: tuple[Column, ...] = ()
    layers = ()
    aux_layers = ()
    num_bytes = 0
    texts: ClassVar[dict[tuple[int, ...], list[int]]] = {}

    def __init__(self, target: Target, config: SpeculativeConfig) -> None:
        self.vocab_size = target.spec.vocab_size

    @classmethod
    def learn(cls, prompt: list[int], seed: int, output: list[int]) -> None:
        cls.texts[(seed & 0xFFFFFFFF, seed >> 32, *prompt)] = output

    def admit(self, request: EngineRequest, write: RowWriter) -> None:
        """Everything is in the tokens."""

    def propose(self, step: DraftStep) -> Drafts:
        lanes = step.inputs.row_L.tolist()
        token_LK = torch.zeros(len(lanes), step.num_drafts, dtype=torch.int32)
        count_L = torch.zeros(len(lanes), dtype=torch.int32)
        for lane, row in enumerate(lanes):
            if step.appended_L[lane] > 0:
                tokens = step.columns["tokens"][row, : step.columns["length"][row]].tolist()
                guess = self.guess(row, tokens, step)[: step.num_drafts]
                token_LK[lane, : len(guess)] = torch.tensor(guess, dtype=torch.int32)
                count_L[lane] = len(guess)
        return Drafts(token_LK, count_L)

    def guess(self, row: int, tokens: list[int], step: DraftStep) -> list[int]:
        columns, chance = step.columns, random.Random(f"{tokens}")
        prompt = tokens[: int(columns["prompt_len"][row])]
        seed = int(columns["seed_lo"][row]) & 0xFFFFFFFF, int(columns["seed_hi"][row])
        known = self.texts[(*seed, *prompt)]
        said = len(tokens) - len(prompt)
        assert tokens[len(prompt) :] == known[:said], "drafting changed a text"
        count = chance.choice((0, 1, step.num_drafts, step.num_drafts))
        right = (known[said : said + count] + [5] * count)[:count]
        return [(token + (chance.random() > 5 / 6)) % self.vocab_size for token in right]
