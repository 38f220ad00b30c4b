"""`slipstream bench latency MODEL`: how long one batch takes, its first tokens and each step after them."""

from __future__ import annotations

import argparse
import time
from typing import Any

from slipstream.cli.bench_engine import BenchEngine, StepClock, add_load_flags, count_outputs
from slipstream.cli.bench_report import (
    PERCENTILES,
    add_report_flags,
    check_report,
    percentiles,
    positive,
    write_report,
)

PARTS = {"request": "a batch, whole", "first": "to all first tokens", "step": "a step after them"}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "latency",
        help="time of a request and of a step",
        description=__doc__,
        usage="slipstream bench latency MODEL [flags]",
    )
    add_load_flags(parser, input_len="32", output_len="128")
    parser.add_argument("--batch-size", type=positive, default=8, help="requests (default: %(default)s)")
    parser.add_argument("--iterations", type=positive, default=10, help="batches (default: %(default)s)")
    add_report_flags(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints percentiles in milliseconds. Raises ValueError for flags that cannot be honoured."""
    from tqdm.auto import tqdm

    check_report(options)
    engine = BenchEngine(options)
    engine.warm_up(options.batch_size)
    samples: dict[str, list[float]] = {part: [] for part in PARTS}
    for _ in tqdm(range(options.iterations), unit="batch", disable=not options.progress, dynamic_ncols=True):
        prompts, params = engine.requests(options.batch_size)
        engine.llm.on_step = clock = StepClock()
        outputs = engine.llm.generate(prompts, params, use_tqdm=False)
        samples["request"].append(1e3 * (time.perf_counter() - clock.begin))
        count_outputs(outputs)
        samples["first"].append(1e3 * clock.first(len(prompts)))
        samples["step"] += [1e3 * seconds for seconds in clock.intervals(len(prompts))]
    found = {part: percentiles(values) for part, values in samples.items() if values}
    print(f"{'':<22}" + "".join(f"{column:>10}" for column in PERCENTILES) + "   milliseconds")
    for part, values in found.items():
        print(f"{PARTS[part]:<22}" + "".join(f"{value:>10.2f}" for value in values.values()))
    figures = {
        "batch_size": options.batch_size,
        "input_len": options.input_len,
        "output_len": options.output_len,
        "iterations": options.iterations,
        "milliseconds": found,
        "steps": len(samples["step"]),
        **engine.describe(),
    }
    write_report(options, "latency", figures, lambda figure: draw(figure, samples))
    return 0


def draw(figure: Any, samples: dict[str, list[float]]) -> None:
    """How often each latency was met."""
    for axes, (part, values) in zip(figure.subplots(1, len(samples)), samples.items(), strict=True):
        axes.hist(values, bins=40)
        axes.set(title=PARTS[part], xlabel="milliseconds", ylabel="count")
