"""A trace of every step in the Chrome trace format (open it in Perfetto): scheduler, runner and device lanes.

Times are time.perf_counter() seconds. The trace also answers the question the engine is built around: in
which share of steady steps was the next plan submitted before the result was read?
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LANES = ("scheduler", "runner", "device", "output")


class Tracer:
    """Collects spans; writes the file at close()."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._path.touch()  # an unwritable path fails at start, not after the run
        self._events: list[tuple[str, str, float, float, dict[str, Any]]] = []

    def span(self, lane: str, name: str, begin: float, end: float, **facts: Any) -> None:
        """One box of a lane."""
        self._events.append((lane, name, begin, end, facts))

    def close(self) -> None:
        """Write the file; microseconds from the first event."""
        origin = min((e[2] for e in self._events), default=0.0)
        out: list[dict[str, Any]] = [
            {"name": "thread_name", "ph": "M", "pid": 1, "tid": i, "args": {"name": lane}}
            for i, lane in enumerate(LANES)
        ]
        for lane, name, begin, end, facts in self._events:
            out.append(
                {
                    "name": name,
                    "ph": "X",
                    "pid": 1,
                    "tid": LANES.index(lane),
                    "ts": (begin - origin) * 1e6,
                    "dur": (end - begin) * 1e6,
                    "args": facts,
                }
            )
        self._path.write_text(json.dumps({"traceEvents": out, "displayTimeUnit": "ms"}))


class NoTracer:
    """Absent tracing."""

    def span(self, lane: str, name: str, begin: float, end: float, **facts: Any) -> None:
        pass

    def close(self) -> None:
        pass
