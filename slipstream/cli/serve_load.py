"""The load of `slipstream bench serve`: prompts cut out of real text, lengths as chats have them, arrivals.
Knows nothing of servers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.cli.flags import file_of

CHARACTERS_A_TOKEN = 4.2  # of English, vocabularies of 50,000 to 150,000; where no tokenizer is given
# Means of ShareGPT's conversations as the vLLM paper has them (Kwon et al. 2023, figure 11), in tokens.
CHAT_INPUT_MEAN, CHAT_OUTPUT_MEAN = 161.31, 337.99
_CHAT_INPUT_SIGMA, _CHAT_OUTPUT_SIGMA = 1.2, 0.9  # of the logarithm
_CHAT_INPUT_ENDS, _CHAT_OUTPUT_ENDS, _CHAT_TOTAL = (4, 1024), (4, 1024), 2048
Lengths = tuple[int, int]
Count = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: its prompt, the most tokens of its answer, and seconds after the start at which it is
    due."""

    prompt: str
    max_tokens: int
    due: float


def ramp(strategy: str, start: float, end: float, count: int) -> np.ndarray:
    """float64 [count], the rate at each request from start to end, as vLLM has it. strategy: "linear" or
    "exponential"."""
    progress = np.arange(count) / max(count - 1, 1)
    if strategy == "linear":
        return np.asarray(start + (end - start) * progress)
    return np.asarray(start * (end / start) ** progress)


def arrivals(
    random: np.random.Generator, count: int, rate: float | np.ndarray, burstiness: float
) -> np.ndarray:
    """float64 [count] seconds. rate: requests a second, at each request where it is an array, inf: all at
    once. burstiness: the shape of the gamma distribution of intervals, as vLLM has it: 1 is a Poisson
    process, less comes in bursts, more evenly."""
    if np.isinf(rate).any():
        return np.zeros(count)
    times: np.ndarray = np.cumsum(random.gamma(burstiness, 1.0 / (rate * burstiness), count))
    return times - times[0] if count else times


def chat_lengths(random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """int64 [count] tokens of prompts and of answers: log-normal, with ShareGPT's means before they are cut
    to what its users keep (4 to 1024 each, 2048 together)."""

    def drawn(mean: float, sigma: float, ends: Lengths) -> np.ndarray:
        logs = random.normal(np.log(mean) - sigma**2 / 2, sigma, count)
        return np.clip(np.exp(logs).astype(np.int64), *ends)

    inputs = drawn(CHAT_INPUT_MEAN, _CHAT_INPUT_SIGMA, _CHAT_INPUT_ENDS)
    outputs = drawn(CHAT_OUTPUT_MEAN, _CHAT_OUTPUT_SIGMA, _CHAT_OUTPUT_ENDS)
    return inputs, np.minimum(outputs, _CHAT_TOTAL - inputs)


def even_lengths(random: np.random.Generator, ends: Lengths, count: int) -> np.ndarray:
    """int64 [count], evenly drawn, both ends included."""
    return random.integers(ends[0], ends[1] + 1, count)


class Excerpts:
    """Pieces of a text, each from a place of its own, so that no prefix cache knows them."""

    def __init__(self, text: str, random: np.random.Generator, encode: Callable[[str], list[int]] | None,
                 decode: Callable[[Sequence[int]], str] | None) -> None:
        self._random = random
        self._text, self._decode = text, decode
        self._ids = None if encode is None else encode(text)

    def take(self, tokens: int) -> str:
        """About so many tokens; with a tokenizer exactly so, but for what joins up again when encoded.
        Raises ValueError for a text that is shorter."""
        source: Sequence[Any] = self._text if self._ids is None else self._ids
        size = round(tokens * CHARACTERS_A_TOKEN) if self._ids is None else tokens
        if size > len(source):
            raise ValueError(f"--text: is too short for a prompt of {tokens} tokens")
        begin = int(self._random.integers(0, len(source) - size + 1))
        piece = source[begin : begin + size]
        if self._ids is None or self._decode is None:
            return str(piece)
        return self._decode(piece)


def default_text() -> str:
    """Prose that every Python has: its own help texts, 0.7 MB."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values())


def conversations(path: Path, count: Count) -> Iterator[tuple[str, int]]:
    """Of a file in ShareGPT's format: the first turn of each conversation, and tokens of the answer to it.
    Raises ValueError for another format."""
    with file_of("--dataset", path):
        text = path.read_text("utf-8")
    try:
        talks = json.loads(text)
        for talk in talks:
            turns = talk.get("conversations", talk.get("conversation", []))
            if len(turns) < 2:
                continue
            question, answer = turns[0]["value"], turns[1]["value"]
            tokens = count(question), count(answer)
            least, most = _CHAT_INPUT_ENDS
            if min(tokens) >= least and tokens[0] <= most and sum(tokens) <= _CHAT_TOTAL:
                yield question, tokens[1]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"--dataset={path}: is not in ShareGPT's format: {error!r}") from None


def asks(
    random: np.random.Generator, due: np.ndarray, pieces: Excerpts, inputs: np.ndarray, outputs: np.ndarray
) -> list[Ask]:
    """Requests of these lengths, due at these times."""
    return [
        Ask(pieces.take(int(length)), int(most), float(when))
        for length, most, when in zip(inputs, outputs, due, strict=True)
    ]
