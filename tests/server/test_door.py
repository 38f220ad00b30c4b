"""What is refused at the door: every answer is a 400 in OpenAI's shape that names the field, and nothing
reaches the engine. Rows of the list of reported faults are named where they stand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import render
from live import Live, serve
from scripted import LIMITS, VOCAB, ByteTokenizer, ScriptedEngine

from slipstream.contracts import limits
from slipstream.server.app import build_app

ENGINE = ScriptedEngine()
HI = [{"role": "user", "content": "hi"}]
PATHS = {"/v1/completions": {"prompt": "hi"}, "/v1/chat/completions": {"messages": HI}}
BOTH = pytest.mark.parametrize("path", PATHS)
STREAMS = pytest.mark.parametrize("stream", [False, True])


@pytest.fixture(scope="module")
def door() -> Iterator[Live]:
    with serve(build_app(ENGINE, "scripted", tokenizer=ByteTokenizer(), render=render)) as live:
        yield live


@pytest.fixture(autouse=True)
def engine_is_left_alone(door: Live) -> Iterator[None]:
    """Whatever was refused, the engine runs nothing and the next request is served."""
    yield
    assert not ENGINE.running
    assert door.http.post("/v1/completions", json={"prompt": "after"}).status_code == 200


BAD_VALUES: list[tuple[str, Any]] = [
    ("n", 0),
    ("n", -1),
    ("n", limits.MAX_N + 1),
    ("n", 3_000_000),
    ("n", 1.5),
    ("n", "2"),
    ("n", True),
    ("n", 10**30),
    ("temperature", -0.1),
    ("temperature", 1e5),
    ("temperature", 10**400),
    ("temperature", "hot"),
    ("temperature", [1]),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_p", -1),
    ("top_k", -2),
    ("top_k", 2**31),
    ("top_k", 2.5),
    ("top_k", 10**400),
    ("priority", -(10**400)),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("repetition_penalty", 1e5),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("seed", 1.5),
    ("max_tokens", -1),
    ("max_tokens", 2**31),
    ("min_tokens", -1),
    ("min_tokens", 200),
    ("stop", [""]),
    ("stop", ""),
    ("stop", ["a"] * 17),
    ("stop", "x" * 1025),
    ("stop", [1]),
    ("stop", {}),
    ("stop_token_ids", [VOCAB + 7]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["1"]),
    ("stop_token_ids", list(range(65))),
    ("logit_bias", {str(VOCAB + 50): 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"1.0": 1}),
    ("logit_bias", {"\u0661": 1}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"5": "1"}),
    ("logit_bias", {"9" * 5000: 1}),
    ("logit_bias", [1]),
    ("logit_bias", {str(i): 1 for i in range(1025)}),
    ("bad_words", [""]),
    ("bad_words", "x"),
    ("bad_words", ["x"] * 129),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [VOCAB]),
    ("allowed_token_ids", [-1]),
    ("prompt_logprobs", 21),
    ("prompt_logprobs", -2),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", True),
    ("stream", "yes"),
    ("stream", 1),
    ("echo", "yes"),
    ("ignore_eos", 1),
    ("skip_special_tokens", "no"),
    ("include_stop_str_in_output", 0),
    ("add_special_tokens", 1),
    ("request_id", ""),
    ("request_id", "x" * 257),
    ("cache_salt", ""),
    ("priority", 2**31),
    ("priority", 0.5),
    ("stream_options", {"include_usage": True}),
    ("return_token_ids", "yes"),
    ("user", 5),
    ("metadata", "x"),
]


@BOTH
@pytest.mark.parametrize(("field", "value"), BAD_VALUES, ids=lambda value: repr(value)[:30])
def test_a_value_past_its_limit_is_refused_by_name(door: Live, path: str, field: str, value: Any) -> None:
    """Rows 1, 5, 13."""
    seen = len(ENGINE.seen)
    door.refused(path, PATHS[path] | {"max_tokens": 100, field: value}, field)
    assert len(ENGINE.seen) == seen


USER = {"role": "user"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


@pytest.mark.parametrize(
    ("path", "body", "field", "rule"),
    [
        ("completions", "[]", "body", "must be an object"),
        ("completions", {"prompt": [[1], "a"]}, "prompt", "must be a string, a list of strings"),
        ("completions", {"prompt": "a", "echo": 1}, "echo", "must be true or false"),
        ("embeddings", {"input": 5}, "input", "must be a string or a list"),
        ("chat/completions", {"messages": []}, "messages", "must be at least 1 long"),
        ("chat/completions", {"messages": [5]}, "messages.0", "must be an object"),
        ("chat/completions", {"messages": [USER | {"content": 5}]}, "messages.0.content",
         "must be a string or a list"),
        ("chat/completions", {"messages": [*HI, USER | {"content": [IMAGE]}]}, "messages.1.content.0.type",
         "must be 'text'"),
        ("responses", {"input": [USER | {"content": [{"type": "input_image"}]}]}, "input.0.content.0.type",
         "must be 'input_text', "),
        ("responses", {"input": [{"role": "tool", "content": "a"}]}, "input.0.role", "must be 'system', "),
        ("responses", {"input": [{"type": "web_search_call"}]}, "input.0", "must be of type message, "),
    ],
)  # fmt: skip
def test_what_has_the_wrong_form_is_told_the_right_one(
    door: Live, path: str, body: Any, field: str, rule: str
) -> None:
    assert f": {rule}" in door.refused(f"/v1/{path}", body, field)


@BOTH
@STREAMS
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"])
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e400"])
def test_a_number_that_is_not_finite_is_refused(
    door: Live, path: str, stream: bool, field: str, number: str
) -> None:
    """Row 7."""
    raw = json.dumps(PATHS[path] | {"stream": stream})[:-1] + f', "{field}": {number}}}'
    assert "finite" in door.refused(path, raw, field)


@BOTH
def test_a_tiny_temperature_is_served_as_greedy(door: Live, path: str) -> None:
    """Row 7."""
    assert door.raw(path, json.dumps(PATHS[path])[:-1] + ', "temperature": 1e-310}').status_code == 200
    assert ENGINE.seen[-1][1].greedy


def test_numbers_that_are_not_finite_are_found_wherever_they_stand(door: Live) -> None:
    door.refused("/v1/completions", '{"prompt": "hi", "logit_bias": {"5": NaN}}', "logit_bias.5")
    door.refused("/v1/completions", '{"prompt": [1, NaN]}', "prompt.1")
    door.refused(
        "/v1/completions", '{"prompt": "hi", "metadata": {"a": [0, {"b": Infinity}]}}', "metadata.a.1.b"
    )


BAD_PROMPTS = [
    [],
    [[]],
    [[1], []],
    ["hi", ""],
    "",
    [7, -3, 9],
    [[5], [-2]],
    [VOCAB],
    [[1, VOCAB]],
    [1, "a"],
    ["a", 1],
    [1.0],
    [True],
    [[1, "a"]],
    [[["a"]]],
    None,
    5,
    {},
    {"prompt": "x"},
    [None],
    [{}],
    [10**30],
    ["a"] * 4097,
    "x" * (LIMITS.max_model_len + 1),
    [[1] * 5000],
]


@STREAMS
@pytest.mark.parametrize("prompt", BAD_PROMPTS, ids=lambda value: repr(value)[:30])
def test_prompts_that_cannot_be_served_are_refused(door: Live, stream: bool, prompt: Any) -> None:
    """Rows 3, 17."""
    door.refused("/v1/completions", {"prompt": prompt, "stream": stream}, "prompt")


@STREAMS
def test_a_prompt_that_can_never_fit_the_pool_is_refused_at_once(door: Live, stream: bool) -> None:
    """Row 23."""
    tokens = LIMITS.block_size * LIMITS.num_blocks
    message = door.refused(
        "/v1/completions", {"prompt": "x" * (tokens - 1), "max_tokens": 2, "stream": stream}, "prompt"
    )
    assert f"{LIMITS.num_blocks + 1} KV blocks" in message and f"has {LIMITS.num_blocks}" in message
    assert (
        door.http.post("/v1/completions", json={"prompt": "x" * (tokens - 1), "max_tokens": 1}).status_code
        == 200
    )


@STREAMS
@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [0], "min_tokens": 1},
        {"allowed_token_ids": [0], "min_tokens": 1, "n": 2, "temperature": 0},
    ],
)
def test_fields_that_leave_no_legal_token_are_refused(door: Live, stream: bool, fields: Any) -> None:
    """Row 15; bad_words need the real tokenizer."""
    door.refused("/v1/completions", {"prompt": "hi", "stream": stream, **fields}, "allowed_token_ids")


UNKNOWN = [
    "temprature",
    "guided_json",
    "functions",
    "use_beam_search",
    "chat_template",
    "x" * 99,
]


@BOTH
@pytest.mark.parametrize("field", UNKNOWN)
def test_a_field_that_is_not_known_is_refused_by_name(door: Live, path: str, field: str) -> None:
    door.refused(path, PATHS[path] | {field: {"json_object": False}}, field[:80])


@BOTH
def test_fields_that_change_nothing_are_taken(door: Live, path: str) -> None:
    harmless = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
    }
    assert door.http.post(path, json=PATHS[path] | harmless).status_code == 200


@BOTH
def test_null_means_the_default_for_every_optional_field(door: Live, path: str) -> None:
    schemas = door.http.get("/openapi.json").json()["components"]["schemas"]
    known = schemas["CompletionBody" if path == "/v1/completions" else "ChatBody"]
    assert len(known["properties"]) > 35
    plain = {field for field, schema in known["properties"].items() if schema.get("type") == "boolean"}
    nulls = dict.fromkeys(set(known["properties"]) - set(known["required"]) - plain)
    assert door.http.post(path, json=PATHS[path] | nulls).status_code == 200


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"best_of": 2}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"suffix": ""}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 10**6, "echo": True}, "logprobs"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"messages": HI}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
    ],
)
def test_completions_refuse_what_they_cannot_do(door: Live, fields: Any, field: str) -> None:
    """Row 25: the count of logprobs is capped."""
    door.refused("/v1/completions", {"prompt": "hi", **fields}, field)


def test_best_of_may_equal_n(door: Live) -> None:
    assert door.http.post("/v1/completions", json={"prompt": "hi", "best_of": 2, "n": 2}).status_code == 200


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "text", "json_schema": {"name": "x"}}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": ""}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
        ),
        ({"response_format": "text"}, "response_format"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
        ({"messages": [*HI, {"role": "user", "content": 5}]}, "messages.1.content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages.0.tool_calls"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"prompt": "hi"}, "prompt"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"modalities": ["audio"]}, "modalities"),
    ],
)
def test_chat_refuses_what_it_cannot_do(door: Live, fields: Any, field: str) -> None:
    """Row 9 for response_format."""
    error = door.http.post("/v1/chat/completions", json={"messages": HI, **fields})
    assert error.status_code == 400 and error.json()["error"]["param"].startswith(field), error.text


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"tools": []},
        {"tool_choice": "none"},
        {"modalities": ["text"]},
        {"parallel_tool_calls": True},
    ],
)
def test_chat_takes_options_that_say_plain_text(door: Live, fields: Any) -> None:
    assert door.http.post("/v1/chat/completions", json={"messages": HI, **fields}).status_code == 200
