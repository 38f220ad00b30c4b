"""Constrained requests beside plain ones: answers that jsonschema finds valid, on both runners, with drafts,
with preemption, with steps in flight; plain texts as if nobody were constrained.

SLIPSTREAM_TEST_SCHEMAS=PATH, bfcl-eval's wheel, runs 1,000 requests over 100 of its schemas and ours.
"""

import json
import os
import re
import threading
from functools import cache

import jsonschema
import numpy as np
import pytest
from harness import make_core, make_request, run
from schemas import SCHEMAS, bfcl_schemas
from text_model import BYTE_ZERO, ids_of, make_text_model

from slipstream import LLM, SamplingParams, StructuredOutputsParams
from slipstream.contracts.errors import BadRequest
from slipstream.contracts.limits import MAX_CHOICES
from slipstream.contracts.step import Finish
from slipstream.grammar import guidance

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
# Random weights would talk on for ever: texts are led to their ends.
LEAD = {BYTE_ZERO + ord(char): bias for char, bias in {'"': 7, "}": 8, "]": 8, ",": 6, "n": 3}.items()}
# Many short rows in a small pool: which of them preempt others depends on when their masks come.
TIGHT = {"num_gpu_blocks_override": 260, "block_size": 4, "max_num_seqs": 48}
ENGINES = {
    "steps in flight": {},
    "three steps in flight": {"max_steps_in_flight": 3},
    "synchronous": {"async_scheduling": False},
    "runner v1": {"model_runner": "v1"},
    "n-gram drafts": {"speculative_config": NGRAM},
    "n-gram drafts by runner v1": {"speculative_config": NGRAM, "model_runner": "v1"},
    "preemption": TIGHT,
    "drafts and preemption": {**TIGHT, "speculative_config": NGRAM},
}
LONG = {"max_position_embeddings": 2048}
LIBRARIES = ["guidance", "xgrammar"]


@pytest.fixture(scope="module")
def model(tiny_model):
    return make_text_model(tiny_model, **LONG)


def engine(model, **args):
    flags = {"max_num_seqs": 16, "max_model_len": 1024, "num_gpu_blocks_override": 1100, "block_size": 16,
             "structured_outputs_config": {"disable_any_whitespace": True}}  # fmt: skip
    return LLM(str(model), dtype="float32", **(flags | args))


def constrained(**fields):
    constraint = {name: fields.pop(name) for name in (
        "json", "regex", "choice", "grammar", "json_object", "structural_tag") if name in fields}  # fmt: skip
    return SamplingParams(structured_outputs=StructuredOutputsParams(**constraint), **fields)


def mixed(schemas, count):
    """Prompts and parameters, every third plain, greedy and seeded. Prompts repeat themselves and each other,
    so that drafts are made."""
    prompts, params = [], []
    for number in range(count):
        prompts.append(f"say it again, say it again: {number % 5} " * (1 + number % 3))
        common = {"temperature": 0.9 if number % 2 else 0.0, "seed": number, "logit_bias": LEAD}
        if number % 3 == 2:
            params.append(SamplingParams(**common, max_tokens=40))
        else:
            params.append(constrained(**common, json=schemas[number % len(schemas)], max_tokens=600))
    return prompts, params


def answer(model, schemas, count, **args):
    llm = engine(model, **args)
    prompts, params = mixed(schemas, count)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    scheduler = llm._client.core.scheduler
    scheduler.check_invariants()
    assert scheduler.stats().free_blocks == llm.info.limits.num_blocks
    assert not llm._client.core._grammars._live, "a grammar outlives its request"
    stats = scheduler.stats()
    llm.close()
    return [output.outputs[0] for output in outputs], params, stats


def check_valid(schemas, outputs, params):
    for number, (output, asked) in enumerate(zip(outputs, params, strict=True)):
        if asked.structured_outputs is not None:
            schema = schemas[number % len(schemas)]
            assert output.finish_reason == "stop", (schema, output)
            jsonschema.validate(json.loads(output.text), schema, jsonschema.Draft202012Validator)


