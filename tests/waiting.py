"""Patience of tests with what happens beside them: no test is decided by how fast a machine is."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> bool:
    """True as soon as condition() holds; False where it still does not after `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())
