"""A trace of every step in the Chrome trace format (open it in Perfetto): scheduler, runner and device lanes.

Times are time.perf_counter() seconds. The trace also answers the question the engine is built around: in
which share of steady steps was the next plan submitted before the result was read?
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

log = logging.getLogger("slipstream.trace")

LANES = ("scheduler", "runner", "device", "output")


class Tracer:
    """Collects spans; writes the file at close(). Raises ValueError where there can be no such file."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        try:
            self._path.open("a").close()  # an unwritable path fails at start, not after the run
        except OSError as error:
            raise ValueError(f"--trace={path}: {error.strerror}") from None
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
        ahead, steady = steps_ahead(out)
        log.info(
            "trace: %s, next step submitted before a result was read in %d of %d steady steps",
            self._path,
            ahead,
            steady,
        )


def steps_ahead(events: list[dict[str, Any]]) -> tuple[int, int]:
    """Of a trace's events: steady steps whose successor was submitted before their own result was read, and
    all steady steps. A step is steady where the lanes of its successor are its own (no arrival, no leave)."""
    submitted = {e["args"]["step"]: e for e in events if e["name"] == "submit"}
    read = {e["args"]["step"]: e["ts"] for e in events if e["name"] == "apply"}
    steady = [s for s, e in submitted.items() if s in read and not e["args"]["changed"]]
    ahead = [
        s
        for s in steady
        if s + 1 in submitted and submitted[s + 1]["ts"] + submitted[s + 1]["dur"] <= read[s]
    ]
    return len(ahead), len(steady)


class NoTracer:
    """Absent tracing."""

    def span(self, lane: str, name: str, begin: float, end: float, **facts: Any) -> None:
        pass

    def close(self) -> None:
        pass
