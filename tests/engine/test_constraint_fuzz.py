"""Schemas, expressions and grammars of random parts: each is refused by name or answered, and the engine goes
on."""

import os

import pytest
from constraint_parts import CONSTRAINTS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from text_model import make_text_model

from slipstream import LLM, BadRequest, SamplingParams, StructuredOutputsParams

EXAMPLES = int(os.environ.get("SLIPSTREAM_FUZZ_EXAMPLES", "200")) // 2  # a library


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
