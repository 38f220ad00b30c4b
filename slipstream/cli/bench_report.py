"""What the benchmarks share: counts and lengths as flags, percentiles, and reports as JSON and as plots."""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slipstream.cli.flags import file_of

PERCENTILES = {"median": 50, "p90": 90, "p99": 99}


def positive(text: str) -> int:
    """A count of at least 1. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be an integer of at least 1")
    return int(text)


def lengths(text: str) -> tuple[int, int]:
    """128, or 100:1024 for evenly drawn lengths, both ends included. Raises ArgumentTypeError."""
    low, colon, high = text.partition(":")
    ends = positive(low), positive(high if colon else low)
    if ends[0] > ends[1]:
        raise argparse.ArgumentTypeError(f"{text!r}: the first length must be at most the second")
    return ends


def add_report_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the figures to FILE")
    parser.add_argument(
        "--plot", type=Path, default=None, metavar="FILE", help="draw the figures as a PNG (needs matplotlib)"
    )


def check_report(options: argparse.Namespace) -> None:
    """Before anything is measured: raises ValueError for a file that cannot be written, and without
    matplotlib."""
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"--plot={options.plot}: matplotlib is not installed (pip install matplotlib)")
    for flag, path in (("--json", options.json), ("--plot", options.plot)):
        if path is not None:
            with file_of(flag, path):
                path.open("a").close()  # a directory can be touched


def write_report(
    options: argparse.Namespace, name: str, figures: dict[str, Any], draw: Callable[[Any], None]
) -> None:
    """The files that were asked for. draw puts the figures into a matplotlib Figure."""
    if options.json is not None:
        options.json.write_text(json.dumps({"benchmark": name, **_facts(), **figures}, indent=1) + "\n")
    if options.plot is not None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 4), layout="constrained")
        draw(figure)
        figure.savefig(options.plot, format="png", dpi=120)


def percentiles(values: Any) -> dict[str, float]:
    """Of an array or a sequence."""
    import numpy as np

    found = np.percentile(values, list(PERCENTILES.values()))
    return dict(zip(PERCENTILES, map(float, found), strict=True))


def _facts() -> dict[str, Any]:
    """How, where and when the figures were taken."""
    return {
        "command": " ".join(["slipstream", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
