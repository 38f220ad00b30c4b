"""Constraints of random parts for hypothesis: most of them wrong, some by little."""

import json

from hypothesis import strategies as st
from schemas import SCHEMAS

WORDS = [
    "type", "properties", "required", "items", "enum", "const", "anyOf", "oneOf", "allOf", "$ref",
    "$defs", "pattern", "format", "minimum", "maximum", "minLength", "maxLength", "minItems",
    "maxItems", "not", "additionalProperties", "patternProperties", "prefixItems", "multipleOf",
    "x",
]  # fmt: skip
TEXTS = ["object", "string", "array", "integer", "#", "#/$defs/x", "^a+$", "[", "date", "é🌸", "\ud800"]
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=6),
    st.sampled_from(TEXTS),
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
    max_leaves=12,
)
CHARS = "ab|()[]{}*+?^$.\\dwps-,0123:=\"'/ \nrootstart<>é"
SOURCES = st.text(st.sampled_from(CHARS), min_size=1, max_size=30)
CONSTRAINTS = st.one_of(
    st.builds(lambda schema: {"json": schema}, st.dictionaries(st.sampled_from(WORDS), VALUES, max_size=5)),
    st.builds(lambda name, word, value: {"json": SCHEMAS[name] | {word: value}},
              st.sampled_from(list(SCHEMAS)), st.sampled_from(WORDS), VALUES),
    st.builds(lambda text: {"json": text}, SOURCES),
    st.builds(lambda text: {"regex": text}, SOURCES),
    st.builds(lambda text: {"grammar": text}, SOURCES),
    st.builds(lambda text: {"grammar": f"root ::= {text}"}, SOURCES),
    st.builds(lambda texts: {"choice": texts}, st.lists(st.text(max_size=5), min_size=1, max_size=4)),
    st.builds(lambda one: {"structural_tag": json.dumps(one)}, VALUES),
    st.builds(lambda schema, begin, trigger: {"structural_tag": json.dumps({
        "structures": [{"begin": begin, "schema": schema, "end": ""}], "triggers": [trigger]})},
        VALUES, st.sampled_from(["<f>", "<", "a", ""]), st.sampled_from(["<", "<f>", "a", "/"])),
)  # fmt: skip
