"""`slipstream serve MODEL`: the OpenAI-compatible HTTP server."""

from __future__ import annotations

import argparse
import os
from typing import Any

from slipstream.cli.flags import add_engine_flags, engine_args

LEVELS = ("critical", "error", "warning", "info", "debug")
KEY_VARIABLE = "SLIPSTREAM_API_KEY"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="serve a model over HTTP, as OpenAI does",
        description=__doc__,
        usage="slipstream serve MODEL [flags]",
    )
    add_engine_flags(parser)
    add_server_flags(parser)
    parser.set_defaults(run=run)


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Where and how to listen: nothing that the engine's plan depends on."""
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    group.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help=f"a key that clients must send; repeatable; {KEY_VARIABLE} holds one more",
    )
    group.add_argument(
        "--log-level", choices=LEVELS, default="info", help="of our own log (default: %(default)s)"
    )
    group.add_argument(
        "--uvicorn-log-level",
        choices=LEVELS,
        default="info",
        help="of the HTTP server's log (default: %(default)s)",
    )
    group.add_argument("--disable-uvicorn-access-log", action="store_true", help="no line for each request")


def run(options: argparse.Namespace) -> int:
    """Serves until SIGINT or SIGTERM. Raises ValueError for flags that cannot be honoured, OSError for a
    port that cannot be had."""
    from slipstream.server.launch import ServeOptions, serve

    keys = [*options.api_key, *filter(None, [os.environ.get(KEY_VARIABLE)])]
    if not all(keys):
        raise ValueError("--api-key='': must not be empty")
    serve(
        engine_args(options),
        ServeOptions(
            host=options.host,
            port=options.port,
            api_keys=tuple(keys),
            log_level=options.log_level,
            uvicorn_log_level=options.uvicorn_log_level,
            access_log=not options.disable_uvicorn_access_log,
        ),
    )
    return 0
