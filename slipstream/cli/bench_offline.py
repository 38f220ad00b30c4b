"""`slipstream bench offline MODEL`: throughput of many requests that are all there at the start."""

from __future__ import annotations

import argparse
import time
from typing import Any

from slipstream.cli.bench_engine import BenchEngine, StepClock, add_load_flags, count_outputs
from slipstream.cli.bench_report import add_report_flags, check_report, positive, write_report

WARM_UP_REQUESTS = 8


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "offline", help="throughput", description=__doc__, usage="slipstream bench offline MODEL [flags]"
    )
    add_load_flags(parser, input_len="512", output_len="128")
    parser.add_argument("--num-prompts", type=positive, default=128, help="requests (default: %(default)s)")
    add_report_flags(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints requests and tokens a second. Raises ValueError for flags that cannot be honoured."""
    check_report(options)
    engine = BenchEngine(options)
    engine.warm_up(min(WARM_UP_REQUESTS, options.num_prompts))
    prompts, params = engine.requests(options.num_prompts)
    engine.llm.on_step = clock = StepClock()
    outputs = engine.llm.generate(prompts, params, use_tqdm=options.progress)
    seconds = time.perf_counter() - clock.begin
    tokens_in, tokens_out = sum(len(one["prompt_token_ids"]) for one in prompts), count_outputs(outputs)
    figures = {
        "requests": len(prompts),
        "input_len": options.input_len,
        "output_len": options.output_len,
        "seconds": seconds,
        "input_tokens": tokens_in,
        "output_tokens": tokens_out,
        "requests_per_second": len(prompts) / seconds,
        "input_tokens_per_second": tokens_in / seconds,
        "output_tokens_per_second": tokens_out / seconds,
        **engine.describe(),
    }
    print(f"{len(prompts)} requests in {seconds:.2f} s: {len(prompts) / seconds:,.2f} requests/s")
    print(f"input   {tokens_in:>10,} tokens {tokens_in / seconds:>12,.1f} tok/s")
    print(f"output  {tokens_out:>10,} tokens {tokens_out / seconds:>12,.1f} tok/s")
    write_report(options, "offline", figures, lambda figure: draw(figure, clock))
    return 0


def draw(figure: Any, clock: StepClock) -> None:
    """Output tokens over time."""
    total, arrived = 0, []
    for count in clock.tokens:
        total += count
        arrived.append(total)
    axes = figure.subplots()
    axes.plot(clock.seconds, arrived)
    axes.set(xlabel="seconds", ylabel="output tokens", title="Output tokens since the start")
    axes.grid(alpha=0.3)
