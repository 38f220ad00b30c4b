"""vLLM's own request fields: each does what it says, or is refused by its name; none is passed over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from conftest import Template
from live import Live, serve
from scripted import LIMITS, ByteTokenizer, ScriptedEngine

from slipstream.server.app import build_app

HI: list[Any] = [{"role": "user", "content": "hi"}]
PATHS: dict[str, Any] = {"/v1/completions": {"prompt": "hi"}, "/v1/chat/completions": {"messages": HI}}
RESPONSES = {"/v1/responses": {"input": "hi"}}
BOTH = pytest.mark.parametrize("path", PATHS)
STREAMS = pytest.mark.parametrize("stream", [False, True])
ENGINE, RENDER = ScriptedEngine(), Template()
LAST = "<assistant>"  # how the template ends a prompt


@pytest.fixture(scope="module")
def door() -> Iterator[Live]:
    with serve(build_app(ENGINE, "scripted", tokenizer=ByteTokenizer(), render=RENDER)) as live:
        yield live


def seen() -> str:
    """The prompt that the engine got last."""
    return ByteTokenizer().decode(ENGINE.seen[-1][0]["prompt_token_ids"])


NOT_THERE = {
    "use_beam_search": True, "length_penalty": 1.0, "logits_processors": ["a.b"], "vllm_xargs": {"a": 1},
    "kv_transfer_params": {"a": 1}, "mm_processor_kwargs": {},
}  # fmt: skip
UNKNOWN = {
    "guided_json": {}, "guided_regex": "a", "media_io_kwargs": {}, "chat_template": "{{ messages }}",
    "early_stopping": True, "prompt_embeds": "x", "detokenize": False, "num_beams": 2,
}  # fmt: skip


@pytest.mark.parametrize("path", PATHS | RESPONSES)
def test_what_there_is_none_of_is_refused_by_name(door: Live, path: str) -> None:
    body = (PATHS | RESPONSES)[path]
    for name, value in (NOT_THERE | UNKNOWN).items():
        for stream in (False, True):
            door.refused(path, body | {name: value, "stream": stream}, name)
    nothing = dict.fromkeys(NOT_THERE) | {"use_beam_search": False}
    assert door.http.post(path, json=body | nothing).status_code == 200


@STREAMS
@pytest.mark.parametrize(("count", "kept"), [(3, "xyz"), (1, "z"), (256, None), (None, None)])
def test_a_prompt_keeps_its_last_tokens(door: Live, stream: bool, count: Any, kept: str | None) -> None:
    ask = {"truncate_prompt_tokens": count, "max_tokens": 2, "stream": stream}
    long = "abc" * 20 + "xyz"
    for prompt in (long, ByteTokenizer().encode(long), [long]):
        assert door.http.post("/v1/completions", json=ask | {"prompt": prompt}).status_code == 200
        assert seen() == (kept or long)
    turns = [{"role": "user", "content": long}]
    assert door.http.post("/v1/chat/completions", json=ask | {"messages": turns}).status_code == 200
    whole = f"<user>{long}{LAST}"
    assert seen() == (whole if kept is None else whole[-len(kept) :])


@BOTH
def test_a_prompt_that_is_too_long_is_cut_to_what_fits_where_that_is_asked(door: Live, path: str) -> None:
    # More characters than any prompt could have, which is refused without the field.
    long = "a" * (LIMITS.max_model_len * 200) + "end"
    fits = LIMITS.block_size * LIMITS.num_blocks
    turns = [{"role": "user", "content": long}]
    body: dict[str, Any] = {"prompt": long} if path == "/v1/completions" else {"messages": turns}
    assert door.http.post(path, json=body | {"max_tokens": 5}).status_code == 400
    for count, left in ((100, 100), (fits - 5, fits - 5)):
        ask = body | {"max_tokens": 5, "truncate_prompt_tokens": count}
        assert door.raw_json(path, ask)["usage"]["prompt_tokens"] == left
    # Of -1 all that max_model_len leaves beside max_tokens; the pool here has less room than that.
    field = "prompt" if "prompt" in body else "messages"
    message = door.refused(path, body | {"max_tokens": 5, "truncate_prompt_tokens": -1}, field)
    assert f"{LIMITS.max_model_len - 5} tokens" in message


@BOTH
@pytest.mark.parametrize("count", [0, -2, LIMITS.max_model_len + 1, "1", 1.0, True, 10**30])
def test_a_count_that_no_prompt_can_have_is_refused(door: Live, path: str, count: Any) -> None:
    door.refused(path, PATHS[path] | {"truncate_prompt_tokens": count}, "truncate_prompt_tokens")


def test_a_cut_prompt_is_echoed_as_it_was_cut(door: Live) -> None:
    ask = {"prompt": "abcdef", "truncate_prompt_tokens": 2, "echo": True, "max_tokens": 1, "logprobs": 1}
    choice = door.raw_json("/v1/completions", ask)["choices"][0]
    assert choice["text"] == "efH" and choice["logprobs"]["tokens"] == ["e", "f", "H"]


@STREAMS
def test_tokens_of_logprobs_can_be_named_by_their_ids(door: Live, stream: bool) -> None:
    ask: dict[str, Any] = {"prompt": "hi", "max_tokens": 2, "logprobs": 2, "stream": stream}
    ask["return_tokens_as_token_ids"] = True
    path = "/v1/completions"
    answers = door.events(path, ask) if stream else [door.raw_json(path, ask)]
    found = [answer["choices"][0]["logprobs"] for answer in answers]
    ids = ByteTokenizer().encode("He")
    assert [name for one in found for name in one["tokens"]] == [f"token_id:{token}" for token in ids]
    tops = [set(top) for one in found for top in one["top_logprobs"]]
    assert tops == [{f"token_id:{token}", f"token_id:{token + 2}"} for token in ids]
    assert [offset for one in found for offset in one["text_offset"]] == [0, 1]


@STREAMS
def test_tokens_of_chat_logprobs_can_be_named_by_their_ids(door: Live, stream: bool) -> None:
    ask: dict[str, Any] = {"messages": HI, "max_tokens": 1, "logprobs": True, "top_logprobs": 2}
    ask |= {"return_tokens_as_token_ids": True, "stream": stream}
    path, token = "/v1/chat/completions", 1 + ord("H")
    answers = door.events(path, ask) if stream else [door.raw_json(path, ask)]
    (content,) = [choice["logprobs"]["content"] for one in answers for choice in one["choices"]
                  if choice["logprobs"]]  # fmt: skip
    assert content[0]["token"] == f"token_id:{token}" and content[0]["bytes"] == [ord("H")]
    assert content[0]["top_logprobs"][1]["token"] == f"token_id:{token + 2}"


@BOTH
def test_names_of_tokens_need_logprobs(door: Live, path: str) -> None:
    door.refused(path, PATHS[path] | {"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids")
    nothing = PATHS[path] | {"return_tokens_as_token_ids": False}
    assert door.http.post(path, json=nothing).status_code == 200


def test_documents_go_to_a_template_that_shows_them(door: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    path, documents = "/v1/chat/completions", [{"title": "a", "text": "b"}]
    asked: dict[str, Any] = PATHS[path] | {"documents": documents}
    by_kwargs = PATHS[path] | {"chat_template_kwargs": {"documents": documents}}
    for body in (asked, by_kwargs):
        assert "shows no documents" in door.refused(path, body, "documents")
    monkeypatch.setattr(RENDER, "takes_documents", True)
    for body in (asked, by_kwargs):
        assert door.http.post(path, json=body).status_code == 200
        assert RENDER.seen[-1]["documents"] == documents
    door.refused(path, asked | {"documents": ["a"]}, "documents.0")
    door.refused("/v1/completions", PATHS["/v1/completions"] | {"documents": documents}, "documents")
