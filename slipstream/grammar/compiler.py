"""Compiles grammars, off the threads that serve: a pool of a few workers, and the grammars compiled last.

The front end compiles to find out whether a request can be served; the engine, to serve it.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from slipstream.config.structured_outputs import FLAG, StructuredOutputsConfig
from slipstream.contracts.structured_outputs import StructuredOutputsParams
from slipstream.grammar.form import first_line, grammar_text
from slipstream.text.tokenizer import Tokenizer

Array = np.ndarray

KEPT_GRAMMARS = 256
_sharing = threading.Lock()
# Of a pool, beside the threads that serve.
WORKERS = min(4, max(1, (os.cpu_count() or 1) // 2))


class Compiler:
    """open_tokenizer: called once, by a worker. vocab_size: of the model's logits. end_token_ids: with the
    tokenizer's own they are legal where a grammar may end, and nowhere else.

    The vocabulary is read from the start on: about a second for 150,000 tokens, in which Python's lock is
    held.
    """

    def __init__(
        self, open_tokenizer: Callable[[], Tokenizer], vocab_size: int, end_token_ids: Sequence[int]
    ) -> None:
        self.num_words = max(2, -(-vocab_size // 32))  # as of the column that masks are written to
        self._open, self._vocab_size, self._ends = open_tokenizer, vocab_size, tuple(end_token_ids)
        self._mask_bytes = 4 * -(-vocab_size // 32)
        self.pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="grammars")
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._keeping, self._building = threading.Lock(), threading.Lock()
        self._vocabulary: tuple[Tokenizer, LLTokenizer] | None = None
        # Errors are told to users: without the parser's state and the grammar.
        self._limits = LLParserLimits(verbose_errors=False)
        self.pool.submit(self._read)

    def compile(self, grammar: str) -> LLMatcher:
        """A matcher at the start of a grammar that form.py made. Raises ValueError with what is wrong."""
        with self._keeping:
            known = self._kept.get(grammar)
            if known is not None:
                self._kept.move_to_end(grammar)
                return known.deep_copy()
        matcher = LLMatcher(self._read()[1], grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise ValueError(first_line(matcher.get_error()))
        with self._keeping:
            self._kept[grammar] = matcher
            if len(self._kept) > KEPT_GRAMMARS:
                self._kept.popitem(last=False)
            return matcher.deep_copy()

    def fill(self, matcher: LLMatcher, mask: Array) -> None:
        """The tokens that may come next. mask: int32 [num_words], contiguous. Raises ValueError with what is
        wrong."""
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, self._mask_bytes)
        if matcher.is_error():
            raise ValueError(first_line(matcher.get_error()))

    def check(self, params: StructuredOutputsParams, config: StructuredOutputsConfig) -> tuple[str, Array]:
        """The grammar's text, and which tokens an answer may begin with, bool [vocab_size]. Raises BadRequest
        for what can't be compiled, allows nothing, or takes longer than it may."""
        found: Future[tuple[str, Array]] = self.pool.submit(self._check, params, config)
        try:
            return found.result(config.compile_timeout)
        except TimeoutError:
            found.cancel()
            limit = f"takes longer to compile than {config.compile_timeout:g} s ({FLAG})"
            raise params.wrong(limit) from None

    def _check(
        self, params: StructuredOutputsParams, config: StructuredOutputsConfig
    ) -> tuple[str, Array]:
        text = grammar_text(params, config, self._read()[0].is_special)
        mask = np.zeros(self.num_words, np.int32)
        try:
            self.fill(self.compile(text), mask)
            if not mask.any():
                raise ValueError("allows no token")
        except ValueError as error:
            raise params.wrong(str(error)) from None
        return text, np.unpackbits(mask.view(np.uint8), bitorder="little")[: self._vocab_size] != 0

    def _read(self) -> tuple[Tokenizer, LLTokenizer]:
        with self._building:
            if self._vocabulary is None:
                tokenizer = self._open()
                ends = dict.fromkeys((*self._ends, *tokenizer.end_token_ids))
                known = tuple(end for end in ends if end < self._vocab_size)
                with _sharing:
                    shared = _vocabulary(tokenizer.to_json(), self._vocab_size, known)
                self._vocabulary = tokenizer, shared
            return self._vocabulary

    def close(self) -> None:
        """Whoever waits for a grammar gets none."""
        self.pool.shutdown(wait=False, cancel_futures=True)


@functools.lru_cache(2)
def _vocabulary(tokenizer: str, vocab_size: int, ends: tuple[int, ...]) -> LLTokenizer:
    """An engine in its front end's process shares it with it."""
    return LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(ends) or None)
