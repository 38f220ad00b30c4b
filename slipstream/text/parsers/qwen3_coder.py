"""Qwen3-Coder: <tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>. Values are
plain text; the tool's JSON schema says what they are."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn

from slipstream.text.parsers.protocol import (
    NO_SCHEMAS,
    Arguments,
    CallStart,
    Machine,
    Schemas,
    find_first,
    mended,
    open_length,
    too_deep,
)

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
_VALUE_ENDS = (END_PARAMETER, PARAMETER, END_FUNCTION)
_NEXT = (PARAMETER, END_FUNCTION, CLOSE)
_MAX_REFS = 16


class Qwen3CoderParser(Machine):
    """Texts go out as they come; other values once they are whole. What is not of its schema's type stays
    text. A parameter given again is dropped: the first one may have been streamed."""

    example: ClassVar[str] = (
        "<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>"
    )

    def __init__(self, schemas: Schemas = NO_SCHEMAS) -> None:
        super().__init__(schemas)
        self._schema: Mapping[str, Any] = {}
        self._types: frozenset[str] = frozenset()
        self._keys: set[str] = set()  # of the parameters of the call
        self._dropped = False  # the parameter was given before
        self._value = ""  # of a parameter that is no text
        self._fresh = False  # no character of the value has come

    def _in_text(self) -> bool:
        marker = self._say_until((OPEN, CLOSE, FUNCTION, END_FUNCTION))
        if marker == FUNCTION:
            self._state = self._in_function_name
        return marker is not None

    def _in_function_name(self) -> bool:
        name, found, rest = self._rest.partition(">")
        if found:
            self._rest = rest
            self._schema = self._schemas.get(name.strip(), {})
            self._keys = set()
            self._emit(CallStart(name.strip()))
            self._emit(Arguments("{"))
            self._state = self._in_function
        return bool(found)

    def _in_function(self) -> bool:
        place, marker = find_first(self._rest, _NEXT)
        if marker is None:
            self._rest = self._rest[len(self._rest) - open_length(self._rest, _NEXT) :]
            return False
        self._rest = self._rest[place + len(marker) :]
        if marker == PARAMETER:
            self._state = self._in_key
        else:
            self._emit(Arguments("}"))
            self._state = self._in_text
        return True

    def _in_key(self) -> bool:
        key, found, rest = self._rest.partition(">")
        if found:
            self._rest = rest
            self._begin_value(key.strip())
        return bool(found)

    def _begin_value(self, key: str) -> None:
        self._types, self._dropped = allowed_types(self._schema, key), key in self._keys
        self._write((", " if self._keys else "") + _text(key) + (': "' if self._is_text else ": "))
        self._keys.add(key)
        self._value, self._fresh, self._state = "", True, self._in_value

    def _write(self, text: str) -> None:
        """Part of a parameter."""
        if not self._dropped:
            self._emit(Arguments(text))

    @property
    def _is_text(self) -> bool:
        return self._types == {"string"}

    def _in_value(self) -> bool:
        if self._fresh:
            self._rest = self._rest.removeprefix("\n")
            self._fresh = False
        place, marker = find_first(self._rest, _VALUE_ENDS)
        if marker is None:
            # The line feed before the end belongs to the markup.
            held = open_length(self._rest, [*_VALUE_ENDS, *("\n" + end for end in _VALUE_ENDS)])
            place = len(self._rest) - held
            self._add(self._rest[:place])
            self._rest = self._rest[place:]
            return False
        self._add(self._rest[:place].removesuffix("\n"))
        self._rest = self._rest[place:].removeprefix(END_PARAMETER)
        self._end_value()
        return True

    def _add(self, text: str) -> None:
        if self._is_text:
            self._write(_text(text)[1:-1])
        else:
            self._value += text

    def _end_value(self) -> None:
        self._write('"' if self._is_text else convert(self._value, self._types))
        self._state = self._in_function

    def _finish(self, cut: bool) -> None:
        if self._state == self._in_text:
            self._say_held(cut)
        elif not cut and self._state in (self._in_value, self._in_function, self._in_key):
            if self._state == self._in_value:
                self._add(self._rest.removesuffix("\n"))
                self._end_value()
            self._emit(Arguments("}"))


def allowed_types(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """JSON types that a tool's schema allows for a parameter: text where it says nothing."""
    properties = schema.get("properties")
    named = properties.get(key) if isinstance(properties, Mapping) else None
    return frozenset(_types(named, schema, _MAX_REFS)) or frozenset({"string"})


def _types(schema: Any, root: Mapping[str, Any], refs: int) -> set[str]:
    if not isinstance(schema, Mapping) or refs == 0:
        return set()
    target = schema.get("$ref")
    if isinstance(target, str) and target.startswith("#/"):
        found: Any = root
        for part in target[2:].split("/"):
            found = found.get(part) if isinstance(found, Mapping) else None
        return _types(found, root, refs - 1)
    if "type" in schema:
        given = schema["type"]
        listed = given if isinstance(given, list) else [given]
        return {kind for kind in listed if isinstance(kind, str)}
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return {_type_of(value) for value in values} if isinstance(values, list) else set()
    lists = [schema.get(name) for name in ("anyOf", "oneOf", "allOf")]
    options = [option for listed in lists if isinstance(listed, list) for option in listed]
    return {kind for option in options for kind in _types(option, root, refs - 1)}


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    kinds = {str: "string", int: "integer", float: "number", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def convert(text: str, types: frozenset[str]) -> str:
    """The JSON text of a value that was written plainly, of one of these types where it can be. What JSON has
    no value for, or is nested too deep, stays text."""
    word = text.strip()
    as_python = {"True": "true", "False": "false", "None": "null"}.get(word, word)
    try:
        value = json.loads(as_python, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return _text(text)
    kind = _type_of(value)
    if kind == "number" and "number" not in types and "integer" in types and value.is_integer():
        return str(int(value))
    fits = kind in types or (kind == "integer" and "number" in types)
    if not fits or too_deep([value]):  # one level more: it stands in the object of the arguments
        return _text(text)
    return mended(json.dumps(value, ensure_ascii=False))


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return value


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)
