"""Which request ends the workers: found by running those that were there one at a time.

One loss proves nothing: a worker may be killed from outside. When the next one is lost soon after, the
requests that both computed are suspects. All requests wait, then the suspects are let in one by one, each
beside those that are cleared by then; a third loss convicts the one on trial.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from slipstream.contracts.outputs import EngineOutputs
from slipstream.observe.log import get_logger
from slipstream.scheduler.queue import WaitingQueue

log = get_logger(__name__)
SOON = 64  # steps: a loss after so many has nothing to do with the one before
CLEARED_TOKENS = 4  # of a suspect on trial; with two steps in flight the first says little of the next


class Suspects:
    """waiting: of the scheduler whose requests these are, which calls them by their keys."""

    def __init__(self, waiting: WaitingQueue) -> None:
        self._waiting = waiting
        self._seen: set[int] = set()  # in flight when the last worker was lost
        self._steps = 0  # since then
        self._untried: deque[int] = deque()
        self._on_trial: int | None = None
        self._tokens = 0  # of that one

    def lost(self, keys: Iterable[int]) -> int | None:
        """A worker was lost with these in flight, and they wait again. The one that is convicted."""
        keys, convicted = set(keys), None
        again = self._seen & keys
        if self._on_trial is not None:
            convicted = self._on_trial if self._on_trial in keys else None
            if convicted is None:
                self._untried.appendleft(self._on_trial)
            self._hold()
        elif again:
            # A key counts arrivals: who came last, and so has not been computed before, is tried last.
            self._untried = deque(sorted(again))
            log.warning("workers are lost in a row; requests run one at a time", suspects=len(again))
            self._hold()
        self._seen, self._steps = keys - {convicted}, 0
        return convicted

    def _hold(self) -> None:
        self._waiting.hold()
        self._next()

    def _next(self) -> None:
        self._tokens, self._on_trial = 0, None
        while self._untried and self._on_trial is None:
            key = self._untried.popleft()
            if self._waiting.let_in(key):
                self._on_trial = key
        if self._on_trial is None:
            self._waiting.release()

    def applied(self, outputs: EngineOutputs) -> None:
        """To be called after each step."""
        if not self._seen and self._on_trial is None:
            return
        self._steps += 1
        if self._on_trial is not None:
            mine = outputs.keys == self._on_trial
            self._tokens += int(outputs.num_tokens[mine].sum())
            if self._tokens >= CLEARED_TOKENS or outputs.finish[mine].any():
                self._steps = 0
                self._next()
        elif self._steps >= SOON:
            self._seen = set()

    def ended(self, keys: Iterable[int]) -> None:
        """These have ended outside of a step: nobody wants them any more, or they failed by themselves."""
        if self._on_trial is not None and self._on_trial in set(keys):
            self._next()
