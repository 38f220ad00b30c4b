"""`slipstream COMMAND`: parses, runs, and turns what a user did wrong into one line and exit status 2."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from slipstream.cli import (
    bench_compare,
    bench_latency,
    bench_offline,
    bench_serve,
    bench_step,
    chat,
    demo_model,
    explain,
    generate,
    serve,
)
from slipstream.cli.flags import Parser
from slipstream.contracts.errors import EngineError
from slipstream.observe.version import package_version


def build_parser() -> Parser:
    """Every command has add_parser(subparsers), which sets its run(options) -> exit status."""
    parser = Parser(prog="slipstream", description="LLM inference with rows that live on the device.")
    parser.add_argument("--version", action="version", version=f"slipstream {package_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (serve, generate, chat, explain, demo_model):
        command.add_parser(commands)
    benches = commands.add_parser("bench", help="measure", description="Benchmarks.")
    kinds = benches.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    for bench in (bench_offline, bench_latency, bench_serve, bench_compare, bench_step):
        bench.add_parser(kinds)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, 2 for what the user can mend, 1 for an engine that failed, 130 after Ctrl-C."""
    options = build_parser().parse_args(sys.argv[1:] if argv is None else argv)
    try:
        return int(options.run(options))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
