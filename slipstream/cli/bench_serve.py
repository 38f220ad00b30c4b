"""`slipstream bench serve`: load on a running OpenAI-compatible server, and how it answered: requests and
tokens a second, time to the first token, between tokens and to the end, and how many requests were fast."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import importlib.util
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.cli.bench_report import add_report_flags, check_report, lengths, positive, write_report
from slipstream.cli.flags import file_of
from slipstream.contracts.errors import EngineError

if TYPE_CHECKING:
    from slipstream.cli.serve_client import Run, Target
    from slipstream.cli.serve_load import Ask

TOLD = ("endpoint", "num_prompts", "request_rate", "burstiness", "ramp_up_strategy", "ramp_up_start_rps",
        "ramp_up_end_rps", "max_concurrency", "input_len", "output_len", "seed")  # fmt: skip
BAR_SECONDS = 0.25
GOALS = {"ttft": "ttft", "tpot": "tpot", "e2el": "e2e"}  # as vLLM names them


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "serve", help="load on a running server", description=__doc__,
        usage="slipstream bench serve [--base-url URL] [flags]",
    )
    server = parser.add_argument_group("server")
    server.add_argument("--base-url", default="http://127.0.0.1:8000", help="(default: %(default)s)")
    server.add_argument("--endpoint", default="/v1/completions", help="or /v1/chat/completions")
    server.add_argument("--model", default=None, help="(default: the first that the server names)")
    server.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="(or OPENAI_API_KEY)")
    server.add_argument(
        "--extra-body", type=json_object, default={}, metavar="JSON", help="fields of every request"
    )
    server.add_argument(
        "--ignore-eos", action=argparse.BooleanOptionalAction, default=True,
        help="answers are as long as asked; servers that do not know the field need --no-ignore-eos",
    )
    server.add_argument("--request-timeout", type=above_zero, default=600.0, metavar="SECONDS")
    _add_load(parser.add_argument_group("load"))
    report = parser.add_argument_group("report")
    report.add_argument(
        "--goodput", type=goal, nargs="+", default=[], metavar="METRIC:MS",
        help="count requests that keep all of these: ttft:200 tpot:50 e2el:10000, milliseconds",
    )
    report.add_argument(
        "--progress", action=argparse.BooleanOptionalAction, default=True, help="show a bar (default: yes)"
    )
    add_report_flags(parser)
    parser.set_defaults(run=run)


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--num-prompts", type=positive, default=200, help="requests (default: %(default)s)")
    group.add_argument(
        "--request-rate", type=above_zero, default=math.inf, metavar="RATE",
        help="requests a second, open loop (default: inf, all at once or as --max-concurrency lets)",
    )
    group.add_argument(
        "--burstiness", type=above_zero, default=1.0,
        help="of arrivals: 1 is Poisson, less comes in bursts, more evenly (default: %(default)s)",
    )
    group.add_argument(
        "--ramp-up-strategy", choices=("linear", "exponential"), default=None,
        help="the rate grows over the requests, instead of --request-rate",
    )
    for flag, which in (("--ramp-up-start-rps", "first"), ("--ramp-up-end-rps", "last")):
        group.add_argument(
            flag, type=finite, default=None, metavar="RATE", help=f"requests a second at the {which} one"
        )
    group.add_argument(
        "--max-concurrency", type=positive, default=None, help="requests at once; alone: a closed loop"
    )
    for flag, what in (("--input-len", "a prompt"), ("--output-len", "an answer")):
        group.add_argument(
            flag, type=lengths, default=None, metavar="N[:M]",
            help=f"tokens of {what}, or evenly drawn from N to M (default: as ShareGPT's chats have them)",
        )
    group.add_argument(
        "--dataset", type=Path, default=None, metavar="FILE", help="conversations in ShareGPT's format"
    )
    group.add_argument(
        "--text", type=Path, default=None, metavar="FILE",
        help="cut prompts out of this text (default: Python's own help texts)",
    )
    group.add_argument(
        "--tokenizer", default=None, metavar="MODEL",
        help="a folder or GGUF file, for exact lengths of prompts (default: 4.2 characters a token)",
    )
    group.add_argument("--num-warmups", type=int, default=1, help="requests before (default: %(default)s)")
    group.add_argument("--seed", type=int, default=0, help="of lengths, places and arrivals")


def above_zero(text: str) -> float:
    """Raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number above 0, or inf")
    return value


def finite(text: str) -> float:
    """Raises ArgumentTypeError."""
    value = above_zero(text)
    if math.isinf(value):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a finite number above 0")
    return value


