"""`slipstream generate MODEL --prompt TEXT`: answers on stdout as they come, their speed on stderr."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.cli.flags import add_engine_flags, add_sampling_flags, engine_args, file_of, sampling_params

if TYPE_CHECKING:
    from slipstream.cli.session import Session


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "generate",
        help="answer prompts at the terminal",
        description=__doc__,
        usage="slipstream generate MODEL [flags]",
    )
    add_engine_flags(parser, without=("seed", "served_model_name"))
    group = parser.add_argument_group("prompts")
    group.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="repeatable")
    group.add_argument(
        "--prompt-file",
        action="append",
        default=[],
        metavar="FILE",
        help="a file that is one prompt; - is stdin; repeatable",
    )
    group.add_argument("--system", default=None, metavar="TEXT", help="system message, for the chat template")
    group.add_argument(
        "--raw", action="store_true", help="continue the prompt as it is, without the chat template"
    )
    group.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="one prompt after the other as text comes, or all in one batch (default: stream)",
    )
    add_sampling_flags(parser, max_tokens=256)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Raises ValueError for flags that cannot be honoured."""
    texts = options.prompt + [_read(name) for name in options.prompt_file]
    if not texts:
        raise ValueError("--prompt or --prompt-file: at least one is needed")
    params = sampling_params(options)

    from slipstream.cli.session import Session, note, to_stdout

    with Session(engine_args(options)) as session:
        prompts = [_encode(session, text, options) for text in texts]
        if options.stream:
            for prompt in prompts:
                _, speed = session.stream(prompt, params, to_stdout)
                print(flush=True)
                note(speed.line())
        else:
            for text, speed in session.whole(prompts, params):
                print(text)
                note(speed.line())
    return 0


def _encode(session: Session, text: str, options: argparse.Namespace) -> list[int]:
    if options.raw or not session.has_template:
        if options.system is not None:
            raise ValueError("--system: needs a chat template, and no --raw")
        return session.encode(text)
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    return session.encode_chat([*system, {"role": "user", "content": text}])


def _read(name: str) -> str:
    with file_of("--prompt-file", name):
        return sys.stdin.read() if name == "-" else Path(name).read_text("utf-8")
