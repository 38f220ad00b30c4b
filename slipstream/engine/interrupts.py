"""Ctrl-C while an engine runs on the caller's thread."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupts_between_steps() -> Iterator[Callable[[], None]]:
    """Yields what raises KeyboardInterrupt if there was one: a step that ended anywhere else would leave the
    engine and who computes for it at odds. A second Ctrl-C does not wait, for a step may hang. Signals come
    to the main thread only, and who has a handler of his own keeps it."""
    come = False

    def note(number: int, frame: Any) -> None:
        nonlocal come
        if come:
            signal.default_int_handler(number, frame)
        come = True

    def check() -> None:
        if come:
            raise KeyboardInterrupt

    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield check
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
