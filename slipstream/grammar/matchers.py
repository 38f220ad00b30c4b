"""The engine's side of structured outputs: what each constrained request may say next.

Grammars are compiled on one pool and masks are computed on another; the engine's thread only hands out work
and looks at what has come. A request's state belongs to a worker while it is busy, else to the engine.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from slipstream.contracts.request import EngineRequest
from slipstream.contracts.structured_outputs import FIELD
from slipstream.grammar.compiler import WORKERS, Compiler
from slipstream.grammar.library import Matcher

Array = np.ndarray


@dataclass(slots=True, eq=False)
class Matched:
    """A constrained request. length: of its output so far. ends: int64, ids that end it. masks: int32 [P, W],
    unless busy what may come next, and after each of drafts, which the grammar forces. error: why there are
    none."""

    request: EngineRequest
    masks: Array
    ends: Array
    drafts: list[int] = field(default_factory=list)
    matcher: Matcher | None = None
    length: int = 0
    busy: bool = True
    error: str | None = None


@dataclass(slots=True)
class _Work:
    """What workers have done. come: set with every entry."""

    opened: deque[Matched] = field(default_factory=deque)
    ready: deque[Matched] = field(default_factory=deque)
    come: threading.Event = field(default_factory=threading.Event)


class Grammars:
    """See scheduler/constrained.py's Constraints; requests come in by open and go on to the scheduler once
    take_opened names them. places: masks of a request; all but one are for drafts. One thread calls it."""

    def __init__(self, compiler: Compiler, places: int = 1) -> None:
        self._compiler, self._places = compiler, places
        self._live: dict[int, Matched] = {}
        self._num_busy = self._num_opening = 0
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="masks")
        self._work = _Work()

    @property
    def num_opening(self) -> int:
        return self._num_opening

    @property
    def busy(self) -> bool:
        """Whether anything will come that wait() waits for."""
        return self._num_busy > 0

    def open(self, request: EngineRequest) -> None:
        """Begin to compile."""
        ends = np.array(request.end_token_ids, np.int64)
        masks = np.zeros((self._places, self._compiler.num_words), np.int32)
        state = Matched(request, masks, ends)
        self._live[request.key] = state
        self._num_busy += 1
        self._num_opening += 1
        self._compiler.pool.submit(self._open, state)

    def take_opened(self) -> list[tuple[EngineRequest, str | None]]:
        """Requests whose grammars are compiled, with their first mask, or why not. Those that were closed
        meanwhile are left out."""
        opened = self._taken(self._work.opened)
        self._num_opening -= len(opened)
        return [(state.request, state.error) for state in opened if self._is_live(state)]

    def take_ready(self) -> list[tuple[int, str | None]]:
        ready = self._taken(self._work.ready)
        return [(state.request.key, state.error) for state in ready if self._is_live(state)]

    def _taken(self, done: deque[Matched]) -> list[Matched]:
        taken = []
        while done:
            state = done.popleft()
            state.busy = False
            self._num_busy -= 1
            taken.append(state)
        return taken

    def _is_live(self, state: Matched) -> bool:
        return self._live.get(state.request.key) is state

    def ready(self, key: int) -> bool:
        return not self._live[key].busy

    def legal(self, keys: Sequence[int], drafts: int) -> tuple[Array, Array]:
        states = [self._live[key] for key in keys]
        most = min(drafts, max(len(state.drafts) for state in states))
        forced = np.full((len(keys), most), -1, np.int32)
        for place, state in enumerate(states):
            forced[place, : len(state.drafts)] = state.drafts[:most]
        return np.stack([state.masks[: 1 + most] for state in states]), forced

    def advance(self, keys: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        states = [self._live[key] for key in keys]
        for state in states:
            state.busy = True
        self._num_busy += len(states)
        size = -(-len(states) // WORKERS)
        for first in range(0, len(states), size):
            self._pool.submit(self._advance, states[first : first + size], tokens[first : first + size])

    def close(self, key: int) -> None:
        self._live.pop(key, None)

    def shut_down(self) -> None:
        """End the pools; nothing comes any more."""
        self._compiler.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def wait(self, seconds: float) -> None:
        """Until something has come, or so long."""
        work = self._work
        work.come.clear()
        if not work.opened and not work.ready:
            work.come.wait(seconds)

    def _open(self, state: Matched) -> None:
        """On a worker of the compiler's."""
        try:
            state.matcher = self._compiler.compile(state.request.grammar)
        except ValueError as error:
            state.error = f"{FIELD}: {error}"
        except Exception as error:  # whatever it was, this request alone must not wait for ever
            state.error = f"{FIELD}: could not be compiled: {error!r}"
        self._follow(state, state.request.resumed_token_ids.tolist())
        self._work.opened.append(state)
        self._work.come.set()

    def _advance(self, states: Sequence[Matched], tokens: Sequence[Sequence[int]]) -> None:
        """On a worker."""
        for state, delivered in zip(states, tokens, strict=True):
            self._follow(state, delivered)
            self._work.ready.append(state)
            self._work.come.set()

    def _follow(self, state: Matched, tokens: Sequence[int]) -> None:
        """Tokens, and the mask after them."""
        if state.matcher is None:
            return
        try:
            state.matcher.consume(tokens)
            state.matcher.fill(state.masks[0])
            state.drafts = _look_ahead(state) if self._places > 1 else []
        # Whatever it is, it ends this request alone.
        except Exception as error:
            state.error = f"{FIELD}: {error}"
        state.length += len(tokens)
        for mask in state.masks[: max(state.request.params.min_tokens - state.length, 0)]:
            _without_ends(mask, state.ends)


def _look_ahead(state: Matched) -> list[int]:
    """What the grammar forces, as far as there is room for the masks after it."""
    assert state.matcher is not None
    forced = state.matcher.forced()[: len(state.masks) - 1]
    ahead = state.matcher.fork() if forced else state.matcher
    for place, token in enumerate(forced, start=1):
        ahead.consume([token])
        ahead.fill(state.masks[place])
    return list(forced)


def _without_ends(mask: Array, ends: Array) -> None:
    """Clears the bits of end ids, unless nothing else is legal: the grammar decides before min_tokens."""
    longer = mask.copy()
    np.bitwise_and.at(longer, ends // 32, ~(1 << ends % 32).astype(np.uint32).view(np.int32))
    if longer.any():
        mask[:] = longer
