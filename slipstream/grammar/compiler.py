"""Compiles grammars, off the threads that serve: a pool of a few workers, and the grammars compiled last.

The front end compiles to find out whether a request can be served; the engine, to serve it.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from slipstream.config.structured_outputs import FLAG, XGRAMMAR, StructuredOutputsConfig
from slipstream.contracts.errors import BadRequest, QueueTimeoutError
from slipstream.contracts.structured_outputs import StructuredOutputsParams
from slipstream.grammar.form import first_line
from slipstream.grammar.library import Library, Matcher, Start
from slipstream.text.tokenizer import Tokenizer

Array = np.ndarray

KEPT_GRAMMARS = 256
# Of a pool, beside the threads that serve.
WORKERS = min(4, max(1, (os.cpu_count() or 1) // 2))
MOST_LEFT = 4  # checks that go on after their time


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
        self.num_words = max(2, -(-vocab_size // 32))  # as of the column that masks are written to
        self._backend, self._open = backend, open_tokenizer
        self._vocab_size, self._ends = vocab_size, tuple(end_token_ids)
        self.pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="grammars")
        self._kept: OrderedDict[str, Start] = OrderedDict()
        self._keeping, self._building = threading.Lock(), threading.Lock()
        self._turns, self._turning = threading.Semaphore(WORKERS), threading.Lock()
        self._left: set[Future[tuple[str, Array]]] = set()  # checks that took too long, and go on
        self._made: Library | None = None
        self.pool.submit(self._library)

    def compile(self, grammar: str) -> Matcher:
        """A matcher at the start of a grammar that the library's text() made. Raises ValueError with what is
        wrong."""
        with self._keeping:
            known = self._kept.get(grammar)
            if known is not None:
                self._kept.move_to_end(grammar)
                return known()
        start = self._library().compile(grammar)
        with self._keeping:
            self._kept[grammar] = start
            if len(self._kept) > KEPT_GRAMMARS:
                self._kept.popitem(last=False)
            return start()

    def check(self, params: StructuredOutputsParams, config: StructuredOutputsConfig) -> tuple[str, Array]:
        """The grammar's text, and which tokens an answer may begin with, bool [vocab_size]. Raises BadRequest
        for what can't be compiled, allows nothing, or takes longer than it may; QueueTimeoutError where all
        workers have been busy for so long."""
        seconds = config.compile_timeout
        if not self._turns.acquire(timeout=seconds):
            raise QueueTimeoutError(seconds)
        found: Future[tuple[str, Array]] = Future()

        def answer() -> None:
            try:
                found.set_result(self._check(params, config))
            except BaseException as error:  # carried to who waits
                found.set_exception(error)
            self._end_turn(found)

        # Nothing ends what a library does: a thread that takes too long is left, and ends with the process.
        threading.Thread(target=answer, name="grammar", daemon=True).start()
        try:
            return found.result(seconds)
        except TimeoutError:
            self._leave(found)
            limit = f"takes longer to compile than {seconds:g} s ({FLAG})"
            raise params.wrong(limit) from None

    def _leave(self, found: Future[tuple[str, Array]]) -> None:
        """Somebody else has the turn of a check that may never end; so many turns there are to give."""
        with self._turning:
            if not found.done() and len(self._left) < MOST_LEFT:
                self._left.add(found)
                self._turns.release()

    def _end_turn(self, found: Future[tuple[str, Array]]) -> None:
        with self._turning:
            if found in self._left:
                self._left.remove(found)
            else:
                self._turns.release()

    def _check(
        self, params: StructuredOutputsParams, config: StructuredOutputsConfig
    ) -> tuple[str, Array]:
        mask = np.zeros(self.num_words, np.int32)
        try:
            text = self._library().text(params, config)
            self.compile(text).fill(mask)
        except BadRequest:
            raise
        # A user's text in parsers that are not ours: whatever they raise is about that text.
        except Exception as error:
            raise params.wrong(first_line(str(error))) from None
        if not mask.any():
            raise params.wrong("allows no token")
        return text, np.unpackbits(mask.view(np.uint8), bitorder="little")[: self._vocab_size] != 0

    def _library(self) -> Library:
        with self._building:
            if self._made is None:
                tokenizer = self._open()
                ends = dict.fromkeys((*self._ends, *tokenizer.end_token_ids))
                known = tuple(end for end in ends if end < self._vocab_size)
                self._made = open_library(self._backend, tokenizer, self._vocab_size, known)
            return self._made

    def close(self) -> None:
        """Whoever waits for a grammar gets none."""
        self.pool.shutdown(wait=False, cancel_futures=True)


def open_library(backend: str, tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]) -> Library:
    """ends: legal where a grammar may end, and nowhere else. Only the library that is asked for is
    imported. Raises ValueError for a vocabulary that it cannot read."""
    if backend == XGRAMMAR:
        from slipstream.grammar.xgrammar import XGrammar

        return XGrammar(tokenizer, vocab_size, ends)
    from slipstream.grammar.guidance import Guidance

    return Guidance(tokenizer, vocab_size, ends)
