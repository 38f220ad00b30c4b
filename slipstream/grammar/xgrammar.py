"""Grammars by xgrammar: as texts they are its own JSON. Importing it takes torch along, which it needs."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from xgrammar import Grammar, GrammarCompiler, GrammarMatcher, TokenizerInfo, VocabType

from slipstream.config.structured_outputs import StructuredOutputsConfig
from slipstream.contracts.limits import MAX_GRAMMAR_CHARS
from slipstream.contracts.structured_outputs import StructuredOutputsParams
from slipstream.grammar.exact import bare_pattern, exact_schema
from slipstream.grammar.form import (
    ANY_OBJECT,
    MAX_WHITESPACE,
    check_size,
    constraint_text,
    first_line,
    read_schema,
    read_tags,
)
from slipstream.grammar.library import Matcher, Start
from slipstream.text.parsers.reasoning import CLOSE, OPEN
from slipstream.text.tokenizer import Tokenizer

Array = np.ndarray
T = TypeVar("T")

# Before what its errors say: the time, and a line of its source.
_ORIGIN = re.compile(r"^\[[0-9:]+\] \S+:\d+: (Check failed: \(.*?\) is false: )?")


class XGrammar:
    """See Library. ends: legal where a grammar may end, and nowhere else; other special tokens are never
    legal. Raises ValueError for a vocabulary whose tokens have no bytes of their own."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]) -> None:
        self._is_special, self._num_words = tokenizer.is_special, -(-vocab_size // 32)
        spelled = [tokenizer.token_bytes(token) for token in range(min(tokenizer.vocab_size, vocab_size))]
        if None in spelled:
            raise ValueError("xgrammar needs a vocabulary of bytes or of SentencePiece")
        silent = tokenizer.special_ids
        tokens = tuple(b"" if i in silent else one or b"" for i, one in enumerate(spelled))
        self._compiler = _compiler(tokens, vocab_size, tuple(ends))

    def text(self, params: StructuredOutputsParams, config: StructuredOutputsConfig) -> str:
        def made() -> str:
            grammar = _grammar(params, config, self._is_special)
            if params.thoughts:
                grammar = Grammar.concat(_thoughts(params.thoughts == "open"), grammar)
            return grammar.serialize_json()

        return _said(made)

    def compile(self, text: str) -> Start:
        compiled = _said(lambda: self._compiler.compile_grammar(Grammar.deserialize_json(text)))
        return lambda: _Matcher(GrammarMatcher(compiled), self._num_words)


class _Matcher:
    def __init__(self, matcher: GrammarMatcher, num_words: int) -> None:
        self._matcher, self._num_words = matcher, num_words

    def consume(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if not self._matcher.accept_token(token):
                raise ValueError(f"token {token} is not of the grammar")

    def fill(self, mask: Array) -> None:
        _said(lambda: self._matcher.fill_next_token_bitmask(mask[: self._num_words]))

    def forced(self) -> Sequence[int]:
        return _said(self._matcher.find_jump_forward_tokens)

    def fork(self) -> Matcher:
        return _Matcher(self._matcher.fork(), self._num_words)


def _said(call: Callable[[], T]) -> T:
    """Its errors as ValueError, without where in its source they were."""
    try:
        return call()
    except RuntimeError as error:
        raise ValueError(_ORIGIN.sub("", first_line(str(error)))) from None


@functools.lru_cache(2)
def _compiler(tokens: tuple[bytes, ...], vocab_size: int, ends: tuple[int, ...]) -> GrammarCompiler:
    """Engines of one process share it. Workers of ours compile, one grammar each."""
    info = TokenizerInfo(list(tokens), VocabType.RAW, vocab_size=vocab_size, stop_token_ids=list(ends))
    return GrammarCompiler(info, max_threads=1, cache_enabled=False)


def _grammar(
    params: StructuredOutputsParams, config: StructuredOutputsConfig, is_special: Callable[[str], bool]
) -> Grammar:
    text = constraint_text(params)
    match params.kind:
        case "json":
            return _json_grammar(read_schema(text, config), config)
        case "json_object":
            return _json_grammar(ANY_OBJECT, config)
        case "regex":
            check_size(params, text, MAX_GRAMMAR_CHARS)  # its time grows with the square
            return Grammar.from_regex(bare_pattern(text, in_json=False))
        case "choice":
            words = [{"type": "const_string", "value": word} for word in json.loads(text)]
            return _tag({"type": "or", "elements": words})
        case "grammar":
            return Grammar.from_ebnf(text) if "::=" in text else Grammar.from_lark(text)
        case _:
            return _tag_grammar(text, config, is_special)


def _json_grammar(schema: Any, config: StructuredOutputsConfig) -> Grammar:
    return Grammar.from_json_schema(
        json.dumps(exact_schema(schema)),
        any_whitespace=not config.disable_any_whitespace,
        max_whitespace_cnt=None if config.disable_any_whitespace else MAX_WHITESPACE,
        strict_mode=False,
    )


def _tag(form: dict[str, Any]) -> Grammar:
    return Grammar.from_structural_tag({"type": "structural_tag", "format": form})


def _tag_grammar(text: str, config: StructuredOutputsConfig, is_special: Callable[[str], bool]) -> Grammar:
    """Objects between tags have the properties that their schema names, whatever it says of others."""
    tags, triggers = read_tags(text)
    special = next((tag.trigger for tag in tags if is_special(tag.trigger)), None)
    if special is not None:
        raise ValueError(f"trigger {special!r}: is a special token, which xgrammar does not see in a text")
    spaces = 1 if config.disable_any_whitespace else MAX_WHITESPACE  # here it knows no fewer

    def content(schema: Any) -> dict[str, Any]:
        read = read_schema(schema if isinstance(schema, str) else json.dumps(schema), config)
        return {"type": "json_schema", "json_schema": exact_schema(read), "max_whitespace_cnt": spaces}

    forms = [
        {"type": "tag", "begin": tag.begin, "content": content(tag.schema), "end": tag.end} for tag in tags
    ]
    return _tag({"type": "triggered_tags", "triggers": triggers, "tags": forms})


def _thoughts(is_open: bool) -> Grammar:
    """Thoughts before the grammar: already open, or opened by the answer. Line feeds after them are not of
    the answer (see ThinkParser)."""
    begin, anything = "" if is_open else OPEN, {"type": "any_text"}
    thoughts = {"type": "tag", "begin": begin, "content": anything, "end": CLOSE}
    first = {"type": "sequence", "elements": [thoughts, {"type": "regex", "pattern": r"\n{0,4}"}]}
    return _tag(first if is_open else {"type": "optional", "content": first})
