"""What xgrammar keeps of a JSON schema to the letter: the schema made plain for it, or why it can't be kept.

xgrammar itself passes over keywords that it does not know, and over some beside others. What it makes of
each was found by holding texts of its grammars against jsonschema (tests/unit/test_exact_schemas.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import combinations
from typing import Any

Schema = dict[str, Any]

MAX_DEPTH = 64  # its time grows with the square
IGNORED = frozenset({
    "not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains",
    "dependentRequired", "dependentSchemas", "dependencies", "minProperties", "maxProperties",
    "unevaluatedProperties", "unevaluatedItems", "propertyNames", "additionalItems", "$dynamicRef",
    "$recursiveRef", "$anchor", "$dynamicAnchor",
})  # fmt: skip
# Keywords that say something of values of one type alone.
TYPED = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties", "patternProperties"}),
}
ASSERTIONS = frozenset({"type", "enum", "const", "$ref", "anyOf", "oneOf", "allOf"}).union(*TYPED.values())
COUNTS = ("minLength", "maxLength", "minItems", "maxItems")
FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "uuid", "uri")
# Escapes of a regular expression that name no character which JSON writes in another way.
ESCAPES = "dDwWsS.*+?()[]{}|^$/-"
TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "boolean": (bool,), "null": (type(None),), "array": (list,), "object": (dict,),
    "number": (int, float), "integer": (int,),
}  # fmt: skip


def exact_schema(schema: Any) -> Any:
    """Raises ValueError that names the keyword."""
    return _Reader(schema).read(schema, 0)


def bare_pattern(pattern: str, in_json: bool) -> str:
    """A regular expression without the anchors at its ends: xgrammar matches whole texts, and passes over
    other anchors. in_json: of a JSON string, whose characters stand as they are. Raises ValueError."""
    start = int(pattern.startswith("^"))
    place, in_class, found = start, False, pattern[start:]
    while place < len(pattern):
        char = pattern[place]
        if char == "\\":
            place += 1
            if in_json and pattern[place : place + 1] not in ESCAPES:
                raise ValueError(f"pattern {pattern!r}: xgrammar cannot keep this escape in a JSON string")
        elif in_json and (char == '"' or char < " "):
            raise ValueError(f"pattern {pattern!r}: xgrammar cannot keep {char!r} in a JSON string")
        elif char == "$" and not in_class and place == len(pattern) - 1:
            return found[:-1]
        elif char in "^$" and not in_class:
            raise ValueError(f"pattern {pattern!r}: xgrammar knows anchors at its ends alone")
        elif char == "[" and not in_class:
            in_class = True
            place += pattern[place + 1 : place + 2] == "^"
        elif char == "]":
            in_class = False
        place += 1
    return found


class _Reader:
    def __init__(self, root: Any) -> None:
        self._root = root

    def read(self, schema: Any, depth: int) -> Any:
        if not isinstance(schema, dict):
            return schema
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}, too deep for xgrammar")
        for name in IGNORED & schema.keys():
            if schema[name] is not False or name != "uniqueItems":
                raise ValueError(f"{name}: not kept by xgrammar")
        self._check_alone(schema)
        plain = self._with_type({name: value for name, value in schema.items() if name not in IGNORED})
        plain = _of_its_type(_string(plain))
        _check_numbers(plain)
        _check_object(plain)
        return {name: self._inner(name, value, depth + 1) for name, value in plain.items()}

    def _inner(self, name: str, value: Any, depth: int) -> Any:
        if name in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, dict):
            return {key: self.read(part, depth) for key, part in value.items()}
        if name in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, list):
            return [self.read(part, depth) for part in value]
        return self.read(value, depth) if name in ("items", "additionalProperties") else value

    def _check_alone(self, schema: Schema) -> None:
        """What decides alone: xgrammar passes over all beside it."""
        for name in ("$ref", "anyOf", "oneOf", "allOf", "const", "enum"):
            beside = {"type"} if name in ("const", "enum") else set()
            others = sorted((schema.keys() & ASSERTIONS) - {name} - beside)
            if name in schema and others:
                raise ValueError(f"{name} beside {others[0]}: not kept by xgrammar")
        if not str(schema.get("$ref", "#")).startswith("#"):
            raise ValueError(f"$ref {schema['$ref']!r}: must be within the schema")
        if isinstance(schema.get("$ref"), str) and schema["$ref"] != "#" and schema["$ref"][:2] != "#/":
            raise ValueError(f"$ref {schema['$ref']!r}: xgrammar knows paths alone")
        if len(schema.get("allOf") or ()) > 1:
            raise ValueError("allOf of more than one: not kept by xgrammar")
        for one, other in combinations(schema.get("oneOf") or (), 2):
            if not _are_apart(self._follow(one), self._follow(other)):
                raise ValueError(
                    "oneOf: xgrammar needs branches of different types, or of properties that are required "
                    "and constant"
                )

    def _with_type(self, schema: Schema) -> Schema:
        """Keywords of one type say that a value is of it, where nothing else does."""
        kinds = [kind for kind, names in TYPED.items() if names & schema.keys()]
        if not kinds or "type" in schema:
            return schema
        if len(kinds) > 1:
            raise ValueError(f"type: xgrammar needs it beside keywords for {kinds[0]} and {kinds[1]}")
        return {"type": kinds[0]} | schema

    def _follow(self, schema: Any) -> Any:
        """What a reference leads to."""
        for _ in range(MAX_DEPTH):
            path = schema.get("$ref") if isinstance(schema, dict) else None
            if not isinstance(path, str):
                break
            schema = self._root
            for part in path.removeprefix("#").split("/")[1:]:
                name = part.replace("~1", "/").replace("~0", "~")
                schema = schema.get(name) if isinstance(schema, dict) else None
        return schema if isinstance(schema, dict) else {}


def _types(schema: Mapping[str, Any]) -> list[str]:
    told = schema.get("type")
    return [kind for kind in (told if isinstance(told, list) else [told]) if isinstance(kind, str)]


def _is_a(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, TYPES.get(kind, ())) or (
        kind == "integer" and isinstance(value, float) and value.is_integer()
    )


def _of_its_type(schema: Schema) -> Schema:
    """A list of values without those that the type excludes."""
    types = _types(schema)
    values = schema.get("enum", [schema.get("const")])
    if not types or not {"enum", "const"} & schema.keys() or not isinstance(values, list):
        return schema
    left = [value for value in values if any(_is_a(value, kind) for kind in types)]
    if not left:
        raise ValueError("enum or const: no value is of the type")
    return {name: value for name, value in schema.items() if name not in ("const", "type")} | {"enum": left}


def _string(schema: Schema) -> Schema:
    """Lengths become a pattern: xgrammar would let control characters into strings of a length."""
    if any(name in schema and type(schema[name]) is not int for name in COUNTS):
        raise ValueError(f"{', '.join(COUNTS)}: must be integers")
    if any(schema.get(name, 0) < 0 for name in COUNTS):
        raise ValueError(f"{', '.join(COUNTS)}: must not be negative")
    if "string" not in _types(schema):
        return schema
    lengths = [name for name in ("minLength", "maxLength") if name in schema]
    pattern, form = schema.get("pattern"), schema.get("format")
    if sum((bool(lengths), pattern is not None, form is not None)) > 1:
        raise ValueError("pattern, format and lengths: xgrammar keeps one of them alone")
    if form is not None and form not in FORMATS:
        raise ValueError(f"format {form!r}: xgrammar knows {', '.join(FORMATS)}")
    if isinstance(pattern, str):
        return schema | {"pattern": f"^({bare_pattern(pattern, in_json=True)})$"}
    if not lengths:
        return schema
    low, high = schema.get("minLength", 0), schema.get("maxLength", "")
    if high != "" and low > high:
        raise ValueError("minLength is over maxLength")
    rest = {name: value for name, value in schema.items() if name not in lengths}
    return rest | {"pattern": f"^.{{{low},{high}}}$"}


def _check_numbers(schema: Schema) -> None:
    if "multipleOf" in schema and "number" in _types(schema):
        raise ValueError("multipleOf: xgrammar keeps it of type integer alone")


def _check_object(schema: Schema) -> None:
    """Raises ValueError."""
    named, patterns = schema.get("properties", {}), schema.get("patternProperties")
    required = schema.get("required", [])
    if isinstance(named, dict) and isinstance(required, list):
        missing = [name for name in required if not isinstance(name, str) or name not in named]
        if missing:
            raise ValueError(f"required {missing[0]!r}: xgrammar needs it among properties")
    if isinstance(patterns, dict):
        if named or schema.get("additionalProperties") is not False:
            raise ValueError("patternProperties: xgrammar keeps them where all others are excluded alone")
        for pattern in patterns:
            bare_pattern(pattern, in_json=True)


def _are_apart(one: Schema, other: Schema) -> bool:
    """Whether it is plain that no value is of both."""
    kinds, others = _kinds(one), _kinds(other)
    if kinds and others and not kinds & others:
        return True
    ours, theirs = _constants(one), _constants(other)
    return any(not ours[name] & theirs[name] for name in ours.keys() & theirs.keys())


def _kinds(schema: Schema) -> set[str]:
    kinds = {"number" if kind == "integer" else kind for kind in _types(schema)}
    if kinds or not (values := _values(schema)):
        return kinds
    return {kind for kind in TYPES if kind != "integer" for one in values if _is_a(json.loads(one), kind)}


def _values(schema: Any) -> frozenset[str]:
    """The values that there may be, as JSON; empty where they are not listed."""
    if not isinstance(schema, dict):
        return frozenset()
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(listed, list):
        return frozenset()
    return frozenset(json.dumps(one, sort_keys=True) for one in listed)


def _constants(schema: Schema) -> dict[str, frozenset[str]]:
    """Values that are listed, by required property; by "" those of the schema itself."""
    named, required = schema.get("properties"), schema.get("required")
    parts: dict[str, Any] = {"": schema}
    if _types(schema) == ["object"] and isinstance(named, dict) and isinstance(required, list):
        parts |= {f"/{name}": named[name] for name in required if isinstance(name, str) and name in named}
    found = {name: _values(part) for name, part in parts.items()}
    return {name: values for name, values in found.items() if values}
