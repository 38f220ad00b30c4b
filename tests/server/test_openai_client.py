"""The official client against the server, over a scripted engine: what comes out is known to the letter."""

from __future__ import annotations

from typing import Any

import pytest
from live import Live, serve
from openai import NotFoundError
from scripted import LIMITS, ByteTokenizer, ScriptedEngine

from slipstream.server.app import build_app

HI: list[Any] = [{"role": "user", "content": "hi"}]
REPLY = "Hello, world"


def test_chat_answers_with_a_message_and_usage(served: Live) -> None:
    answer = served.openai.chat.completions.create(model="scripted", messages=HI)
    assert answer.object == "chat.completion" and answer.model == "scripted"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == REPLY
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    prompt = len("<user>hi<assistant>")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, len(REPLY))
    assert answer.usage.total_tokens == prompt + len(REPLY)


def test_chat_stream_starts_with_the_role_and_ends_with_a_reason(served: Live) -> None:
    chunks = list(served.openai.chat.completions.create(model="scripted", messages=HI, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == REPLY
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1


def test_chat_samples_keep_their_index_whole_and_streamed(served: Live) -> None:
    ask = {"model": "scripted", "messages": HI, "n": 3}
    whole = served.openai.chat.completions.create(**ask)  # type: ignore[call-overload]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    streamed = ["", "", ""]
    for chunk in served.openai.chat.completions.create(**ask, stream=True):  # type: ignore[call-overload]
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert (
        streamed == [choice.message.content for choice in whole.choices] == [REPLY, REPLY + "1", REPLY + "2"]
    )


def test_chat_logprobs_hold_the_token_its_bytes_and_the_best(served: Live) -> None:
    answer = served.openai.chat.completions.create(
        model="scripted", messages=HI, logprobs=True, top_logprobs=2, max_tokens=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == ["H", "e"]
    first = logprobs.content[0]
    assert (first.logprob, first.bytes) == (-0.5, [ord("H")])
    assert [(top.token, top.logprob) for top in first.top_logprobs] == [("H", -0.5), ("J", -2.0)]


def test_chat_logprobs_without_top_list_no_alternatives(served: Live) -> None:
    answer = served.openai.chat.completions.create(model="scripted", messages=HI, logprobs=True, max_tokens=1)
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content is not None
    assert answer.choices[0].logprobs.content[0].top_logprobs == []


def test_content_parts_are_joined_and_an_earlier_answer_can_be_sent_back(
    served: Live, engine: ScriptedEngine
) -> None:
    first = served.openai.chat.completions.create(model="scripted", messages=HI)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    turns = [*HI, first.choices[0].message.model_dump(), {"role": "user", "content": parts}]
    served.openai.chat.completions.create(model="scripted", messages=turns)
    ids = engine.seen[-1][0]["prompt_token_ids"]
    assert ByteTokenizer().decode(ids) == f"<user>hi<assistant>{REPLY}<user>a\nb<assistant>"


def test_chat_template_options_reach_the_template(served: Live, engine: ScriptedEngine) -> None:
    turns: list[Any] = [*HI, {"role": "assistant", "content": "It"}]
    extra = {
        "add_generation_prompt": False,
        "continue_final_message": True,
        "chat_template_kwargs": {"end": "!"},
        "echo": True,
    }
    answer = served.openai.chat.completions.create(model="scripted", messages=turns, extra_body=extra)
    assert ByteTokenizer().decode(engine.seen[-1][0]["prompt_token_ids"]) == "<user>hi<assistant>It!"
    assert answer.choices[0].message.content == "It" + REPLY


@pytest.mark.parametrize("prompt", ["hi", [105, 106], ["hi", "you"], [[105, 106], [122]]])
def test_completions_take_every_form_of_prompt(served: Live, prompt: Any) -> None:
    answer = served.openai.completions.create(model="scripted", prompt=prompt, n=2)
    prompts = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
    assert [choice.index for choice in answer.choices] == list(range(2 * prompts))
    assert [choice.text for choice in answer.choices] == [REPLY, REPLY + "1"] * prompts
    assert answer.usage is not None and answer.usage.completion_tokens == prompts * (2 * len(REPLY) + 1)


@pytest.mark.parametrize("prompt", ["hi", [105, 106]])
def test_completions_stream_says_what_the_whole_answer_says(served: Live, prompt: Any) -> None:
    ask: dict[str, Any] = {"model": "scripted", "prompt": prompt, "echo": True, "logprobs": 2, "n": 2}
    whole = served.openai.completions.create(**ask)
    text, tokens, offsets = ["", ""], [[], []], [[], []]  # type: ignore[var-annotated]
    for chunk in served.openai.completions.create(**ask, stream=True):
        choice = chunk.choices[0]
        text[choice.index] += choice.text
        tokens[choice.index] += choice.logprobs.tokens
        offsets[choice.index] += choice.logprobs.text_offset
    assert text == [choice.text for choice in whole.choices] == ["hi" + REPLY, "hi" + REPLY + "1"]
    assert tokens == [choice.logprobs.tokens for choice in whole.choices]  # type: ignore[union-attr]
    assert offsets == [choice.logprobs.text_offset for choice in whole.choices]  # type: ignore[union-attr]
    for choice in whole.choices:
        assert choice.logprobs is not None and choice.logprobs.text_offset is not None
        assert [choice.text[at] for at in choice.logprobs.text_offset] == choice.logprobs.tokens


def test_echo_scores_the_prompt_alone_with_no_token_to_generate(served: Live) -> None:
    answer = served.openai.completions.create(
        model="scripted", prompt="abc", echo=True, logprobs=1, max_tokens=0
    )
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == ("abc", "length")
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == [None, -0.5, -0.5]
    assert answer.usage is not None and answer.usage.completion_tokens == 0


def test_token_ids_and_prompt_logprobs_come_on_request_only(served: Live) -> None:
    extra = {"return_token_ids": True, "prompt_logprobs": 1}
    asked = served.raw_json("/v1/completions", {"prompt": "ab", "max_tokens": 2, **extra})["choices"][0]
    assert asked["token_ids"] == [1 + ord("H"), 1 + ord("e")]
    assert asked["prompt_token_ids"] == [98, 99]
    assert asked["prompt_logprobs"] == [None, {"99": {"logprob": -0.5, "rank": 1, "decoded_token": "b"}}]
    plain = served.raw_json("/v1/completions", {"prompt": "ab", "max_tokens": 2})["choices"][0]
    assert set(plain) == {"index", "text", "logprobs", "finish_reason", "stop_reason"}
    chat = served.raw_json("/v1/chat/completions", {"messages": HI, "max_tokens": 2, **extra})
    assert chat["choices"][0]["token_ids"] == [1 + ord("H"), 1 + ord("e")]
    assert len(chat["prompt_token_ids"]) == len(chat["prompt_logprobs"]) == len("<user>hi<assistant>")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (None, 0),
        ({}, 0),
        ({"include_usage": False}, 0),
        ({"include_usage": None}, 0),
        ({"include_usage": True}, 1),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_comes_only_where_asked_in_one_last_chunk_without_choices(
    served: Live, path: str, options: Any, expected: int
) -> None:
    body = {"stream": True, "stream_options": options, "max_tokens": 3}
    events = served.events(path, body | ({"messages": HI} if "chat" in path else {"prompt": "hi"}))
    with_usage = [event for event in events if event.get("usage")]
    assert len(with_usage) == expected
    if expected:
        assert with_usage == events[-1:] and events[-1]["choices"] == []
        assert events[-1]["usage"]["completion_tokens"] == 3
    else:
        assert all(event["choices"] for event in events)


def test_continuous_usage_counts_up(served: Live) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = served.events("/v1/completions", {"prompt": "hi", "stream": True, "stream_options": options})
    assert [event["usage"]["completion_tokens"] for event in events[:-1]] == list(range(1, len(REPLY) + 1))


def test_every_sampling_field_reaches_the_engine(served: Live, engine: ScriptedEngine) -> None:
    fields = {
        "n": 2,
        "max_tokens": 7,
        "min_tokens": 1,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 3,
        "min_p": 0.1,
        "presence_penalty": -1.5,
        "frequency_penalty": 1.5,
        "repetition_penalty": 1.1,
        "seed": -5,
        "stop": ["x", "y"],
        "stop_token_ids": [7],
        "bad_words": ["z"],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "allowed_token_ids": [5, 6],
    }
    extra = {"priority": -3, "cache_salt": "salt", "logit_bias": {"5": -1.5}, "request_id": "mine"}
    answer = served.raw_json("/v1/completions", {"prompt": "hi", **fields, **extra})
    assert answer["id"] == "cmpl-mine"
    prompt, params, name, priority = engine.seen[-1]
    assert {field: getattr(params, field) for field in fields} == fields
    assert params.logit_bias == {5: -1.5} and prompt["cache_salt"] == "salt" and priority == -3
    assert name.startswith("cmpl-mine-")


def test_completions_default_to_16_tokens_and_chat_to_what_fits(served: Live, engine: ScriptedEngine) -> None:
    engine.reply = "x" * 100
    text = served.openai.completions.create(model="scripted", prompt="hi").choices[0].text
    assert text == "x" * 16
    answer = served.openai.chat.completions.create(model="scripted", messages=HI).choices[0]
    assert answer.message.content == "x" * 100
    assert LIMITS.max_model_len > 120


def test_models_lists_the_served_name(served: Live) -> None:
    assert [model.id for model in served.openai.models.list()] == ["scripted"]


def test_a_model_may_have_several_names_and_answers_give_the_first() -> None:
    app = build_app(ScriptedEngine(REPLY), ["one", "two"], tokenizer=ByteTokenizer())
    with serve(app) as live:
        assert [model.id for model in live.openai.models.list()] == ["one", "two"]
        assert live.openai.models.retrieve("two").id == "two"
        assert live.openai.completions.create(model="two", prompt="hi").model == "one"
        with pytest.raises(NotFoundError, match="this server has 'one', 'two'"):
            live.openai.completions.create(model="three", prompt="hi")


def test_tokenize_and_detokenize_are_inverse(served: Live) -> None:
    tokens = served.raw_json("/tokenize", {"prompt": "abc", "return_token_strs": True})
    assert tokens == {
        "count": 3,
        "max_model_len": LIMITS.max_model_len,
        "tokens": [98, 99, 100],
        "token_strs": ["<98>", "<99>", "<100>"],
    }
    assert served.raw_json("/detokenize", {"tokens": tokens["tokens"]}) == {"prompt": "abc"}
    chat = served.raw_json("/tokenize", {"messages": HI})
    assert served.raw_json("/detokenize", {"tokens": chat["tokens"]}) == {"prompt": "<user>hi<assistant>"}
