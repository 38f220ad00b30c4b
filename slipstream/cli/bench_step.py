"""`slipstream bench step`: microseconds that the host spends on a step, with a stub in the device's place.

schedule: the plan (and requests that join). apply: the result, with the outputs built. output: those as bytes
for the front end's process. """

from __future__ import annotations

import argparse
from typing import Any

from slipstream.cli.bench_report import PERCENTILES, add_report_flags, check_report, positive, write_report

ROWS = (1, 64, 256, 1024)


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
    add_report_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints a table."""
    from slipstream.cli.step_load import PARTS, measure

    check_report(args)
    heads = "".join(f"{column:>9}" for column in PERCENTILES)
    print(f"{'rows':>5} {'part':<9}{heads}   microseconds a step")
    runs = []
    for rows in args.rows:
        runs.append(measure(rows, args.steps, args.output_len))
        for part in PARTS:
            cells = "".join(f"{runs[-1][part][column]:>9.1f}" for column in PERCENTILES)
            print(f"{rows if part == PARTS[0] else '':>5} {part:<9}{cells}", flush=True)
    write_report(args, "step", {"runs": runs}, lambda figure: draw(figure, runs))
    return 0


def draw(figure: Any, runs: list[dict[str, Any]]) -> None:
    """Each part's median over rows."""
    from slipstream.cli.step_load import PARTS

    axes = figure.subplots()
    for part in PARTS:
        axes.plot([run["rows"] for run in runs], [run[part]["median"] for run in runs], "o-", label=part)
    axes.set(xlabel="decoding rows", ylabel="microseconds, median", title="Host time of a step")
    axes.legend()
