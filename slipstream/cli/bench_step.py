"""`slipstream bench step`: microseconds that the host spends on a step, with a stub in the device's place.

schedule: the plan (and requests that join). apply: the result, with the outputs built. output: those as bytes
for the front end's process. """

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

ROWS = (1, 64, 256, 1024)
COLUMNS = ("median", "p90", "p99")


def positive(text: str) -> int:
    """A count of at least 1. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be an integer of at least 1")
    return int(text)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("step", help="host microseconds a step", description=__doc__)
    parser.add_argument(
        "--rows", type=positive, nargs="+", default=list(ROWS), help="decoding rows, one run each"
    )
    parser.add_argument("--steps", type=positive, default=2000, help="steps to time (default: %(default)s)")
    parser.add_argument(
        "--output-len", type=positive, default=None,
        help="mean tokens of a request, which another replaces when it ends (default: nobody ends)",
    )
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the figures to FILE")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints a table; writes the JSON file, whose path is tried first."""
    from slipstream.cli.step_load import PARTS, measure

    if args.json is not None:
        args.json.touch()
    heads = "".join(f"{column:>9}" for column in COLUMNS)
    print(f"{'rows':>5} {'part':<9}{heads}   microseconds a step")
    runs = []
    for rows in args.rows:
        runs.append(measure(rows, args.steps, args.output_len))
        for part in PARTS:
            cells = "".join(f"{runs[-1][part][column]:>9.1f}" for column in COLUMNS)
            print(f"{rows if part == PARTS[0] else '':>5} {part:<9}{cells}", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps({"benchmark": "step", **_facts(), "runs": runs}, indent=1) + "\n")
    return 0


def _facts() -> dict[str, Any]:
    """How, where and when the figures were taken."""
    return {
        "command": " ".join(["slipstream", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