@pytest.fixture(scope="module")
def expected(model):
    """Texts of plain requests where nobody is constrained, and of all."""
    schemas = list(SCHEMAS.values())
    prompts, params = mixed(schemas, 54)
    llm = engine(model)
    plain = [number for number, one in enumerate(params) if one.structured_outputs is None]
    alone = llm.generate([prompts[i] for i in plain], [params[i] for i in plain], use_tqdm=False)
    llm.close()
    outputs, params, _ = answer(model, schemas, 54)
    return dict(zip(plain, (one.outputs[0].token_ids for one in alone), strict=True)), outputs


@pytest.mark.parametrize("name", ENGINES)
def test_answers_are_valid_and_the_same_on_every_engine_and_plain_ones_unchanged(model, expected, name):
    schemas = list(SCHEMAS.values())
    outputs, params, stats = answer(model, schemas, 54, **ENGINES[name])
    check_valid(schemas, outputs, params)
    alone, mixed_up = expected
    assert {number: outputs[number].token_ids for number in alone} == alone
    assert [one.token_ids for one in outputs] == [one.token_ids for one in mixed_up]
    assert ("preemption" in name) == (stats.preemptions > 0)
    assert ("drafts" in name) == (stats.accepted_tokens > 0)


@pytest.mark.parametrize("name", ["drafts and preemption", "steps in flight"])
def test_answers_over_many_schemas_are_valid(model, name):
    """A dozen here; 1,000 over a hundred schemas where SLIPSTREAM_TEST_SCHEMAS names bfcl-eval's wheel."""
    schemas, count = list(SCHEMAS.values()), 18
    if wheel := os.environ.get("SLIPSTREAM_TEST_SCHEMAS"):
        schemas += bfcl_schemas(wheel, 101 - len(schemas))
        count = 1500
    outputs, params, _ = answer(model, schemas, count, **ENGINES[name])
    assert sum(one.structured_outputs is not None for one in params) == count * 2 // 3
    check_valid(schemas, outputs, params)


def test_xgrammar_keeps_schemas_beside_drafts_and_preemption(model):
    """All but those whose keywords it would pass over, which are refused."""
    schemas = [schema for name, schema in SCHEMAS.items() if name != "all of"]
    config = {"disable_any_whitespace": True, "backend": "xgrammar"}
    args = ENGINES["drafts and preemption"] | {"structured_outputs_config": config}
    outputs, params, stats = answer(model, schemas, 54, **args)
    check_valid(schemas, outputs, params)
    assert stats.preemptions > 0 and stats.accepted_tokens > 0


@pytest.fixture(scope="module", params=LIBRARIES)
def llm(model, request):
    config = {"disable_any_whitespace": True, "backend": request.param}
    made = engine(model, structured_outputs_config=config)
    assert made.info.plan["structured_outputs"]["value"]["backend"] == request.param
    yield made
    made.close()


def say(llm, prompt="x", **fields):
    params = constrained(**{"max_tokens": 200, "temperature": 1.0, "seed": 3, **fields})
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]


def test_every_kind_of_constraint_holds(llm):
    for seed in range(6):
        assert re.fullmatch("(ab|cd)+x[0-9]{2}", say(llm, regex="(ab|cd)+x[0-9]{2}", seed=seed).text)
        words = ["yes", "no", "né 🌸", 'a "quoted" one\n', ""]
        assert say(llm, choice=words, seed=seed).text in words
        assert isinstance(json.loads(say(llm, json_object=True, seed=seed, logit_bias=LEAD).text), dict)
        assert re.fullmatch("(<[ab]>)+", say(llm, grammar='root ::= ("<" [ab] ">")+', seed=seed).text)
        assert re.fullmatch("p(q|r)", say(llm, grammar='start: "p" /q|r/', seed=seed).text)
        assert isinstance(json.loads(say(llm, json="true", seed=seed, logit_bias=LEAD).text), object)


