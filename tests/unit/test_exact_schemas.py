"""What xgrammar makes of JSON schemas: texts of its grammars, random token by token, held against jsonschema;
what it would pass over is refused by name."""

import json
import random
from contextlib import suppress

import jsonschema
import numpy as np
import pytest
from schemas import SCHEMAS, record
from text_model import BYTE_ZERO, VOCAB, write_tokenizer

from slipstream.config.structured_outputs import StructuredOutputsConfig
from slipstream.contracts.structured_outputs import StructuredOutputsParams
from slipstream.grammar.exact import exact_schema
from slipstream.grammar.xgrammar import XGrammar
from slipstream.text.tokenizer import load_tokenizer

END = 2
TEXT, WHOLE = {"type": "string"}, {"type": "integer"}
OBJECT = {"type": "object", "properties": {"a": WHOLE}}
CLOSED = {"type": "object", "additionalProperties": False}
TAGGED = {key: record(1, kind={"const": key}, n=WHOLE) for key in "ab"}
KEPT = {name: schema for name, schema in SCHEMAS.items() if name != "all of"} | {
    "any character": {"type": "string", "pattern": "^.{2,5}$"},
    "but one": {"type": "string", "pattern": "^[^a]{2,5}$"},
    "an anchor alone": {"type": "string", "pattern": "^a+[^$]"},
    "escapes of a pattern": {"type": "string", "pattern": r"^\d{2}\.\$$"},
    "at least": {"type": "string", "minLength": 2},
    "at most": {"type": "string", "maxLength": 2},
    "a pattern without a type": {"pattern": "^a$"},
    "a bound without a type": {"minimum": 3},
    "items without a type": {"items": WHOLE, "minItems": 1, "uniqueItems": False},
    "names without a type": {"properties": {"a": WHOLE}, "required": ["a"]},
    "values of other types": {"type": "string", "enum": [3, "a", None, "b"]},
    "values of types": {"type": ["null", "integer"], "enum": [3, "a", None, True]},
    "other properties": OBJECT | {"additionalProperties": TEXT},
    "multiples within": {"type": "integer", "multipleOf": 7, "minimum": 3, "maximum": 30},
    "between": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "one of types": {"oneOf": [WHOLE, TEXT, {"type": "null"}]},
    "one of values": {"oneOf": [{"const": 1}, {"const": "a"}, {"enum": [2, 3]}]},
    "one of references": {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": TAGGED},
    "all of one": {"allOf": [OBJECT]},
    "an escaped reference": {"$ref": "#/$defs/a~1b", "$defs": {"a/b": WHOLE}},
    "annotations": {"type": "integer", "title": "t", "default": "x", "examples": [{"not": 1}], "x-own": 1},
}
FORMATS = {
    "date": r"\d{4}-\d\d-\d\d", "time": r"\d\d:\d\d:\d\d.*", "email": r".+@.+", "hostname": r"[a-z0-9.-]+",
    "date-time": r"\d{4}-\d\d-\d\dT\d\d:\d\d.*", "uuid": r"[0-9a-f-]{36}", "uri": r"[a-z0-9+.-]+:.*",
}  # fmt: skip
REFUSED = [
    ({"not": WHOLE}, "not"), (OBJECT | {"if": OBJECT}, "if"), ({"uniqueItems": True}, "uniqueItems"),
    ({"contains": WHOLE}, "contains"), (OBJECT | {"propertyNames": TEXT}, "propertyNames"),
    (OBJECT | {"minProperties": 1}, "minProperties"), (OBJECT | {"dependentRequired": {}}, "dependent"),
    (OBJECT | {"unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"type": "number", "multipleOf": 0.5}, "multipleOf"), ({"allOf": [OBJECT, OBJECT]}, "allOf"),
    ({"oneOf": [WHOLE, {"type": "number"}]}, "oneOf"), ({"oneOf": [OBJECT, CLOSED]}, "oneOf"),
    ({"type": "integer", "anyOf": [{"minimum": 3}]}, "anyOf beside type"),
    ({"$ref": "#/$defs/x", "maximum": 3, "$defs": {"x": WHOLE}}, r"\$ref beside maximum"),
    ({"$ref": "http://localhost/x"}, "must be within the schema"), ({"$ref": "#x"}, "paths alone"),
    ({"const": 3, "minimum": 4}, "const beside minimum"), ({"type": "string", "const": 3}, "no value"),
    ({"minimum": 3, "pattern": "a"}, "type"), ({"type": "object", "required": ["z"]}, "required 'z'"),
    ({"type": "object", "patternProperties": {"^x": TEXT}}, "patternProperties"),
    (CLOSED | {"patternProperties": {'"': TEXT}}, "pattern"),
    ({"type": "string", "format": "ipv4"}, "format 'ipv4'"),
    ({"type": "string", "format": "date", "maxLength": 3}, "one of them alone"),
    ({"type": "string", "minLength": 2, "pattern": "a"}, "one of them alone"),
    ({"type": "string", "minLength": -1}, "negative"), ({"type": "array", "maxItems": "1"}, "integers"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength"),
    ({"pattern": '^a"b$'}, "pattern"), ({"pattern": "a\\\\b"}, "pattern"), ({"pattern": "a\nb"}, "pattern"),
    ({"pattern": r"\u0022"}, "pattern"), ({"pattern": "(^a)"}, "anchors"), ({"pattern": "a$|b"}, "anchors"),
    (json.loads('{"items":' * 70 + "{}" + "}" * 70), "nested deeper"),
]  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return XGrammar(load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("vocabulary"))), VOCAB, [END])


def texts(library, schema, count):
    """Complete ones of at most 400 bytes; ends are more likely than others. xgrammar takes some bytes for
    UTF-8 that are none (E0 80 80): a detokenizer replaces these, here such texts are left out."""
    params, config = StructuredOutputsParams(json=schema), StructuredOutputsConfig(backend="xgrammar")
    start = library.compile(library.text(params, config))
    likely = {BYTE_ZERO + byte: 0.1 for byte in (*b" \n\t\r", *range(128, 256))}
    likely |= {BYTE_ZERO + byte: 30.0 for byte in b'"}]'} | {BYTE_ZERO + ord(","): 5.0, END: 8.0}
    mask, found = np.zeros(VOCAB // 32, np.int32), []
    for seed in range(count):
        matcher, draw, said = start(), random.Random(seed), b""
        while len(said) < 400:
            matcher.fill(mask)
            legal = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
            assert legal and set(legal) <= {END, *range(BYTE_ZERO, BYTE_ZERO + 256)}
            token = draw.choices(legal, [likely.get(one, 1.0) for one in legal])[0]
            if token == END:
                with suppress(UnicodeDecodeError):
                    found.append(said.decode())
                break
            matcher.consume([token])
            said += bytes([token - BYTE_ZERO])
    return found


@pytest.mark.parametrize("name", KEPT)
def test_every_text_of_a_schema_that_is_taken_is_valid(library, name):
    found = texts(library, KEPT[name], 12)
    assert len(found) > 3
    for text in found:
        jsonschema.validate(json.loads(text), KEPT[name], jsonschema.Draft202012Validator)


@pytest.mark.parametrize("name", FORMATS)
def test_formats_have_the_shape_of_their_kind(library, name):
    shape = {"type": "string", "pattern": f"^(?i:{FORMATS[name]})$"}
    for text in texts(library, {"type": "string", "format": name}, 6):
        jsonschema.validate(json.loads(text), shape)


@pytest.mark.parametrize(("schema", "told"), REFUSED, ids=lambda one: str(one)[:40])
def test_what_xgrammar_would_pass_over_is_refused_by_its_name(schema, told):
    with pytest.raises(ValueError, match=told):
        exact_schema(schema)
    with pytest.raises(ValueError, match=told):
        exact_schema({"type": "object", "properties": {"inner": schema}})


def test_a_token_that_does_not_fit_is_an_error(library):
    params = StructuredOutputsParams(regex="^ab$")
    matcher = library.compile(library.text(params, StructuredOutputsConfig(backend="xgrammar")))()
    matcher.consume([BYTE_ZERO + ord("a")])
    with pytest.raises(ValueError, match="is not of the grammar"):
        matcher.consume([BYTE_ZERO + ord("z")])
