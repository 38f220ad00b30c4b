"""The engine under the benchmarks that need a model: its flags, prompts of chosen lengths, and a clock on its
steps."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.cli.bench_report import lengths
from slipstream.cli.flags import add_engine_flags, add_sampling_flags, engine_args, file_of, sampling_params
from slipstream.config.args import EngineArgs
from slipstream.contracts.errors import EngineError
from slipstream.contracts.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np

    from slipstream.engine.llm import LLM
    from slipstream.text.tokenizer import Tokenizer

WARM_UP_TOKENS = 8


def add_load_flags(
    parser: argparse.ArgumentParser, input_len: str, output_len: str, without: Sequence[str] = ()
) -> None:
    """The engine's flags but those of the fields in without, sampling, lengths. input_len, output_len:
    defaults. The load is the same in every run."""
    left_out = ("seed", "skip_tokenizer_init", "served_model_name", "chat_template", *without)
    add_engine_flags(parser, without=left_out)
    group = parser.add_argument_group("load")
    for flag, default, what in (("--input-len", input_len, "prompt"), ("--output-len", output_len, "output")):
        group.add_argument(
            flag, type=lengths, default=lengths(default), metavar="N[:M]",
            help=f"tokens of a {what}, or evenly drawn from N to M (default: {default})",
        )
    group.add_argument(
        "--text", type=Path, default=None, metavar="FILE",
        help="cut prompts out of this text; needs a tokenizer (default: random token ids)",
    )
    group.add_argument(
        "--progress", action=argparse.BooleanOptionalAction, default=True, help="show a bar (default: yes)"
    )
    add_sampling_flags(parser, max_tokens=None)
    parser.set_defaults(ignore_eos=True)  # lengths are the load's own, unless one asks


def load_args(options: argparse.Namespace) -> EngineArgs:
    """The engine's, with a tokenizer only where prompts come out of a text."""
    return dataclasses.replace(engine_args(options), skip_tokenizer_init=options.text is None)


class Load:
    """Requests as the flags ask. vocab_size: of random prompts; tokenizer: of --text. Raises ValueError
    for flags that cannot be honoured."""

    def __init__(self, options: argparse.Namespace, vocab_size: int, tokenizer: Tokenizer | None) -> None:
        self._params = sampling_params(options).clone(detokenize=options.text is not None)
        self._input, self._output = options.input_len, options.output_len
        self._vocab_size = vocab_size
        self._text = None if tokenizer is None else self._encode(options.text, tokenizer)

    def _encode(self, path: Path, tokenizer: Tokenizer) -> list[int]:
        with file_of("--text", path):
            text = path.read_text("utf-8")
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) < self._input[1]:
            raise ValueError(f"--text={path}: has {len(ids)} tokens, --input-len asks for {self._input[1]}")
        return ids

    def requests(self, random: np.random.Generator, count: int) -> tuple[list[Any], list[SamplingParams]]:
        """Prompts, as LLM.generate takes them, and their parameters."""
        prompts = [
            {"prompt_token_ids": self._prompt(random, _draw(random, self._input))} for _ in range(count)
        ]
        return prompts, [self._params.clone(max_tokens=_draw(random, self._output)) for _ in range(count)]

    def _prompt(self, random: np.random.Generator, length: int) -> list[int]:
        if self._text is None:
            ids: list[int] = random.integers(0, self._vocab_size, length).tolist()
            return ids
        begin = int(random.integers(0, len(self._text) - length + 1))
        return self._text[begin : begin + length]


def _draw(random: np.random.Generator, ends: tuple[int, int]) -> int:
    return int(random.integers(ends[0], ends[1] + 1))


def warm_up(llm: LLM, prompts: list[Any], params: list[SamplingParams]) -> None:
    """A short run of these requests, so that nothing is compiled while one measures."""
    short = [one.clone(max_tokens=min(WARM_UP_TOKENS, one.max_tokens or 1)) for one in params]
    llm.generate(prompts, short, use_tqdm=False)


class BenchEngine:
    """An LLM and its load. Raises ValueError at construction for flags that cannot be honoured."""

    def __init__(self, options: argparse.Namespace) -> None:
        import numpy as np

        from slipstream.engine.llm import LLM

        args = load_args(options)
        begin = time.perf_counter()
        self.llm = LLM(**args.describe())
        self.start_seconds = time.perf_counter() - begin
        tokenizer = None if options.text is None else self.llm.get_tokenizer()
        self._load = Load(options, self.llm.info.limits.vocab_size, tokenizer)
        self._random = np.random.default_rng(0)

    def requests(self, count: int) -> tuple[list[Any], list[SamplingParams]]:
        """New prompts, as LLM.generate takes them, and their parameters."""
        return self._load.requests(self._random, count)

    def warm_up(self, count: int) -> None:
        """A short run of as many requests."""
        warm_up(self.llm, *self.requests(count))

    def describe(self) -> dict[str, Any]:
        """For the report: what the engine chose, and how long its start took."""
        choices = {name: choice["value"] for name, choice in self.llm.info.plan.items()}
        return {"start_seconds": self.start_seconds, "engine": choices}


class StepClock:
    """Seconds since begin at which each step's tokens arrived, and how many; an LLM's on_step."""

    def __init__(self) -> None:
        self.begin = time.perf_counter()
        self.seconds: list[float] = []
        self.tokens: list[int] = []

    def __call__(self, num_tokens: int) -> None:
        self.seconds.append(time.perf_counter() - self.begin)
        self.tokens.append(num_tokens)

    def first(self, requests: int) -> float:
        """Seconds to the step by which as many tokens had come as there are requests."""
        return self.seconds[self._first(requests)]

    def intervals(self, requests: int) -> list[float]:
        """Seconds between the steps after that one: decoding alone, where lengths are equal."""
        late = self.seconds[self._first(requests) :]
        return [after - before for before, after in itertools.pairwise(late)]

    def _first(self, requests: int) -> int:
        arrived = 0
        for step, count in enumerate(self.tokens):
            arrived += count
            if arrived >= requests:
                return step
        return len(self.tokens) - 1


def count_outputs(outputs: Sequence[Any]) -> int:
    """Tokens of all outputs. Raises EngineError where a request failed."""
    failed = [one for output in outputs for one in output.outputs if one.finish_reason == "error"]
    if failed:
        raise EngineError(f"{len(failed)} requests failed, so that the figures would mean nothing")
    return sum(len(one.token_ids) for output in outputs for one in output.outputs)
