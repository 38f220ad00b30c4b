"""Grammars by llguidance: as texts they are its json_schema, Lark or regex."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Sequence

import llguidance
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, StructTag

from slipstream.config.structured_outputs import StructuredOutputsConfig
from slipstream.contracts.limits import MAX_CHOICES
from slipstream.contracts.structured_outputs import StructuredOutputsParams
from slipstream.grammar.form import (
    ANY_OBJECT,
    MAX_WHITESPACE,
    NO_TEXT,
    check_intersections,
    constraint_text,
    first_line,
    read_schema,
    read_tags,
)
from slipstream.grammar.library import Matcher, Start
from slipstream.text.parsers.reasoning import CLOSE, OPEN
from slipstream.text.tokenizer import Tokenizer

Array = np.ndarray

WHITESPACE = rf"[\x20\x0A\x0D\x09]{{1,{MAX_WHITESPACE}}}"
# Its words for a grammar that stops before it begins.
NO_EXTENSION = ("NoExtension", "NoExtensionBias")
_sharing = threading.Lock()


class Guidance:
    """See Library. ends: legal where a grammar may end, and nowhere else."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]) -> None:
        self._is_special = tokenizer.is_special
        self._mask_bytes = 4 * -(-vocab_size // 32)
        # Errors are told to users: without the parser's state and the grammar. Choices begin a row together.
        self._limits = LLParserLimits(verbose_errors=False, max_items_in_row=3 * MAX_CHOICES)
        with _sharing:
            self._vocabulary = _vocabulary(tokenizer.to_json(), vocab_size, tuple(ends))

    def text(self, params: StructuredOutputsParams, config: StructuredOutputsConfig) -> str:
        grammar = _grammar(params, config, self._is_special)
        return grammar if not params.thoughts else _after_thoughts(grammar, params.thoughts == "open")

    def compile(self, text: str) -> Start:
        start = LLMatcher(self._vocabulary, text, log_level=0, limits=self._limits)
        _check(start)
        return lambda: _Matcher(start.deep_copy(), self._mask_bytes)


class _Matcher:
    def __init__(self, matcher: LLMatcher, mask_bytes: int) -> None:
        self._matcher, self._mask_bytes = matcher, mask_bytes

    def consume(self, tokens: Sequence[int]) -> None:
        self._matcher.consume_tokens(list(tokens))
        _check(self._matcher)

    def fill(self, mask: Array) -> None:
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, self._mask_bytes)
        _check(self._matcher)

    def forced(self) -> Sequence[int]:
        forced: list[int] = self._matcher.compute_ff_tokens()
        return forced

    def fork(self) -> Matcher:
        return _Matcher(self._matcher.deep_copy(), self._mask_bytes)


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        told = matcher.get_error()
        raise ValueError(NO_TEXT if told.strip() in NO_EXTENSION else first_line(told))


@functools.lru_cache(2)
def _vocabulary(tokenizer: str, vocab_size: int, ends: tuple[int, ...]) -> LLTokenizer:
    """Engines of one process share it."""
    return LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(ends) or None)


def _grammar(
    params: StructuredOutputsParams, config: StructuredOutputsConfig, is_special: Callable[[str], bool]
) -> str:
    text = constraint_text(params)
    match params.kind:
        case "json":
            return _json_grammar(text, config)
        case "json_object":
            return _json_grammar(json.dumps(ANY_OBJECT), config)
        case "regex":
            return LLMatcher.grammar_from_regex(text)
        case "choice":
            return llguidance.grammar_from("choice", text)
        case "grammar":
            check_intersections(text)
            return llguidance.grammar_from(params.kind, text)
        case _:
            tags = [
                StructTag(trigger=tag.trigger, begin=tag.begin, grammar=tag.schema, end=tag.end)
                for tag in read_tags(text)[0]
            ]
            return StructTag.to_grammar(tags, assume_special=all(is_special(tag.trigger) for tag in tags))


def _after_thoughts(grammar: str, is_open: bool) -> str:
    """The grammar where thoughts may stand first: already open, or opened by the answer. Line feeds after
    them are not of the answer (see ThinkParser)."""
    start, begin = ("think LINES", "") if is_open else ("(think LINES)?", f'"{OPEN}" ')
    lark = (
        f"%llguidance {{}}\nstart: {start} @answer\nthink[lazy]: {begin}THOUGHTS \"{CLOSE}\"\n"
        "THOUGHTS: /(.|\\n)*/\nLINES: /\\n{0,4}/\n"
    )
    parts = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    parts[0]["name"] = "answer"
    return json.dumps({"grammars": [{"name": "start", "lark_grammar": lark}, *parts]})


def _json_grammar(schema: str, config: StructuredOutputsConfig) -> str:
    text = json.dumps(read_schema(schema, config))
    if config.disable_any_whitespace:
        return LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_flexible": False})
    return LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": WHITESPACE})
