"""From a request's constraint to the text of a grammar as llguidance reads it: json_schema, Lark or regex.

Sizes are checked here; what a grammar means is found out where it is compiled (compiler.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import llguidance
from llguidance import LLMatcher, StructTag

from slipstream.config.structured_outputs import StructuredOutputsConfig
from slipstream.contracts.errors import BadRequest
from slipstream.contracts.limits import MAX_CHOICES, MAX_CONSTRAINT_CHARS, MAX_GRAMMAR_CHARS
from slipstream.contracts.structured_outputs import StructuredOutputsParams
from slipstream.text.parsers.reasoning import CLOSE, OPEN

# Between the parts of a JSON text. Without an end to it, a small model may never come back from its spaces.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
ANY_OBJECT = {"type": "object"}
# llguidance's words for a grammar that stops before it begins.
NO_TEXT = ("NoExtension", "NoExtensionBias")
TAG_FIELDS = {"begin", "schema", "end"}


def grammar_text(
    params: StructuredOutputsParams, config: StructuredOutputsConfig, is_special: Callable[[str], bool]
) -> str:
    """is_special: whether a text is a special token of the vocabulary. Raises BadRequest that names the
    constraint."""
    try:
        grammar = _grammar(params, config, is_special)
        return grammar if not params.thoughts else _after_thoughts(grammar, params.thoughts == "open")
    except BadRequest:
        raise
    # A user's text in parsers that are not ours: whatever they raise is about that text.
    except Exception as error:
        raise params.wrong(first_line(str(error))) from None


def _grammar(
    params: StructuredOutputsParams, config: StructuredOutputsConfig, is_special: Callable[[str], bool]
) -> str:
    value = getattr(params, params.kind)
    text = value if isinstance(value, str) else json.dumps(value)
    _check_size(params, text)
    match params.kind:
        case "json":
            return _json_grammar(text, config)
        case "json_object":
            return _json_grammar(json.dumps(ANY_OBJECT), config)
        case "regex":
            return LLMatcher.grammar_from_regex(text)
        case "choice" | "grammar":
            return llguidance.grammar_from(params.kind, text)
        case _:
            return _tag_grammar(text, is_special)


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


def first_line(text: str) -> str:
    """What a parser complains of, without the text around it."""
    if text.strip() in NO_TEXT:
        return "allows no text at all"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("error:")]
    return "; ".join([*lines[:1], *told[:1]])[:300] or "cannot be compiled"


def _check_size(params: StructuredOutputsParams, text: str) -> None:
    most = MAX_CONSTRAINT_CHARS if params.grammar is None else MAX_GRAMMAR_CHARS
    if len(text) > most:
        limit = f"must be at most {most} characters"
        raise BadRequest(params.field, f"{len(text)} characters", limit)
    if params.choice is not None and len(params.choice) > MAX_CHOICES:
        raise BadRequest(params.field, f"{len(params.choice)} texts", f"must be at most {MAX_CHOICES}")


def _json_grammar(schema: str, config: StructuredOutputsConfig) -> str:
    read: Any = json.loads(schema)
    if read is False:
        raise ValueError("allows no text at all")
    read = {} if read is True else read
    if not isinstance(read, dict):
        raise ValueError("must be a JSON schema, so an object")
    if config.disable_additional_properties:
        read = _closed(read)
    if config.disable_any_whitespace:
        return LLMatcher.grammar_from_json_schema(json.dumps(read), overrides={"whitespace_flexible": False})
    return LLMatcher.grammar_from_json_schema(json.dumps(read), overrides={"whitespace_pattern": WHITESPACE})


def _closed(schema: Any) -> Any:
    """Every object that names its properties and does not say what others may be has no others."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed = {name: _closed(part) for name, part in schema.items()}
    if isinstance(schema.get("properties"), Mapping) or isinstance(schema.get("patternProperties"), Mapping):
        closed.setdefault("additionalProperties", False)
    return closed


def _tag_grammar(text: str, is_special: Callable[[str], bool]) -> str:
    """vLLM's form: {"structures": [{"begin", "schema", "end"}], "triggers": [...]}. Between the tags the text
    is free."""
    told = json.loads(text)
    if not isinstance(told, dict):
        raise ValueError("must be an object of structures and triggers")
    structures: Any = told.get("structures")
    triggers: Any = told.get("triggers")
    if not _is_list(structures, lambda one: isinstance(one, dict) and set(one) == TAG_FIELDS):
        raise ValueError("structures must be a list of {begin, schema, end}, at least one")
    if not _is_list(triggers, lambda one: isinstance(one, str) and one != ""):
        raise ValueError("triggers must be a list of texts, at least one")
    tags = []
    for one in structures:
        own = next((trigger for trigger in triggers if one["begin"].startswith(trigger)), None)
        if own is None:
            raise ValueError(f"begin={one['begin']!r}: starts with none of the triggers")
        tags.append(StructTag(trigger=own, begin=one["begin"], grammar=one["schema"], end=one["end"]))
    return StructTag.to_grammar(tags, assume_special=all(is_special(tag.trigger) for tag in tags))


def _is_list(value: Any, is_right: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(map(is_right, value))
