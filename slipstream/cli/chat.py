"""`slipstream chat MODEL`: a conversation at the terminal. /reset forgets it, /exit or Ctrl-D leaves."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from slipstream.cli.flags import add_engine_flags, add_sampling_flags, engine_args, sampling_params
from slipstream.contracts.errors import BadRequest


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "chat",
        help="talk with a model at the terminal",
        description=__doc__,
        usage="slipstream chat MODEL [flags]",
    )
    add_engine_flags(parser, without=("seed", "served_model_name"))
    parser.add_argument("--system", default=None, metavar="TEXT", help="system message")
    add_sampling_flags(parser, max_tokens=1024)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Raises ValueError for flags that cannot be honoured."""
    params = sampling_params(options)

    from slipstream.cli.session import Session, note, to_stdout

    start: list[dict[str, Any]] = []
    if options.system is not None:
        start.append({"role": "system", "content": options.system})
    with Session(engine_args(options)) as session:
        if not session.has_template:
            raise ValueError("--chat-template: the model has none, give one")
        messages = list(start)
        while (line := _ask()) is not None:
            if line == "/reset":
                messages = list(start)
            elif line.startswith("/"):
                note(f"{line}: commands are /reset and /exit")
            elif line:
                turn = [*messages, {"role": "user", "content": line}]
                try:
                    text, speed = session.stream(session.encode_chat(turn), params, to_stdout)
                    messages = [*turn, {"role": "assistant", "content": text}]
                    note(f"\n{speed.line()}")
                except KeyboardInterrupt:
                    note("\n[stopped; the turn is forgotten]")
                except BadRequest as error:
                    note(f"error: {error}")
    return 0


def _ask() -> str | None:
    """The next line, None at the end of the conversation."""
    try:
        line = input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None
    return None if line in ("/exit", "/quit") else line
