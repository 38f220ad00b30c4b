"""`slipstream explain MODEL [any serve flag]`: what serve would choose, and why; beside it vLLM 0.31.0."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import fields
from typing import Any

from slipstream.cli.flags import add_engine_flags, engine_args
from slipstream.cli.serve import add_server_flags


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "explain",
        help="say what serve would choose for these flags, and why",
        description=__doc__,
        usage="slipstream explain MODEL [any serve flag] [--json]",
    )
    add_engine_flags(parser)
    add_server_flags(parser)
    parser.add_argument("--json", action="store_true", help="an object with a key a decision")
    group = parser.add_argument_group("vLLM's flags", "which only vLLM has, for its column")
    for flag in ("--tensor-parallel-size", "--pipeline-parallel-size"):
        group.add_argument(flag, type=int, default=1, metavar="INT", help="(default: 1)")
    group.add_argument("--enable-dbo", action="store_true", help="dual batch overlap")
    group.add_argument("--enable-elastic-ep", action="store_true", help="elastic expert parallelism")
    group.add_argument("--mamba-cache-mode", choices=("none", "align", "all"), default="none")
    group.add_argument("--runner", choices=("auto", "generate", "pooling"), default="auto")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Status 2, with the error on stderr and vLLM's column on stdout, for flags that contradict each other.
    Raises ValueError for a model or flags that cannot be read."""
    from slipstream.config.vllm_rules import VllmOnly
    from slipstream.engine.explain import explain

    given = vars(options)
    only = {field.name: given[field.name] for field in fields(VllmOnly) if field.name in given}
    explanation = explain(engine_args(options), VllmOnly(**only))
    if options.json:
        print(json.dumps(explanation.plain(), indent=2))
    else:
        print("\n".join(explanation.table(shutil.get_terminal_size((120, 24)).columns)))
    if explanation.error:
        print(f"error: {explanation.error}", file=sys.stderr)
        return 2
    return 0
