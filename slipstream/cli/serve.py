"""`slipstream serve MODEL`: the OpenAI-compatible HTTP server."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import fields
from typing import Any

from slipstream.cli.flags import add_engine_flags, engine_args, integer
from slipstream.observe.log import FORMATTERS
from slipstream.text.parsers.registry import REASONING_PARSERS, TOOL_PARSERS

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
    """Where and how to listen, who may ask and how much, how answers are read: nothing that the engine's plan
    depends on."""
    _add_listening(parser.add_argument_group("server"))
    _add_seeing(parser.add_argument_group("logs and traces"))
    _add_limits(parser.add_argument_group("limits of the server"))
    _add_tls_and_cors(parser.add_argument_group("TLS and CORS"))
    group = parser.add_argument_group("tools and reasoning")
    group.add_argument("--tool-call-parser", choices=TOOL_PARSERS, help="how the model writes calls of tools")
    group.add_argument(
        "--enable-auto-tool-choice", action="store_true", help="the model may call tools when it likes"
    )
    group.add_argument(
        "--reasoning-parser", choices=REASONING_PARSERS, help="how the model marks what it thinks"
    )


def _add_listening(group: argparse._ArgumentGroup) -> None:
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
        "--shutdown-timeout",
        type=int,
        default=30,
        metavar="SECONDS",
        help="that answers in flight may go on after SIGTERM (default: %(default)s)",
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


def _add_seeing(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--log-format", choices=FORMATTERS, default="text", help="of all logs (default: %(default)s)"
    )
    group.add_argument(
        "--enable-log-requests", action="store_true", help="log each request's counts and times as it ends"
    )
    group.add_argument(
        "--otlp-traces-endpoint", metavar="URL",
        help="send a span of each request there; needs OpenTelemetry (slipstream[otel])",
    )


def _add_limits(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-concurrent-requests",
        type=integer,
        default=4096,
        metavar="INT",
        help="answers in the making; more get a 429; 0: no limit (default: %(default)s)",
    )
    group.add_argument(
        "--max-queue-seconds",
        type=float,
        metavar="SECONDS",
        help="that a request may wait for a row before it gets a 503 (default: no limit)",
    )
    group.add_argument(
        "--max-request-bytes",
        type=integer,
        default=16 * 2**20,
        metavar="INT",
        help="of a body (default: %(default)s)",
    )


def _add_tls_and_cors(group: argparse._ArgumentGroup) -> None:
    for flag, text in (
        ("--ssl-certfile", "certificate; with it the server speaks HTTPS"),
        ("--ssl-keyfile", "its key, if not in the same file"),
        ("--ssl-keyfile-password", "of the key"),
        ("--ssl-ca-certs", "authorities of clients' certificates"),
    ):
        group.add_argument(flag, metavar="TEXT", help=text)
    group.add_argument("--ssl-ciphers", default="TLSv1", help="in OpenSSL's notation (default: %(default)s)")
    group.add_argument(
        "--ssl-cert-reqs", type=int, choices=(0, 1, 2), default=0,
        help="clients need no certificate, may have one, must have one (default: %(default)s)",
    )
    for flag in ("--allowed-origins", "--allowed-methods", "--allowed-headers"):
        group.add_argument(
            flag, type=json_list, default=["*"], metavar="JSON",
            help='list of what browsers may use (default: ["*"])',
        )
    group.add_argument("--allow-credentials", action="store_true", help="browsers may send cookies")


def json_list(text: str) -> list[str]:
    """A JSON list of strings. Raises ArgumentTypeError."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a JSON list of strings such as '[\"*\"]'")
    return value


def run(options: argparse.Namespace) -> int:
    """Serves until SIGINT or SIGTERM. Raises ValueError for flags that cannot be honoured, OSError for a
    port that cannot be had."""
    from slipstream.server.launch import ServeOptions, Tls, serve
    from slipstream.server.options import ServerOptions

    given = vars(options)
    keys = [*options.api_key, *filter(None, [os.environ.get(KEY_VARIABLE)])]
    names = {field.name for field in fields(ServerOptions)} - {"api_keys"}
    server = ServerOptions(api_keys=tuple(keys), **{name: given[name] for name in names})
    serve(
        engine_args(options),
        ServeOptions(
            host=options.host,
            port=options.port,
            log_level=options.log_level,
            log_format=options.log_format,
            uvicorn_log_level=options.uvicorn_log_level,
            access_log=not options.disable_uvicorn_access_log,
            shutdown_timeout=options.shutdown_timeout,
            tls=Tls(**{field.name: given[f"ssl_{field.name}"] for field in fields(Tls)}),
            server=server,
        ),
    )
    return 0
