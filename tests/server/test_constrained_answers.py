"""Constrained answers over HTTP, by the real engine: what clients ask in each endpoint's own words, what is
refused, and the rows of the reported faults that are about grammar."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from live import Live
from real import real_server
from schemas import SCHEMAS, record
from text_model import BYTE_ZERO, make_text_model

from slipstream.server.options import ServerOptions

HI: list[Any] = [{"role": "user", "content": "go"}]
SMALL = record(name={"type": "string", "maxLength": 4}, n={"type": "integer", "minimum": 0, "maximum": 99})
SPACELESS = {"disable_any_whitespace": True}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
# Random weights are led to the ends of texts, and not into thoughts.
LEAD = {str(BYTE_ZERO + ord(char)): bias for char, bias in zip('"}],<', (7, 8, 8, 6, -100), strict=True)}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "small", "schema": SMALL, "strict": True}}
PATHS = {"/v1/completions": {"prompt": "go"}, "/v1/chat/completions": {"messages": HI}}


@pytest.fixture(scope="module")
def model(tiny_model: Any) -> Path:
    return make_text_model(tiny_model, max_position_embeddings=1024)


@pytest.fixture(scope="module")
def live(model: Path) -> Iterator[Live]:
    options = ServerOptions(reasoning_parser="qwen3")
    args = {"structured_outputs_config": SPACELESS, "speculative_config": NGRAM, "max_model_len": 512}
    with real_server(model, options, **args) as running:
        yield running


def text_of(answer: Any) -> str:
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop", choice
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


@pytest.mark.parametrize("path", PATHS)
def test_each_endpoint_takes_every_constraint(live: Live, path: str) -> None:
    def say(**fields: Any) -> str:
        common = {"max_tokens": 300, "temperature": 1.0, "seed": 5, "logit_bias": LEAD}
        return text_of(live.raw_json(path, PATHS[path] | common | fields))

    jsonschema.validate(json.loads(say(response_format=FORMAT)), SMALL)
    jsonschema.validate(json.loads(say(structured_outputs={"json": SMALL})), SMALL)
    jsonschema.validate(json.loads(say(structured_outputs={"json": json.dumps(SMALL)})), SMALL)
    assert isinstance(json.loads(say(response_format={"type": "json_object"})), dict)
    assert isinstance(json.loads(say(structured_outputs={"json_object": True})), dict)
    assert say(structured_outputs={"choice": ["positive", "negative"]}) in ("positive", "negative")
    assert say(structured_outputs={"regex": "[0-9]{3}"}).isdigit()
    assert say(structured_outputs={"grammar": 'root ::= "a" "b"', "regex": None}) == "ab"
    assert say(response_format={"type": "text"}, structured_outputs={"choice": ["é"]}) == "é"


def test_streams_are_pieces_of_the_same_answer(live: Live) -> None:
    body = {"messages": HI, "response_format": FORMAT, "seed": 8, "logit_bias": LEAD, "max_tokens": 200}
    whole = text_of(live.raw_json("/v1/chat/completions", body))
    events = live.events("/v1/chat/completions", body | {"stream": True})
    pieces = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
    assert "".join(pieces) == whole and len([piece for piece in pieces if piece]) > 3


def test_the_official_client_parses_answers_and_responses(live: Live) -> None:
    from pydantic import BaseModel

    class Small(BaseModel):
        name: str
        n: int

    extra: Any = {"logit_bias": LEAD, "seed": 1}
    chat = live.openai.chat.completions.parse(
        model="real", messages=HI, response_format=Small, max_tokens=300, extra_body=extra
    )
    assert isinstance(chat.choices[0].message.parsed, Small)
    text: Any = {"format": {"type": "json_schema", "name": "small", "schema": SMALL, "strict": True}}
    answer = live.openai.responses.create(
        model="real", input="go", text=text, max_output_tokens=300, extra_body=extra
    )
    jsonschema.validate(json.loads(answer.output_text), SMALL)
    assert answer.text is not None and answer.text.format is not None
    assert answer.text.format.to_dict() == text["format"]


def test_thoughts_come_before_the_constrained_text(live: Live) -> None:
    """What a reasoning parser takes for thoughts is free; the content is the schema's."""
    opening = {str(BYTE_ZERO + ord("<")): 40.0, str(BYTE_ZERO + ord("{")): -40.0}
    ask = {"messages": HI, "response_format": FORMAT, "logit_bias": opening, "max_tokens": 30}
    cut = live.raw_json("/v1/chat/completions", ask)["choices"][0]
    assert cut["finish_reason"] == "length" and cut["message"]["reasoning_content"]
    assert not cut["message"]["content"]
    ask |= {"logit_bias": LEAD, "max_tokens": 300}
    jsonschema.validate(json.loads(text_of(live.raw_json("/v1/chat/completions", ask))), SMALL)