def test_a_structural_tag_holds_from_its_trigger_on(llm):
    tag = json.dumps({
        "structures": [{"begin": "<f=go>", "schema": SCHEMAS["multiples"], "end": "</f>"}],
        "triggers": ["<f="],
    })  # fmt: skip
    opening = {BYTE_ZERO + ord(char): 60.0 for char in "<f="}
    params = [
        constrained(structural_tag=tag, seed=seed, temperature=9.0, max_tokens=150, logit_bias=opening)
        for seed in range(6)
    ]
    found = [one.outputs[0].text for one in llm.generate(["x"] * 6, params, use_tqdm=False)]
    bodies = [body for text in found for body in re.findall("<f=(.*?)</f>", text)]
    assert bodies
    for body in bodies:
        assert body.startswith("go>")
        jsonschema.validate(json.loads(body.removeprefix("go>")), SCHEMAS["multiples"])


@cache
def next_bytes(words, said):
    """By hand: bytes that go on with one of the words, and whether one is complete."""
    left = [word[len(said) :] for word in words if word.startswith(said)]
    return {rest[0] for rest in left if rest}, b"" in left


def test_logprobs_are_raw_and_every_token_is_one_that_a_word_goes_on_with(llm):
    words = ("aa", "ab", "b", "é", "ê!")
    for seed in range(10):
        output = say(llm, choice=list(words), seed=seed, logprobs=0)
        said = b""
        for token in output.token_ids:
            legal, complete = next_bytes(tuple(word.encode() for word in words), said)
            assert (token == 2 and complete) or token - BYTE_ZERO in legal
            said += bytes([token - BYTE_ZERO]) if token != 2 else b""
        plain = llm.generate("x", SamplingParams(max_tokens=1, logprobs=20), use_tqdm=False)[0].outputs[0]
        first = next(iter(output.logprobs[0].values())).logprob
        others = {t: each.logprob for t, each in plain.logprobs[0].items()}
        assert others.get(output.token_ids[0], first) == pytest.approx(first, abs=1e-4)


def test_the_rules_by_which_constraints_and_other_parameters_combine(llm):
    letter = {char: BYTE_ZERO + ord(char) for char in "abc"}
    assert say(llm, regex="[ab]{4}", bad_words=["a"]).text == "bbbb"
    assert set(say(llm, regex="[abc]{9}", allowed_token_ids=[letter["a"], letter["c"], 2]).text) <= {"a", "c"}
    assert say(llm, regex="[ab]{4}", logit_bias={letter["a"]: 100.0}).text == "aaaa"
    assert say(llm, regex="[ab]{4}", logit_bias={letter["c"]: 100.0}).text.strip("ab") == ""
    # The end is put off where something else is legal, and nowhere else.
    assert len(say(llm, regex="a*", min_tokens=7, logit_bias={2: 100.0}).text) == 7
    assert say(llm, regex="ab", min_tokens=7).text == "ab"
    # The end token is legal at the grammar's ends alone, and ends the text whatever ignore_eos says.
    assert say(llm, regex="(abc)+", logit_bias={2: 100.0}).text == "abc"
    ended = say(llm, regex="abc", ignore_eos=True)
    assert (ended.text, ended.finish_reason) == ("abc", "stop")
    cut = say(llm, regex="abcabc", stop=["ca"])
    assert (cut.text, cut.stop_reason) == ("ab", "ca")
    assert say(llm, regex="abcabc", stop_token_ids=[letter["b"]]).stop_reason == letter["b"]
    assert say(llm, regex="a{50}", max_tokens=5).finish_reason == "length"


