"""What a library of grammars does for us; guidance.py and xgrammar.py are two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from slipstream.config.structured_outputs import StructuredOutputsConfig
from slipstream.contracts.structured_outputs import StructuredOutputsParams

Array = np.ndarray


class Matcher(Protocol):
    """A place in a grammar. One thread at a time. Methods raise ValueError with what is wrong."""

    def consume(self, tokens: Sequence[int]) -> None:
        """Go on by these."""
        ...

    def fill(self, mask: Array) -> None:
        """The tokens that may come next. mask: int32 [num_words], contiguous."""
        ...

    def forced(self) -> Sequence[int]:
        """Tokens of a text that must come next, as the tokenizer would have it; empty where there is a
        choice."""
        ...

    def fork(self) -> Matcher:
        """Another one at the same place."""
        ...


# Makes a matcher at the start of its grammar.
Start = Callable[[], Matcher]


class Library(Protocol):
    """Made of a vocabulary, for any thread."""

    def text(self, params: StructuredOutputsParams, config: StructuredOutputsConfig) -> str:
        """The grammar as `compile` reads it. Raises ValueError with what is wrong, or BadRequest that names
        the constraint."""
        ...

    def compile(self, text: str) -> Start:
        """Raises ValueError with what is wrong."""
        ...