def json_object(text: str) -> dict[str, Any]:
    """Raises ArgumentTypeError."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a JSON object")
    return value


def goal(text: str) -> tuple[str, float]:
    """("ttft", 200.0) of ttft:200. Raises ArgumentTypeError."""
    name, _, limit = text.partition(":")
    if name not in GOALS:
        raise argparse.ArgumentTypeError(f"{text!r}: must be one of {', '.join(GOALS)}, then :MILLISECONDS")
    return name, above_zero(limit)


def run(options: argparse.Namespace) -> int:
    """Prints a table. Raises ValueError for flags that cannot be honoured, EngineError where every request
    failed."""
    from slipstream.cli.serve_stats import draw, figures, print_figures

    if importlib.util.find_spec("aiohttp") is None:
        raise ValueError("bench serve needs aiohttp (pip install 'slipstream[bench]')")
    check_report(options)
    load = make_load(options)
    with asyncio.Runner(loop_factory=quick_loop()) as runner:
        done, seconds = runner.run(_measure(options, load))
    if done.failed == len(done.records):
        raise EngineError(f"every request failed, the first one so: {done.records[0].error}")
    found = figures(done.records, seconds, dict(options.goodput), done.most_running)
    told = {name: getattr(options, name) for name in TOLD}
    told["request_rate"] = None if told["request_rate"] == math.inf else told["request_rate"]
    print_figures(found)
    write_report(options, "serve", {**told, **found}, lambda figure: draw(figure, done.records))
    return 0


def quick_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where it is installed: it halves how late 1,000 streams are read on a busy machine."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop

    make: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return make


def make_load(options: argparse.Namespace) -> list[Ask]:
    """What to ask, and when. Raises ValueError for files that do not serve."""
    import numpy as np

    from slipstream.cli import serve_load

    random = np.random.default_rng(options.seed)
    due = serve_load.arrivals(random, options.num_prompts, _rate(options), options.burstiness)
    tokenizer = _tokenizer(options.tokenizer)
    if options.dataset is not None:
        return _from_dataset(options, random, due, tokenizer)
    with file_of("--text", options.text):
        text = serve_load.default_text() if options.text is None else options.text.read_text("utf-8")
    encode = None if tokenizer is None else lambda piece: tokenizer.encode(piece, add_special_tokens=False)
    pieces = serve_load.Excerpts(text, random, encode, None if tokenizer is None else tokenizer.decode)
    inputs, outputs = serve_load.chat_lengths(random, options.num_prompts)
    if options.input_len is not None:
        inputs = serve_load.even_lengths(random, options.input_len, options.num_prompts)
    if options.output_len is not None:
        outputs = serve_load.even_lengths(random, options.output_len, options.num_prompts)
    return serve_load.asks(random, due, pieces, inputs, outputs)


def _rate(options: argparse.Namespace) -> Any:
    """A number, or one a request. Raises ValueError for a ramp that is told in part, or beside a rate."""
    from slipstream.cli.serve_load import ramp

    ends = options.ramp_up_start_rps, options.ramp_up_end_rps
    if options.ramp_up_strategy is None and ends == (None, None):
        return options.request_rate
    if None in (options.ramp_up_strategy, *ends):
        raise ValueError("--ramp-up-strategy needs --ramp-up-start-rps, --ramp-up-end-rps, and they need it")
    if options.request_rate != math.inf:
        raise ValueError(f"--request-rate={options.request_rate:g}: --ramp-up-strategy says the rate")
    return ramp(options.ramp_up_strategy, *ends, options.num_prompts)


def _tokenizer(model: str | None) -> Any:
    if model is None:
        return None
    from slipstream.text.tokenizer import load_tokenizer

    return load_tokenizer(model)


def _from_dataset(options: argparse.Namespace, random: Any, due: Any, tokenizer: Any) -> list[Ask]:
    """Conversations in a drawn order, over again where there are too few."""
    from slipstream.cli.serve_load import CHARACTERS_A_TOKEN, Ask, conversations, even_lengths

    def count(text: str) -> int:
        if tokenizer is None:
            return round(len(text) / CHARACTERS_A_TOKEN)
        return len(tokenizer.encode(text, add_special_tokens=False))

    talks = list(conversations(options.dataset, count))
    if not talks:
        raise ValueError(f"--dataset={options.dataset}: holds no conversation of a length that is used")
    if options.input_len is not None:
        raise ValueError("--input-len and --dataset: prompts are as long as the file's")
    order = random.permutation(len(talks))
    chosen = [talks[order[i % len(talks)]] for i in range(options.num_prompts)]
    most = [tokens for _, tokens in chosen]
    if options.output_len is not None:
        most = even_lengths(random, options.output_len, options.num_prompts).tolist()
    return [
        Ask(text, tokens, float(when)) for (text, _), tokens, when in zip(chosen, most, due, strict=True)
    ]


async def _measure(options: argparse.Namespace, load: list[Ask]) -> tuple[Run, float]:
    from tqdm.auto import tqdm

    from slipstream.cli.serve_client import Run, Target, first_model

    body: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    if options.ignore_eos:
        body["ignore_eos"] = True
    target = Target(
        base_url=options.base_url, endpoint=options.endpoint, body=body, api_key=options.api_key,
        timeout=options.request_timeout,
    )
    body["model"] = await first_model(target) if options.model is None else options.model
    body |= options.extra_body
    await _warm_up(options.num_warmups, load, target)
    measured = Run(target, load, options.max_concurrency)
    with tqdm(total=len(load), unit="req", disable=not options.progress, dynamic_ncols=True) as bar:
        ticking = asyncio.create_task(_tick(bar, measured))
        try:
            seconds = await measured.run()
        finally:
            ticking.cancel()
        bar.update(measured.done - bar.n)
    return measured, seconds


async def _tick(bar: Any, run: Run) -> None:
    """The bar moves on its own time, so that a chunk costs it nothing."""
    before = 0
    while True:
        await asyncio.sleep(BAR_SECONDS)
        rate, before = (run.chunks - before) / BAR_SECONDS, run.chunks
        failed = f", {run.failed} failed" if run.failed else ""
        bar.set_postfix_str(f"{run.running} running, {rate:,.0f} chunks/s{failed}", refresh=False)
        bar.update(run.done - bar.n)


async def _warm_up(count: int, load: list[Ask], target: Target) -> None:
    """Raises EngineError where the first requests fail: the rest would as well."""
    from slipstream.cli.serve_client import Run

    if count <= 0:
        return
    first = [dataclasses.replace(ask, due=0.0, prompt=ask.prompt[::-1]) for ask in load[:count]]
    trial = Run(target, first, None)
    await trial.run()
    if trial.failed:
        raise EngineError(f"{target.base_url}{target.endpoint}: {trial.records[0].error}")