def test_a_row_without_a_legal_token_fails_alone(llm):
    """Row 15: what can't begin is refused, what empties later ends with an error."""
    with pytest.raises(BadRequest, match=r"structured_outputs\.regex='a\+': allows no first token"):
        say(llm, regex="a+", bad_words=["a"])
    with pytest.raises(BadRequest, match="allows no first token"):
        say(llm, regex="a+", allowed_token_ids=[5])
    params = [constrained(regex="ab", bad_words=["b"], max_tokens=9), SamplingParams(max_tokens=9)]
    failed, plain = llm.generate(["x", "x"], params, use_tqdm=False)
    assert failed.outputs[0].finish_reason == "error" and "no token that the grammar allows" in failed.error
    assert len(plain.outputs[0].token_ids) > 0 and plain.outputs[0].finish_reason != "error"


WRONG = [
    {"json": '{"type": "objec"}'}, {"json": '{"$ref": "#/nowhere"}'}, {"json": "{"}, {"json": "[1]"},
    {"json": {"type": "array", "uniqueItems": True}}, {"json": {"enum": []}}, {"json": "false"},
    {"json": {"type": "string", "pattern": "(a"}}, {"json": {"$ref": "http://localhost/x"}},
    {"json": '{"items":' * 3000 + "{}" + "}" * 3000}, {"json": {"const": "x" * 200_000}},
    {"regex": "[a-"}, {"regex": "(?P<x>"}, {"regex": "(?=a)b"}, {"regex": r"[^\s\S]"},
    {"regex": "a" * 200_000}, {"choice": ["x"] * 5000}, {"grammar": "root ::= root"},
    {"grammar": 'root ::= "a'}, {"grammar": "start: ("}, {"grammar": "a ::= b " * 9000},
    {"structural_tag": "{}"}, {"structural_tag": "[]"},
    {"structural_tag": '{"structures": [{"begin": "a", "schema": {}, "end": ""}], "triggers": ["b"]}'},
]  # fmt: skip


@pytest.mark.parametrize("constraint", WRONG, ids=lambda one: str(one)[:40])
def test_what_cannot_be_a_grammar_is_refused_by_the_field_that_holds_it(llm, constraint):
    """Row 11, with neighbours."""
    (name,) = constraint
    with pytest.raises(BadRequest, match=rf"^structured_outputs\.{name}=") as refused:
        say(llm, **constraint)
    assert len(str(refused.value)) < 600
    assert say(llm, regex="ok").text == "ok"


PATTERNS = [{"pattern": f"^.*a{number}b.*$"} for number in range(17)]


@pytest.mark.parametrize(
    "constraint",
    [
        {"json": {"type": "string", "allOf": PATTERNS}},
        {"json": {"$defs": {"a": {"allOf": PATTERNS[:9]}, "b": {"allOf": PATTERNS[9:]}},
                  "properties": {"x": {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}}}},
        {"grammar": "start: T\nT: " + " & ".join(["/.*a.*/"] * 18)},
        {"structural_tag": json.dumps({"triggers": ["<"], "structures": [
            {"begin": "<", "schema": {"allOf": PATTERNS}, "end": ">"}]})},
    ],
)  # fmt: skip
def test_patterns_that_one_value_must_match_are_few(llm, constraint):
    """Each multiplies the states of the others, in time and memory."""
    (name,) = constraint
    limit = "at most 16 may be|terminal intersection '&' is not supported"  # the latter of xgrammar
    with pytest.raises(BadRequest, match=rf"^structured_outputs\.{name}=.*({limit})"):
        say(llm, **constraint)


def test_many_patterns_of_different_values_are_as_good_as_few(llm):
    properties = {f"p{number}": {"type": "string", "pattern": "^[ab]$"} for number in range(30)}
    assert say(llm, json={"type": "object", "properties": properties}, max_tokens=1).text
    either = [{"type": "string", "pattern": f"^{letter}$"} for letter in "abcdefghijklmnopqrst"]
    assert json.loads(say(llm, json={"anyOf": either}).text) in "abcdefghijklmnopqrst"
    assert say(llm, grammar='start: "a&b&c&d&e&f&g&h&i&j&k&l&m&n&o&p&q&r"').text.startswith("a&b")


