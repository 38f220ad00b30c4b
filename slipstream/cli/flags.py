"""Flags made from the tables that the code itself uses: EngineArgs' fields and the limits of sampling
parameters."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from slipstream.config.args import EngineArgs, flag_name
from slipstream.contracts.limits import BOOLS, NUMBERS
from slipstream.contracts.sampling_params import SamplingParams

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
# Left out: what a terminal does not show.
_NOT_ON_A_TERMINAL = ("n", "logprobs", "prompt_logprobs", "detokenize")


class Parser(argparse.ArgumentParser):
    """Takes flags whole (no abbreviations), with either dashes or underscores, and --flag.key VALUE for a key
    of a flag's JSON object, as vLLM's parser does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        try:
            return super().parse_known_args(None if args is None else _joined(args), namespace)
        except ValueError as error:
            self.error(str(error))


def _joined(arguments: Sequence[str]) -> list[str]:
    """Flags with dashes, those of keys as one JSON object. Raises ValueError for a flag of both forms."""
    kept: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    left = iter(arguments)
    for argument in left:
        name, equals, value = argument.partition("=")
        flag, dot, path = name.partition(".")
        if not dot or not argument.startswith("--"):
            kept.append(_dashes(argument))
            continue
        *outer, key = path.split(".")
        place = objects.setdefault(_dashes(flag), {})
        for part in outer:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise ValueError(f"{name}: {part} is a value, by another flag, and can't have keys")
        place[key] = _value(value if equals else next(left, ""))
    both = objects.keys() & {argument.partition("=")[0] for argument in kept}
    if both:
        raise ValueError(f"{min(both)}: an object, and keys of it by {min(both)}.KEY, must not be given both")
    return kept + [f"{flag}={json.dumps(value)}" for flag, value in objects.items()]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _dashes(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


def integer(text: str) -> int:
    """A whole number, with k, m, g for thousands or K, M, G for powers of 1024: 32k, 1.5G. Raises
    ValueError."""
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kmgKMG]?)", text.strip())
    value = float(match[1]) * _UNITS[match[2]] if match and "." in match[1] else None
    if match is None or (value is not None and not value.is_integer()):
        raise ValueError(text)
    return int(value) if value is not None else int(match[1]) * _UNITS[match[2]]


@contextmanager
def file_of(flag: str, path: Path | str) -> Iterator[None]:
    """Raises ValueError that names the flag for a file that the block cannot read, as text, or write."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{flag}={path}: {getattr(error, 'strerror', None) or error}") from None


def _plain_type(hint: Any) -> tuple[type, bool]:
    """(int, False) of int | None, (int, True) of list[int] | None, (str, False) of str | dict | None."""
    first = get_args(hint)[0] if isinstance(hint, UnionType) else hint
    many = get_origin(first) is list
    kind = get_args(first)[0] if many else first
    assert isinstance(kind, type)
    return kind, many


def add_engine_flags(parser: argparse.ArgumentParser, without: Sequence[str] = ()) -> None:
    """One flag a field of EngineArgs; the model is the positional argument. Unset flags leave no trace."""
    parser.add_argument("model", help="a Hugging Face folder or a GGUF file")
    group = parser.add_argument_group("engine")
    hints = get_type_hints(EngineArgs)
    for field in fields(EngineArgs):
        if field.name == "model" or field.name in without:
            continue
        kind, many = _plain_type(hints[field.name])
        text = field.metadata["help"] + ("" if field.default is None else f" (default: {field.default})")
        flag = flag_name(field.name)
        if kind is bool:
            group.add_argument(
                flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
            )
        else:
            group.add_argument(
                flag,
                type=integer if kind is int else kind,
                nargs="+" if many else None,
                metavar=kind.__name__.upper(),
                default=argparse.SUPPRESS,
                help=text,
            )


def engine_args(options: argparse.Namespace) -> EngineArgs:
    """EngineArgs of the flags that were given."""
    given = vars(options)
    return EngineArgs(
        **{field.name: given[field.name] for field in fields(EngineArgs) if field.name in given}
    )


def add_sampling_flags(parser: argparse.ArgumentParser, max_tokens: int | None) -> None:
    """One flag a sampling parameter that makes sense for a terminal. max_tokens: default of that flag; None:
    there is no such flag."""
    group = parser.add_argument_group("sampling")
    for rule in NUMBERS:
        if rule.field in _NOT_ON_A_TERMINAL or (rule.field == "max_tokens" and max_tokens is None):
            continue
        default = max_tokens if rule.field == "max_tokens" else argparse.SUPPRESS
        group.add_argument(
            "--" + rule.field.replace("_", "-"),
            type=integer if rule.integer else float,
            metavar="INT" if rule.integer else "FLOAT",
            default=default,
            help=rule.limit,
        )
    for name in BOOLS:
        if name not in _NOT_ON_A_TERMINAL:
            group.add_argument(
                "--" + name.replace("_", "-"),
                action=argparse.BooleanOptionalAction,
                default=argparse.SUPPRESS,
                help=f"(default: {getattr(SamplingParams(), name)})",
            )
    for flag, kind, text in (
        ("--stop", str, "end at this text"),
        ("--stop-token-ids", int, "end at this token id"),
        ("--bad-words", str, "never say this"),
    ):
        group.add_argument(
            flag, action="append", type=kind, default=argparse.SUPPRESS, help=f"{text}; repeatable"
        )


def sampling_params(options: argparse.Namespace) -> SamplingParams:
    """SamplingParams of the flags that were given. Raises BadRequest."""
    given = vars(options)
    names = {field.name for field in fields(SamplingParams)} - set(_NOT_ON_A_TERMINAL)
    return SamplingParams(**{name: given[name] for name in names if name in given})
