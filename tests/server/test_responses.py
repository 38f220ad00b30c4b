"""/v1/responses through the official client, over a scripted engine: items, events in OpenAI's order, what is
refused."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import Template
from live import Live
from openai import BadRequestError, NotFoundError
from scripted import ScriptedEngine
from test_tool_faults import DEEP
from test_tools import PARAMETERS, SAID, THOUGHT, over

from slipstream.server import streams
from slipstream.server.assistant import Said, Thoughts
from slipstream.server.response_items import Items

WEATHER: Any = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": True}
CLOCK: Any = {"type": "function", "name": "clock"}


def events(live: Live, **ask: Any) -> list[Any]:
    return list(live.openai.responses.create(model="scripted", stream=True, **ask))


def test_a_text_is_answered_with_a_message_and_usage(served: Live) -> None:
    answer = served.openai.responses.create(model="scripted", input="hi", metadata={"a": "b"}, user="u")
    assert answer.output_text == "Hello, world" and answer.status == "completed"
    assert answer.object == "response" and answer.id.startswith("resp_") and answer.model == "scripted"
    [item] = answer.output
    assert item.type == "message" and item.role == "assistant" and item.status == "completed"
    assert answer.usage is not None
    prompt = len("<user>hi<assistant>")
    counts = (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens)
    assert counts == (prompt, 12, prompt + 12)
    assert answer.metadata == {"a": "b"} and answer.error is None and answer.incomplete_details is None
    assert answer.tools == [] and answer.parallel_tool_calls and answer.tool_choice == "auto"


def test_events_come_in_order_are_numbered_and_end_with_the_whole(served: Live) -> None:
    found = events(served, input="hi")
    kinds = [event.type for event in found]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert [event.sequence_number for event in found] == list(range(len(found)))
    assert "".join(event.delta for event in found[4:-4]) == found[-4].text == "Hello, world"
    assert found[-1].response.output_text == "Hello, world" and found[-1].response.usage.output_tokens == 12
    assert found[0].response.output == [] and found[2].item.content == [] and found[3].part.text == ""
    assert len({event.item_id for event in found[3:-2]} | {found[2].item.id}) == 1


def test_the_clients_own_stream_helper_puts_it_together(served: Live) -> None:
    with served.openai.responses.stream(model="scripted", input="hi") as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text == "Hello, world"


def test_events_carry_their_type_in_a_line_of_their_own(served: Live) -> None:
    text = served.http.post("/v1/responses", json={"input": "hi", "stream": True}).text
    blocks = [block for block in text.split("\n\n") if block]
    assert blocks[0].startswith("event: response.created\ndata: {") and "[DONE]" not in text


def test_instructions_and_items_become_turns() -> None:
    template = Template()
    with over("ok", template) as (live, _):
        live.openai.responses.create(
            model="scripted",
            instructions="Be brief.",
            input=[
                {"role": "user", "content": [{"type": "input_text", "text": "time?"}]},
                {
                    "type": "reasoning",
                    "id": "rs_1",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "hm"}],
                },
                {"type": "function_call", "call_id": "c1", "name": "clock", "arguments": "{}"},
                {"type": "function_call", "call_id": "c2", "name": "clock", "arguments": '{"a": 1}'},
                {"type": "function_call_output", "call_id": "c1", "output": "noon"},
                {"type": "function_call_output", "call_id": "c2", "output": "one"},
            ],
        )
        seen = template.seen[-1]["messages"]
        assert [turn["role"] for turn in seen] == ["system", "user", "assistant", "tool", "tool"]
        assert seen[2]["reasoning_content"] == "hm"
        calls = [(call["id"], call["function"]["arguments"]) for call in seen[2]["tool_calls"]]
        assert calls == [("c1", {}), ("c2", {"a": 1})]
        assert [turn["tool_call_id"] for turn in seen[3:]] == ["c1", "c2"]


def test_an_answer_can_be_sent_back_as_input() -> None:
    template = Template()
    with over(THOUGHT + "Let me see. " + SAID["hermes"], template, reasoning_parser="qwen3") as (live, _):
        first = live.openai.responses.create(model="scripted", input="hi", tools=[WEATHER, CLOCK])
        kinds = [item.type for item in first.output]
        assert kinds == ["reasoning", "message", "function_call", "function_call"]
        outputs: list[Any] = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "x"}
            for item in first.output
            if item.type == "function_call"
        ]
        back: list[Any] = [{"role": "user", "content": "hi"}, *(item.model_dump() for item in first.output)]
        live.openai.responses.create(model="scripted", input=[*back, *outputs], tools=[WEATHER, CLOCK])
        assistant = template.seen[-1]["messages"][1]
        assert assistant["content"] == "Let me see." and assistant["reasoning_content"] == "It may rain."
        assert [call["function"]["name"] for call in assistant["tool_calls"]] == ["get_weather", "clock"]


def test_a_stream_of_thoughts_text_and_calls_says_what_the_whole_answer_says() -> None:
    with over(THOUGHT + "Let me see." + SAID["hermes"], reasoning_parser="qwen3") as (live, _):
        ask: Any = {"input": "hi", "tools": [WEATHER, CLOCK]}
        whole = live.openai.responses.create(model="scripted", **ask)
        found = events(live, **ask)
        streamed = found[-1].response

        def plain(item: Any) -> dict[str, Any]:
            return {key: value for key, value in item.model_dump().items() if key not in ("id", "call_id")}

        assert [plain(item) for item in streamed.output] == [plain(item) for item in whole.output]
        assert whole.usage.output_tokens_details.reasoning_tokens == len("It may rain.")
        done = [event.item for event in found if event.type == "response.output_item.done"]
        assert [item.type for item in done] == ["reasoning", "message", "function_call", "function_call"]
        for place, item in enumerate(done):
            pieces = [e.delta for e in found if e.type.endswith(".delta") and e.output_index == place]
            text = item.arguments if item.type == "function_call" else item.content[0].text
            assert "".join(pieces) == text
        arguments = [e for e in found if e.type == "response.function_call_arguments.done"]
        assert [event.arguments for event in arguments] == ['{"city": "Paris", "days": 2}', "{}"]


def test_a_forced_call_asks_for_grammar() -> None:
    with over('{"city": "Paris"}') as (live, engine):
        choice: Any = {"type": "function", "name": "get_weather"}
        answer = live.openai.responses.create(
            model="scripted", input="hi", tools=[WEATHER], tool_choice=choice
        )
        [item] = answer.output
        assert item.type == "function_call" and item.arguments == '{"city": "Paris"}'
        assert engine.seen[-1][1].structured_outputs.json == PARAMETERS


def test_an_answer_that_is_cut_is_incomplete_whole_and_streamed(served: Live) -> None:
    answer = served.openai.responses.create(model="scripted", input="hi", max_output_tokens=5)
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete" and answer.output_text == "Hello"
    last = events(served, input="hi", max_output_tokens=5)[-1]
    assert last.type == "response.incomplete" and last.response.output_text == "Hello"


def test_logprobs_come_where_they_are_included(served: Live) -> None:
    ask: Any = {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    part = served.openai.responses.create(model="scripted", **ask).output[0].content[0]
    assert [entry.token for entry in part.logprobs] == list("Hello, world")
    assert part.logprobs[0].logprob == -0.5 and len(part.logprobs[0].top_logprobs) == 2
    deltas = [e for e in events(served, **ask) if e.type == "response.output_text.delta"]
    assert [entry.token for event in deltas for entry in event.logprobs] == list("Hello, world")
    assert served.openai.responses.create(model="scripted", input="hi").output[0].content[0].logprobs == []


def test_an_engine_error_in_a_stream_is_a_failed_response(served: Live, engine: ScriptedEngine) -> None:
    engine.fail_after = 3
    last = events(served, input="hi")[-1]
    assert last.type == "response.failed" and last.response.status == "failed"
    assert "no token was left" in last.response.error.message


def test_an_event_that_cannot_be_written_is_a_failed_response(served: Live, monkeypatch: Any) -> None:
    write = streams._encode

    def refuse(data: Any) -> bytes:
        if data.get("delta") == "o":
            raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")
        return write(data)

    monkeypatch.setattr(streams, "_encode", refuse)
    found = events(served, input="hi")
    assert [event.sequence_number for event in found] == list(range(len(found)))
    assert found[-2].delta == "l"
    assert found[-1].type == "response.failed" and found[-1].response.status == "failed"
    assert found[-1].response.error.code == "server_error"
    assert "internal error" in found[-1].response.error.message


def test_what_was_never_stored_cannot_be_had(served: Live) -> None:
    with pytest.raises(NotFoundError, match="not stored"):
        served.openai.responses.retrieve("resp_1")
    with pytest.raises(BadRequestError, match="previous_response_id"):
        served.openai.responses.create(model="scripted", input="hi", previous_response_id="resp_1")
    assert served.openai.responses.create(model="scripted", input="hi", store=True).store is False


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]},
            "input.0.arguments",
        ),
        *(
            (
                {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}]},
                "input.0.arguments",
            )
            for arguments in DEEP
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "c"}, "conversation"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [CLOCK]}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
        ({"include": ["file_search_call.results"]}, "include.0"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 1e9}, "temperature"),
        ({"n": 2}, "n"),
        ({"max_tool_calls": 1}, "max_tool_calls"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_done_is_refused_by_name(
    served: Live, engine: ScriptedEngine, fields: Any, param: str, stream: bool
) -> None:
    answer = served.http.post("/v1/responses", json={"input": "hi", "stream": stream, **fields})
    assert answer.status_code == 400, answer.text
    assert str(answer.json()["error"]["param"]).startswith(param), answer.text
    assert not engine.seen


def test_embeddings_are_refused_with_the_reason(served: Live) -> None:
    with pytest.raises(BadRequestError, match="does not support embeddings"):
        served.openai.embeddings.create(model="scripted", input="hi")
    served.refused("/v1/embeddings", {"input": {}}, "input")
    with pytest.raises(NotFoundError):
        served.openai.embeddings.create(model="other", input=["hi"])


def test_a_model_is_found_by_its_name(served: Live) -> None:
    assert served.openai.models.retrieve("scripted").id == "scripted"
    with pytest.raises(NotFoundError, match="does not exist"):
        served.openai.models.retrieve("gpt/9")


@pytest.mark.parametrize(
    ("reply", "texts"),
    [
        ("<think>abcdef</think>Hi", ["Hi"]),
        ("<think>\n\nto think\n</think>\n\nthink", ["think"]),
        ("<think>\n\n</think>\n\n<b>", ["<b>"]),
        ("no <think>, and no call", ["no <think>, and no call"]),
        (THOUGHT + "Let me see. " + SAID["hermes"], ["Let me see."]),
        (THOUGHT + SAID["hermes"] + "tool", ["tool"]),
        ("one" + SAID["hermes"] + "<tool_call>no call</tool_call> two", ["one", "no call two"]),
    ],
)
def test_the_logprobs_of_a_message_are_those_of_its_text(reply: str, texts: list[str]) -> None:
    with over(reply, reasoning_parser="qwen3") as (live, _):
        ask: Any = {
            "input": "hi", "include": ["message.output_text.logprobs"], "tools": [WEATHER, CLOCK],
        }  # fmt: skip
        found = events(live, **ask)
        whole = live.openai.responses.create(model="scripted", **ask)
        for answer in (whole, found[-1].response):
            parts = [item.content[0] for item in answer.output if item.type == "message"]
            assert [part.text.strip() for part in parts] == texts
            spelled = ["".join(entry.token for entry in part.logprobs) for part in parts]
            assert ["".join(text.split()) for text in spelled] == ["".join(text.split()) for text in texts]
        deltas = [e for e in found if e.type == "response.output_text.delta"]
        for event in deltas:
            assert "".join(entry.token for entry in event.logprobs).strip() == event.delta.strip()
        done = [e.logprobs for e in found if e.type == "response.output_text.done"]
        assert sum(map(len, done)) == sum(len(event.logprobs) for event in deltas)


def entries(*tokens: bytes) -> list[Any]:
    return [{"token": token.decode(errors="replace"), "bytes": list(token)} for token in tokens]


def test_tokens_that_are_parts_of_characters_or_of_two_texts_go_where_they_belong() -> None:
    items = Items()

    def add(*parts: Any, tokens: list[bytes]) -> None:
        list(items.add(Said(list(parts)), entries(*tokens)))

    add(Thoughts("hm"), tokens=[b"<think>", b"hm"])
    add(Thoughts("."), "A", tokens=[b".</think>\n\nA"])
    add(tokens=[b"\xe2\x82"])
    add("\u20ac", tokens=[b"\xac <"])
    add(" <b", tokens=[b"b", b"<|end|>"])
    list(items.end("completed"))
    spelled = [bytes(entry["bytes"]) for entry in items.items[1]["content"][0]["logprobs"]]
    assert spelled == [b".</think>\n\nA", b"\xe2\x82", b"\xac <", b"b"]
