"""What the front end is told: the news of a step's lanes, and what happened outside of any step."""

from __future__ import annotations

import time
from collections.abc import Set

import numpy as np

from slipstream.contracts.outputs import EngineOutputs, EngineStats
from slipstream.contracts.step import Finish, PromptLogprobs, StepResult, TokenLogprobs
from slipstream.scheduler.columns import Array
from slipstream.scheduler.queue import Entry

# Why a row ended with Finish.ERROR: in general, and where a grammar constrains it.
ROW_FAILED = "the logits of this request were not finite, or no token was left to choose"
NO_LEGAL_TOKEN = "structured_outputs: bans left no token that the grammar allows, or logits were not finite"


class News:
    """Collects what is not in a result until the next outputs take it along."""

    def __init__(self) -> None:
        self._cached: list[tuple[int, int]] = []
        self._admitted: list[tuple[int, float]] = []
        self._errors: list[tuple[int, str]] = []
        self._ended: list[int] = []
        self._pieces: list[tuple[int, PromptLogprobs]] = []

    def __bool__(self) -> bool:
        return bool(self._cached or self._errors)

    def cached(self, key: int, tokens: int) -> None:
        """The request was admitted for the first time."""
        self._cached.append((key, tokens))
        self._admitted.append((key, time.monotonic()))

    def failed(self, key: int, text: str, *, in_step: bool = False) -> None:
        """The request ended with an error; in_step: a lane of the coming outputs says so already."""
        self._errors.append((key, text))
        if not in_step:
            self._ended.append(key)

    def withdraw(self, keys: Set[int]) -> None:
        """Nobody wants to hear of these requests any more."""
        if self:
            self._cached = [item for item in self._cached if item[0] not in keys]
            self._admitted = [item for item in self._admitted if item[0] not in keys]
            self._errors = [item for item in self._errors if item[0] not in keys]
            self._ended = [key for key in self._ended if key not in keys]

    def scored(self, entry: Entry, piece: PromptLogprobs) -> None:
        """Prompt logprobs; positions that were delivered before a preemption are left out."""
        skip = max(entry.scored - piece.start, 0)
        if skip < len(piece.ids):
            entry.scored = piece.start + len(piece.ids)
            rest = piece if skip == 0 else PromptLogprobs(
                piece.row, piece.generation, piece.start + skip, piece.ids[skip:], piece.values[skip:],
                piece.rank[skip:],
            )
            self._pieces.append((entry.request.key, rest))

    def outputs(
        self, keys: Array, counts: Array, tokens: Array, finish: Array, logprobs: TokenLogprobs | None,
        stats: EngineStats, drafted: Array | None = None,
    ) -> EngineOutputs:
        """keys: int64 [n], the lanes with news; tokens: int32, theirs, lane after lane. Takes everything
        collected."""
        if self._ended:
            extra = len(self._ended)
            keys = np.concatenate((keys, np.array(self._ended, np.int64)))
            counts = np.concatenate((counts, np.zeros(extra, np.int32)))
            finish = np.concatenate((finish, np.full(extra, Finish.ERROR, np.int32)))
            logprobs = _padded(logprobs, extra)
            drafted = None if drafted is None else np.concatenate((drafted, np.zeros(extra, np.int32)))
        taken = EngineOutputs(
            keys, counts, tokens, finish, logprobs, self._pieces, self._cached, self._errors, stats,
            self._admitted, drafted=drafted,
        )
        self._pieces, self._cached, self._errors, self._ended, self._admitted = [], [], [], [], []
        return taken


def pick_logprobs(result: StepResult, lanes: Array | None) -> TokenLogprobs | None:
    """The rows of these lanes; None: of all."""
    found = result.logprobs
    if found is None or lanes is None:
        return found
    return TokenLogprobs(found.ids[lanes], found.values[lanes], found.rank[lanes])


def _padded(logprobs: TokenLogprobs | None, extra: int) -> TokenLogprobs | None:
    """Rows of zeros for requests that ended outside of the step."""
    if logprobs is None:
        return None
    return TokenLogprobs(*(
        np.concatenate((a, np.zeros((extra, *a.shape[1:]), a.dtype)))
        for a in (logprobs.ids, logprobs.values, logprobs.rank)
    ))
