"""Compiles an engine's grammars, off the threads that serve: a pool of a few workers, and the grammars
compiled last. What comes here has been tried (trial.py)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from slipstream.config.structured_outputs import XGRAMMAR
from slipstream.contracts.step import mask_words
from slipstream.grammar.library import Library, Matcher, Start
from slipstream.grammar.recent import Recent
from slipstream.text.tokenizer import Tokenizer

KEPT_GRAMMARS = 256
# Of a pool, beside the threads that serve.
WORKERS = min(4, max(1, (os.cpu_count() or 1) // 2))


class Compiler:
    """backend: a library's name in the plan. open_tokenizer: called once, by a worker. vocab_size: of the
    model's logits. end_token_ids: with the tokenizer's own they are legal where a grammar may end, and
    nowhere else.

    The vocabulary is read from the start on: about a second for 150,000 tokens, in which Python's lock is
    held.
    """

    def __init__(
        self,
        backend: str,
        open_tokenizer: Callable[[], Tokenizer],
        vocab_size: int,
        end_token_ids: Sequence[int],
    ) -> None:
        self.num_words = mask_words(vocab_size)
        self._backend, self._open = backend, open_tokenizer
        self._vocab_size, self._ends = vocab_size, tuple(end_token_ids)
        self.pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="grammars")
        self._kept: Recent[str, Start] = Recent(KEPT_GRAMMARS)
        self._starting, self._building = threading.Lock(), threading.Lock()
        self._made: Library | None = None
        self.pool.submit(self._library)

    def compile(self, grammar: str) -> Matcher:
        """A matcher at the start of a grammar that the library's text() made. Raises ValueError with what is
        wrong."""
        start = self._kept.get(grammar)
        if start is None:
            start = self._library().compile(grammar)
            self._kept.put(grammar, start)
        with self._starting:
            return start()

    def _library(self) -> Library:
        with self._building:
            if self._made is None:
                self._made = open_library(self._backend, self._open(), self._vocab_size, self._ends)
            return self._made

    def close(self) -> None:
        """Whoever waits for a grammar gets none."""
        self.pool.shutdown(wait=False, cancel_futures=True)


def open_library(backend: str, tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]) -> Library:
    """ends: with the tokenizer's own, legal where a grammar may end, and nowhere else. Only the library that
    is asked for is imported. Raises ValueError for a vocabulary that it cannot read."""
    ends = [end for end in dict.fromkeys((*ends, *tokenizer.end_token_ids)) if end < vocab_size]
    if backend == XGRAMMAR:
        from slipstream.grammar.xgrammar import XGrammar

        return XGrammar(tokenizer, vocab_size, ends)
    from slipstream.grammar.guidance import Guidance

    return Guidance(tokenizer, vocab_size, ends)
