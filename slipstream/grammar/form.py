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

# Between the parts of a JSON text. Without an end to it, a small model may never come back from its spaces.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
ANY_OBJECT = {"type": "object"}
TAG_FIELDS = {"begin", "schema", "end"}


def grammar_text(
    params: StructuredOutputsParams, config: StructuredOutputsConfig, is_special: Callable[[str], bool]
) -> str:
    """is_special: whether a text is a special token of the vocabulary. Raises BadRequest that names the
    constraint."""
    value = getattr(params, params.kind)
    try:
        text = value if isinstance(value, str) else json.dumps(value)
        _check_size(params, text)
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
                return llguidance.grammar_from("grammar", text)
            case _:
                return _tag_grammar(text, is_special)
    except BadRequest:
        raise
    # A user's text in parsers that are not ours: whatever they raise is about that text.
    except Exception as error:
        raise BadRequest(params.field, value, first_line(str(error))) from None


def first_line(text: str) -> str:
    """What a parser complains of, without the text around it."""
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
    if not isinstance(read, dict | bool):
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
    structures, triggers = told["structures"], told["triggers"]
    if not structures or not all(isinstance(one, dict) and set(one) == TAG_FIELDS for one in structures):
        raise ValueError("structures must be a list of {begin, schema, end}, at least one")
    if not triggers or not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise ValueError("triggers must be a list of texts, at least one")
    tags = []
    for one in structures:
        own = next((trigger for trigger in triggers if one["begin"].startswith(trigger)), None)
        if own is None:
            raise ValueError(f"begin={one['begin']!r}: starts with none of the triggers")
        tags.append(StructTag(trigger=own, begin=one["begin"], grammar=one["schema"], end=one["end"]))
    return StructTag.to_grammar(tags, assume_special=all(is_special(tag.trigger) for tag in tags))