REFUSED = [
    ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
    ({"structured_outputs": {"json": ""}}, "structured_outputs.json"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "[a-"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "(?P<x>"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"grammar": "root ::= ("}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"guided": 1}}, "structured_outputs.guided"),
    ({"structured_outputs": "json"}, "structured_outputs"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": ""}}},
     "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objec"}}}},
     "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_object", "triggers": ["a"]}}, "response_format.triggers"),
    ({"response_format": {"type": "structural_tag", "structures": [5], "triggers": ["a"]}},
     "response_format"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "field"), REFUSED, ids=lambda one: str(one)[:50])
def test_degenerate_and_broken_constraints_are_refused_by_name(
    live: Live, fields: Any, field: str, stream: bool
) -> None:
    """Rows 9 and 11, with neighbours: 400, and the engine lives."""
    for path, body in PATHS.items():
        live.refused(path, body | fields | {"stream": stream}, field)
    asked = {"structured_outputs": {"choice": ["alive"]}}
    assert text_of(live.raw_json("/v1/completions", {"prompt": "go"} | asked)) == "alive"


def test_tools_whose_schema_cannot_be_forced_are_refused(live: Live) -> None:
    wrong = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": wrong}}
    body = {"messages": HI, "tools": [tool], "tool_choice": "required"}
    live.refused("/v1/chat/completions", body, "tools")


@pytest.mark.parametrize("stream", [False, True])
def test_integers_of_any_width_are_kept_and_repeated(live: Live, stream: bool) -> None:
    wide = {"type": "integer", "minimum": 5, "maximum": 6, "x-own": 2**70}
    form = {"type": "json_schema", "name": "wide", "schema": wide}
    ask = {"input": "go", "text": {"format": form}, "metadata": {"a": -(2**70)}, "logit_bias": LEAD}
    if not stream:
        answer = live.raw_json("/v1/responses", ask)
        assert answer["text"]["format"]["schema"] == wide and answer["metadata"] == {"a": -(2**70)}
        assert answer["output"][-1]["content"][0]["text"] in ("5", "6")
    text = live.http.post("/v1/responses", json=ask | {"stream": stream}).text
    assert str(2**70) in text and "server_error" not in text
    chat = {"messages": HI, "structured_outputs": {"json": wide}, "stream": stream, "max_tokens": 200}
    assert live.http.post("/v1/chat/completions", json=chat).status_code == 200


def test_what_fails_later_by_its_own_grammar_is_a_400(live: Live) -> None:
    bans = {"structured_outputs": {"regex": "ab"}, "bad_words": ["b"], "prompt": "go"}
    live.refused("/v1/completions", bans, "structured_outputs.regex")


def test_concurrent_grammar_with_drafts_and_a_shared_prefix(live: Live, model: Path) -> None:
    """Rows 51 and 53: n-gram drafts, steps in flight, a shared prefix; the texts of an engine without
    drafts."""
    asks = [
        {"prompt": "again and again and again, " * 3 + str(i % 4), "temperature": 0, "max_tokens": 200,
         "logit_bias": LEAD, "response_format": FORMAT if i % 2 else None, "min_tokens": i % 3}
        for i in range(32)
    ]  # fmt: skip
    with ThreadPoolExecutor(32) as pool:
        got = list(pool.map(lambda ask: live.raw_json("/v1/completions", ask), asks))
    for i, answer in enumerate(got):
        if i % 2:
            jsonschema.validate(json.loads(text_of(answer)), SMALL)
    assert live.metric("spec_decode_num_draft_tokens_total") > 0
    flags = {"structured_outputs_config": SPACELESS, "max_model_len": 512}
    with real_server(model, **flags) as plain, ThreadPoolExecutor(32) as pool:
        texts = list(pool.map(lambda ask: plain.raw_json("/v1/completions", ask)["choices"][0]["text"], asks))
    assert [answer["choices"][0]["text"] for answer in got] == texts


def test_every_schema_is_served(live: Live) -> None:
    def ask(item: tuple[str, Any]) -> None:
        name, schema = item
        answer = live.raw_json("/v1/chat/completions", {
            "messages": HI, "temperature": 0.8, "seed": len(name), "max_tokens": 400, "logit_bias": LEAD,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        })  # fmt: skip
        jsonschema.validate(json.loads(text_of(answer)), schema, jsonschema.Draft202012Validator)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, SCHEMAS.items()))