def test_as_many_choices_as_are_allowed_can_be_made(llm):
    choices = [f"{'x' * 12}{number}" for number in range(MAX_CHOICES)]
    assert say(llm, choice=choices).text in choices


def asked(core, key, grammar, **fields):
    params = SamplingParams(**{"max_tokens": 60, "temperature": 1.0, **fields.pop("params", {})})
    return make_request(core, key, ids_of("hi"), params, seed=key, grammar=grammar, **fields)


def test_a_request_goes_on_from_tokens_that_an_engine_which_is_gone_had_delivered(model):
    core = make_core(model)
    pairs = "start: /(ab|cd){20}/"
    whole = run(core, [asked(core, key, pairs) for key in range(8)])
    begun = {key: whole[key].tokens[:cut] for key, cut in enumerate((1, 2, 7, 12, 25, 31, 39, 40))}
    resumed = [
        asked(core, key, pairs, resumed_token_ids=np.array(tokens, np.int32)) for key, tokens in begun.items()
    ]
    got = run(core, resumed)
    core.close()
    for key, tokens in begun.items():
        assert tokens + got[key].tokens == whole[key].tokens
        assert got[key].finish is Finish.STOP


def test_requests_may_leave_at_any_moment(model):
    core = make_core(model, max_num_seqs=4, num_gpu_blocks_override=40)
    requests = [asked(core, key, f"start: /(ab|cd){{{key % 10},20}}/") for key in range(24)]
    got = run(core, requests, abort_at={key: key % 9 for key in range(0, 24, 2)})
    assert all(got[key].finish is Finish.STOP for key in range(1, 24, 2))
    assert not core._grammars._live and not core._grammars.busy
    core.close()


def test_what_the_engine_cannot_compile_or_tokens_that_do_not_fit_end_one_request(model):
    core = make_core(model)
    strange = np.array(ids_of("zz"), np.int32)
    requests = [asked(core, 0, "start: ("), asked(core, 1, "start: /a+b/", resumed_token_ids=strange),
                asked(core, 2, "start: /ab/"), asked(core, 3, "")]  # fmt: skip
    got = run(core, requests)
    core.close()
    assert [got[key].finish for key in range(3)] == [Finish.ERROR, Finish.ERROR, Finish.STOP]
    assert all(got[key].errors[0].startswith("structured_outputs: ") for key in (0, 1))
    assert got[3].finish in (Finish.STOP, Finish.LENGTH)


def test_an_engine_without_a_tokenizer_refuses(tiny_model, model):
    llm = engine(model, skip_tokenizer_init=True, structured_outputs_config=None)
    with pytest.raises(BadRequest, match=r"structured_outputs\.regex='a': needs a tokenizer"):
        llm.generate([[1, 2]], constrained(regex="a", detokenize=False), use_tqdm=False)
    llm.close()
    core = make_core(tiny_model("llama"))
    got = run(core, [asked(core, 0, "start: /a/"), make_request(core, 1, [3], SamplingParams(max_tokens=3))])
    core.close()
    assert got[0].finish is Finish.ERROR and got[1].finish is not Finish.ERROR


def test_only_constrained_rows_wait_for_their_masks(model, monkeypatch):
    """Masks that take for ever: plain rows reach their ends meanwhile."""
    core = make_core(model)
    gate, fill = threading.Event(), guidance._Matcher.fill

    def slow(matcher, mask):
        assert not mask.any() or gate.wait(60)  # the first mask comes at once
        fill(matcher, mask)

    monkeypatch.setattr(guidance._Matcher, "fill", slow)
    core.add([asked(core, 0, "start: /(ab|cd){20}/")])
    plain = SamplingParams(max_tokens=50, ignore_eos=True)
    core.add([make_request(core, key, [5, 6], plain) for key in (1, 2)])
    ended = set()
    while ended != {1, 2}:
        outputs = core.step()
        if outputs is not None:
            ended |= set(outputs.keys[outputs.finish > 0].tolist())
    gate.set()
    while core.has_work:
        core.step()
    core.close()
