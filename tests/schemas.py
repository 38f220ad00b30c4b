"""JSON schemas to constrain answers with: of each kind that people use, and those of bfcl-eval."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]


def record(required: int | None = None, **properties: Any) -> Schema:
    """An object of these properties and no others; required: how many of them must be there, all if None."""
    names = list(properties)
    return {
        "type": "object", "properties": properties, "required": names[:required],
        "additionalProperties": False,
    }  # fmt: skip


TEXT, WHOLE = {"type": "string"}, {"type": "integer"}
SCHEMAS: dict[str, Schema] = {
    "weather call": record(1, city=TEXT, unit={"enum": ["celsius", "fahrenheit"]}, days=WHOLE),
    "nested": record(user=record(name=TEXT, tags={"type": "array", "items": TEXT, "maxItems": 3}), ok={
        "type": "boolean"}),
    "pattern": record(plate={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,4}$"}),
    "anchored pieces": record(code={"type": "string", "pattern": "^(foo|ba[rz])+x?$"}),
    "lengths": record(name={"type": "string", "minLength": 2, "maxLength": 5}),
    "ranges": record(a={"type": "integer", "minimum": -3, "maximum": 12}, b={
        "type": "number", "exclusiveMinimum": 0, "maximum": 2}),
    "multiples": record(five={"type": "integer", "multipleOf": 5}),
    "one of by constant": {"oneOf": [
        record(kind={"const": "circle"}, radius={"type": "number", "minimum": 0}),
        record(kind={"const": "square"}, side={"type": "number", "minimum": 0}),
    ]},
    "any of types": record(value={"anyOf": [{"type": "null"}, {"type": "boolean"}, WHOLE, record(x=TEXT)]}),
    "type list": record(value={"type": ["string", "null"]}),
    "all of": {"allOf": [
        {"type": "object", "properties": {"a": WHOLE}, "required": ["a"]},
        {"type": "object", "properties": {"b": TEXT}, "required": ["b"]},
    ]},
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {"node": record(1, value=WHOLE, children={
            "type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2})},
    },
    "linked list": {
        "$ref": "#/definitions/cell",
        "definitions": {"cell": record(head=WHOLE, tail={
            "anyOf": [{"type": "null"}, {"$ref": "#/definitions/cell"}]})},
    },
    "unicode": record(**{"größe": {"enum": ["klein", "groß"]}, "名前": {"const": "花子 🌸"}}),
    "escapes": record(**{'a"b\\c': {"enum": ["line\nbreak", "tab\t", "back\\slash"]}}),
    "tuple": {
        "type": "array", "prefixItems": [TEXT, WHOLE, {"type": "boolean"}], "items": False, "minItems": 3,
    },
    "map": {"type": "object", "additionalProperties": WHOLE},
    "pattern properties": {
        "type": "object", "patternProperties": {"^k[0-9]$": {"type": "boolean"}},
        "additionalProperties": False,
    },
    "formats": record(day={"type": "string", "format": "date"}, at={"type": "string", "format": "time"}, id={
        "type": "string", "format": "uuid"}),
    "any object": {"type": "object"},
    "matrix": {"type": "array", "minItems": 2, "maxItems": 2, "items": {
        "type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}},
    "constants": record(version={"const": 3}, flag={"const": None}, deep={"const": {"a": [1, "x"]}}),
    "many options": record(pick={"enum": [f"option-{number}" for number in range(200)]}),
}
_TYPES = {
    "dict": "object", "float": "number", "tuple": "array", "any": None, "String": "string",
    "HashMap": "object", "Boolean": "boolean", "Array": "array", "ArrayList": "array", "long": "integer",
    "double": "number", "char": "string", "byte": "integer", "short": "integer", "Bigint": "integer",
    "Any": None, "Set": "array", "Hashtable": "object", "Queue": "array", "Stack": "array",
}  # fmt: skip


def as_json_schema(told: Any) -> Schema:
    """A parameter as bfcl-eval describes it, whose types are Python's or Java's. Enumerations keep the
    members that are of the type."""
    kind = _TYPES.get(told.get("type", "any"), told.get("type"))
    schema: Schema = {} if kind is None else {"type": kind}
    if "properties" in told:
        schema["properties"] = {name: as_json_schema(part) for name, part in told["properties"].items()}
        schema["required"] = [name for name in told.get("required", ()) if name in told["properties"]]
        schema["additionalProperties"] = False
    if isinstance(told.get("items"), dict) and kind == "array":
        schema["items"] = as_json_schema(told["items"])
    if kind == "string" and isinstance(told.get("enum"), list):
        members = [member for member in told["enum"] if isinstance(member, str)]
        schema |= {"enum": members} if members else {}
    return schema


def bfcl_schemas(wheel: str, most: int) -> Iterator[Schema]:
    """Parameters of the first `most` different functions in bfcl-eval's wheel."""
    seen: set[str] = set()
    with zipfile.ZipFile(wheel) as files:
        for name in ("simple_python", "live_simple", "multiple", "parallel", "live_multiple", "simple_java"):
            lines = files.read(f"bfcl_eval/data/BFCL_v4_{name}.json").decode().splitlines()
            for function in (function for line in lines for function in json.loads(line)["function"]):
                schema = as_json_schema(function["parameters"])
                text = json.dumps(schema)
                if text not in seen and len(seen) < most:
                    seen.add(text)
                    yield schema
