"""Bodies that are refused before anything in them is looked at, and errors that have no field."""

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
from slipstream.server.body import MAX_DEPTH, MAX_OBJECT_FIELDS
from slipstream.server.options import ServerOptions

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


BAD_BODIES = {
    "empty": b"",
    "not json": b"prompt=hi",
    "cut": b'{"prompt": "hi"',
    "two values": b"{} {}",
    "latin-1": b'{"prompt": "\xe9"}',
    "bare surrogate": b'{"prompt": "\\ud800"}',
    "surrogate bytes": b'{"prompt": "\xed\xa0\x80"}',
    "null": b"null",
    "list": b"[]",
    "string": b'"hi"',
    "number": b"5",
    "bomb": b"[" * 200_000,
    "object bomb": b'{"a":' * 100_000,
    "deep": b'{"prompt": ' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}",
    "wide": json.dumps(dict.fromkeys(map(str, range(MAX_OBJECT_FIELDS + 1)))).encode(),
    "twice": b'{"prompt": "a", "prompt": "b"}',
    "long number": b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    "utf-16": '{"prompt": "hi"}'.encode("utf-16"),
    "control": b'{"prompt": "a\x01b"}',
    "too large": b" " * (ServerOptions().max_request_bytes + 1),
    "byte order mark": b'\xef\xbb\xbf{"prompt": "hi"}',
}


@pytest.mark.parametrize("path", [*PATHS, "/tokenize", "/detokenize"])
@pytest.mark.parametrize("name", BAD_BODIES)
def test_a_body_that_is_no_object_of_json_is_refused(door: Live, path: str, name: str) -> None:
    answer = door.raw(path, BAD_BODIES[name])
    assert answer.status_code == 400 and set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_a_body_sent_in_chunks_is_cut_off_at_the_limit(door: Live) -> None:
    pieces = (b" " * 2**20 for _ in range(20))
    answer = door.http.post("/v1/completions", content=pieces, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and "larger" in answer.json()["error"]["message"]


def test_a_long_list_of_wrong_items_gives_one_short_error(door: Live) -> None:
    answer = door.http.post("/v1/completions", json={"prompt": [0.5] * 500_000})
    assert answer.status_code == 400 and len(answer.text) < 500


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_text_that_no_tokenizer_could_make_fit_is_refused_before_it_is_tokenised(
    door: Live, path: str
) -> None:
    longest = len("<255>")
    message = door.refused(path, {"prompt": "x" * (LIMITS.max_model_len * longest + 1)}, "prompt")
    assert f"at most {LIMITS.max_model_len * longest} characters" in message


def test_other_content_types_are_refused(door: Live) -> None:
    answer = door.http.post(
        "/v1/completions", content='{"prompt": "hi"}', headers={"content-type": "text/plain"}
    )
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "content-type"


@BOTH
def test_an_unknown_model_is_a_404(door: Live, path: str) -> None:
    answer = door.http.post(path, json=PATHS[path] | {"model": "gpt-9"})
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"


def test_unknown_paths_and_methods_have_the_same_shape(door: Live) -> None:
    for answer, status in ((door.http.get("/v1/nothing"), 404), (door.http.get("/v1/completions"), 405)):
        assert answer.status_code == status and set(answer.json()["error"]) == {
            "message",
            "type",
            "param",
            "code",
        }


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HI}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {"tokens": [VOCAB]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_tokenize_and_detokenize_check_their_fields(door: Live, path: str, body: Any, field: str) -> None:
    door.refused(path, body, field)


def test_errors_of_the_api_and_of_python_say_the_same(door: Live) -> None:
    from slipstream.contracts.sampling_params import SamplingParams

    with pytest.raises(ValueError, match="top_p") as error:
        SamplingParams(top_p=1.5)
    assert door.refused("/v1/completions", {"prompt": "hi", "top_p": 1.5}, "top_p") == str(error.value)
    wrong_type = door.refused("/v1/completions", {"prompt": "hi", "top_p": "1"}, "top_p")
    assert wrong_type.endswith(next(rule.limit for rule in limits.NUMBERS if rule.field == "top_p"))
