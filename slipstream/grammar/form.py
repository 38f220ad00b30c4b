"""What a request's constraint holds, before a library makes a grammar of it: its size, its schema, its tags.

What that grammar means is found out where it is compiled (compiler.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.config.structured_outputs import StructuredOutputsConfig
from slipstream.contracts.errors import BadRequest
from slipstream.contracts.limits import MAX_CHOICES, MAX_CONSTRAINT_CHARS, MAX_GRAMMAR_CHARS
from slipstream.contracts.structured_outputs import StructuredOutputsParams

# Between the parts of a JSON text. Without an end to it, a small model may never come back from its spaces.
MAX_WHITESPACE = 64
ANY_OBJECT = {"type": "object"}
NO_TEXT = "allows no text at all"
TAG_FIELDS = {"begin", "schema", "end"}
# States of regexes that must match together are multiplied: 20 take seconds, 60 more memory than there is.
MAX_TOGETHER = 16
_LITERALS = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/')


@dataclass(frozen=True, slots=True)
class Tag:
    """Between begin, which starts with its trigger, and end: a value of the schema."""

    trigger: str
    begin: str
    schema: Any
    end: str


def constraint_text(params: StructuredOutputsParams) -> str:
    """The constraint as it is written, or as JSON where it is no text. Raises BadRequest for too large a
    one."""
    value = getattr(params, params.kind)
    text = value if isinstance(value, str) else json.dumps(value)
    most = MAX_CONSTRAINT_CHARS if params.grammar is None else MAX_GRAMMAR_CHARS
    check_size(params, text, most)
    if params.choice is not None and len(params.choice) > MAX_CHOICES:
        raise BadRequest(params.field, f"{len(params.choice)} texts", f"must be at most {MAX_CHOICES}")
    return text


def check_size(params: StructuredOutputsParams, text: str, most: int) -> None:
    """Raises BadRequest."""
    if len(text) > most:
        raise BadRequest(params.field, f"{len(text)} characters", f"must be at most {most} characters")


def first_line(text: str) -> str:
    """What a parser complains of, without the text around it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("error:")]
    return "; ".join([*lines[:1], *told[:1]])[:300] or "cannot be compiled"


def check_together(schema: Any) -> None:
    """Raises ValueError where one value must match too many patterns."""
    if (together := _most_together(schema)) > MAX_TOGETHER:
        raise ValueError(f"one value must match {together} patterns, and at most {MAX_TOGETHER} may be")


def _most_together(schema: Any) -> int:
    """The most patterns and formats that one value must match together."""
    counted: dict[str, int] = {}

    def count(part: Any) -> int:
        if not isinstance(part, Mapping):
            return 0
        own = sum(isinstance(part.get(name), str) for name in ("pattern", "format"))
        reference = part.get("$ref")
        if isinstance(reference, str):
            if reference not in counted:
                counted[reference] = 0  # what refers to itself adds nothing
                counted[reference] = count(_referred(schema, reference))
            own += counted[reference]
        for name in ("allOf", "anyOf", "oneOf"):
            listed = part.get(name)
            found = [count(one) for one in listed] if isinstance(listed, list) else []
            own += sum(found) if name == "allOf" else max(found, default=0)
        return own

    def parts(part: Any) -> Iterator[Any]:
        yield part
        inner = part.values() if isinstance(part, Mapping) else part if isinstance(part, list) else ()
        for one in inner:
            yield from parts(one)

    return max(map(count, parts(schema)))


def _referred(schema: Any, reference: str) -> Any:
    """What a reference within the schema names; None where it names nothing, which is found out later."""
    place = schema
    for name in reference.lstrip("#").split("/")[1:]:
        place = place.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
    return place


def check_intersections(lark: str) -> None:
    """The same of a Lark grammar, whose & outside of texts and regexes intersect them. Raises ValueError."""
    if (count := _LITERALS.sub("", lark).count("&")) > MAX_TOGETHER:
        raise ValueError(f"intersects regexes {count} times, and at most {MAX_TOGETHER} may be")


def read_schema(schema: str, config: StructuredOutputsConfig) -> dict[str, Any]:
    """Raises ValueError."""
    read: Any = json.loads(schema)
    if read is False:
        raise ValueError(NO_TEXT)
    read = {} if read is True else read
    if not isinstance(read, dict):
        raise ValueError("must be a JSON schema, so an object")
    check_together(read)
    return _closed(read) if config.disable_additional_properties else read


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


def read_tags(text: str) -> tuple[list[Tag], list[str]]:
    """Tags and triggers of vLLM's form: {"structures": [{"begin", "schema", "end"}], "triggers": [...]}.
    Between the tags the text is free. Raises ValueError."""
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
        check_together(one["schema"])
        tags.append(Tag(own, one["begin"], one["schema"], one["end"]))
    return tags, triggers


def _is_list(value: Any, is_right: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(map(is_right, value))
