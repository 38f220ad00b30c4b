"""Schemas, expressions and grammars of random parts: each is refused by name or answered, and the engine goes
on."""

import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemas import SCHEMAS
from text_model import make_text_model

from slipstream import LLM, BadRequest, SamplingParams, StructuredOutputsParams

EXAMPLES = int(os.environ.get("SLIPSTREAM_FUZZ_EXAMPLES", "200")) // 2  # a library
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


@pytest.fixture(scope="module", params=["guidance", "xgrammar"])
def llm(tiny_model, request):
    made = LLM(str(make_text_model(tiny_model)), dtype="float32", max_num_seqs=4, num_gpu_blocks_override=64,
               structured_outputs_config={"backend": request.param})  # fmt: skip
    yield made
    made.close()


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(constraint=CONSTRAINTS, seed=st.integers(0, 9), min_tokens=st.integers(0, 3))
def test_whatever_is_asked_is_refused_by_name_or_answered(llm, constraint, seed, min_tokens):
    (kind,) = constraint
    try:
        asked = StructuredOutputsParams(**constraint)
        params = SamplingParams(structured_outputs=asked, max_tokens=12, seed=seed, min_tokens=min_tokens)
        constrained, plain = llm.generate(["x", "x"], [params, SamplingParams(max_tokens=2)], use_tqdm=False)
    except BadRequest as error:
        assert error.field == f"structured_outputs.{kind}"
        return
    assert plain.outputs[0].finish_reason in ("length", "stop")
    assert constrained.outputs[0].finish_reason in ("length", "stop", "error")
    if constrained.outputs[0].finish_reason == "error":
        assert constrained.error.startswith("structured_outputs: ")
