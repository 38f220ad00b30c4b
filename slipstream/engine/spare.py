"""A process that has imported everything and waits to be needed, so that a takeover need not wait for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

# At first whoever computes has the machine to himself; short runs never pay for a spare.
SPARE_SECONDS = 3.0


class Process(Protocol):
    """What may be kept ready."""

    @property
    def ended(self) -> bool: ...

    def kill(self) -> None: ...

    def close(self) -> None: ...


P = TypeVar("P", bound=Process)


class Spare(Generic[P]):
    """At most one process that make(spare=True) began. wanted: False never begins one."""

    def __init__(self, make: Callable[[bool], P], wanted: bool) -> None:
        self._make, self._wanted = make, wanted
        self._ready: P | None = None
        self._due = float("inf")

    def later(self) -> None:
        """Somebody computes from now on."""
        self._due = time.monotonic() + SPARE_SECONDS

    def tend(self) -> None:
        """To be called now and then while somebody computes: begin one where it is due, or has gone."""
        if self._ready is not None and self._ready.ended:
            self.close()
            self.later()
        if self._wanted and self._ready is None and time.monotonic() >= self._due:
            self._ready = self._make(True)

    def take(self) -> P:
        """The spare, or a new one where there is none."""
        if self._ready is not None and self._ready.ended:
            self.close()
        ready, self._ready, self._due = self._ready, None, float("inf")
        return self._make(False) if ready is None else ready

    def close(self) -> None:
        if self._ready is not None:
            self._ready.kill()
            self._ready.close()
            self._ready = None
