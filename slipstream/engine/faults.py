"""When is a process stuck, and when is replacing it hopeless: one rule for engines and for workers."""

from __future__ import annotations

import time
from dataclasses import dataclass

from slipstream.contracts.errors import CrashLoopError

# A step of a large prompt takes a CPU minutes: one that computes has so many times as long.
COMPUTING_FACTOR = 20.0
COMPUTING_SECONDS = 0.02  # of CPU time between two looks: it computes; two ticks of Linux' clock
LOOK_SECONDS = 0.25  # between two looks
# A successor may take so many times as long to start as the first one, and so long at least.
START_FACTOR, START_SECONDS = 4.0, 120.0
STEADY_SECONDS = 60.0  # what lived so long without requests did not die of its start


@dataclass(slots=True)
class Watchdog:
    """Tells a process that is stuck: for `seconds` work was pending, its count stood still and it did not
    compute; or, if it computed, for COMPUTING_FACTOR times as long. 0 never tells."""

    seconds: float
    count: int = -1
    since: float = 0.0  # when the count moved
    moved: float = 0.0  # when anything did
    spent: float = 0.0

    def stuck(self, count: int, spent: float, busy: bool, now: float) -> bool:
        """spent: seconds of CPU time, where that tells of progress."""
        if count != self.count or not busy:
            self.restart(count, now)
        if spent - self.spent >= COMPUTING_SECONDS:
            self.moved = now
        self.spent = spent
        quiet = max(now - self.moved, (now - self.since) / COMPUTING_FACTOR)
        return 0 < self.seconds < quiet

    def restart(self, count: int, now: float) -> None:
        self.count, self.since, self.moved = count, now, now


class Losses:
    """Counts what was lost in a row without a token made between. what: its name in the plural; most: that
    may be lost so; 0: the first loss is the end."""

    def __init__(self, what: str, most: int) -> None:
        self._what, self._most = what, most
        self._since = time.monotonic()
        self.in_a_row = self._explained = 0
        self.fruitful = False  # the present one has made a token

    def started(self) -> None:
        """Another one is up."""
        self._since, self.fruitful = time.monotonic(), False

    def lost(self, reason: str, idle: bool, explained: bool = False) -> None:
        """idle: it was up, and nobody waited for a token. explained: its cause is gone, which is believed as
        often in a row. Raises CrashLoopError where another one would be of no use either."""
        if self.fruitful or (idle and time.monotonic() - self._since > STEADY_SECONDS):
            self.in_a_row = self._explained = 0
        self.fruitful = False
        if explained and self._explained < self._most:
            self._explained += 1
            return
        self.in_a_row += 1
        if self.in_a_row > self._most:
            many = f"{self.in_a_row} {self._what} in a row were lost without making a token: "
            raise CrashLoopError((many if self._most else "") + reason)
