"""Tools and thoughts through HTTP, over a scripted engine that says them byte by byte: the official client
sees calls as OpenAI's reference describes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jsonschema
import pytest
from conftest import Template
from live import Live, serve
from real import real_server
from scripted import ByteTokenizer, ScriptedEngine
from text_model import make_text_model

from slipstream.server.app import build_app
from slipstream.server.options import ServerOptions
from slipstream.server.tool_schema import Tool
from slipstream.server.tools import list_schema

HI: list[Any] = [{"role": "user", "content": "weather?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "the time"}}
TOOLS: list[Any] = [WEATHER, CLOCK]
PARIS = {"city": "Paris", "days": 2}
SAID = {
    "hermes": '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}</tool_call>'
    '<tool_call>{"name": "clock", "arguments": {}}</tool_call>',
    "llama3_json": '{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}; '
    '{"name": "clock", "parameters": {}}',
    "mistral": '[TOOL_CALLS]get_weather{"city": "Paris", "days": 2}[TOOL_CALLS]clock{}',
    "qwen3_coder": "<tool_call><function=get_weather><parameter=city>\nParis\n</parameter>"
    "<parameter=days>\n2\n</parameter></function></tool_call>"
    "<tool_call><function=clock></function></tool_call>",
}


@contextmanager
def over(
    reply: str, template: Template | None = None, **options: Any
) -> Iterator[tuple[Live, ScriptedEngine]]:
    """options: of the server; hermes with auto calls unless they say otherwise."""
    engine = ScriptedEngine(reply=reply)
    made = ServerOptions(**({"tool_call_parser": "hermes", "enable_auto_tool_choice": True} | options))
    render = template or Template()
    app = build_app(engine, "scripted", tokenizer=ByteTokenizer(), render=render, options=made)
    with serve(app) as live:
        yield live, engine


class Streamed:
    """A stream put together as clients do."""

    def __init__(self, live: Live, **ask: Any) -> None:
        self.content, self.thoughts, self.finish = "", "", None
        self.calls: list[dict[str, str]] = []
        self.pieces = 0
        for chunk in live.openai.chat.completions.create(model="scripted", stream=True, **ask):
            [choice] = chunk.choices
            self.content += choice.delta.content or ""
            self.thoughts += getattr(choice.delta, "reasoning_content", None) or ""
            self.finish = choice.finish_reason or self.finish
            for call in choice.delta.tool_calls or ():
                assert call.function is not None
                if call.index == len(self.calls):
                    assert call.type == "function" and call.id and call.function.name
                    self.calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
                else:
                    assert call.id is None and call.function.name is None
                self.pieces += bool(call.function.arguments)
                self.calls[call.index]["arguments"] += call.function.arguments or ""


@pytest.mark.parametrize("name", SAID)
def test_parallel_calls_come_whole_and_in_deltas(name: str) -> None:
    with over(SAID[name], tool_call_parser=name) as (live, engine):
        ask = {"messages": HI, "tools": TOOLS}
        answer = live.openai.chat.completions.create(model="scripted", **ask)
        [choice] = answer.choices
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        calls = choice.message.tool_calls or []
        assert [call.function.name for call in calls] == ["get_weather", "clock"]
        assert json.loads(calls[0].function.arguments) == PARIS and calls[1].function.arguments == "{}"
        assert len({call.id for call in calls}) == 2
        streamed = Streamed(live, **ask)
        assert (streamed.content, streamed.finish) == ("", "tool_calls")
        for mine, theirs in zip(streamed.calls, calls, strict=True):
            assert (mine["name"], mine["arguments"]) == (theirs.function.name, theirs.function.arguments)
        assert streamed.pieces > 5, "arguments must stream"
        special = engine.seen[-1][1].skip_special_tokens
        assert special == (name in ("hermes", "qwen3_coder"))


def test_a_call_goes_back_to_the_model_with_its_result() -> None:
    template = Template()
    with over("It rains.", template) as (live, _):
        call = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": '{"a": [1]}'}}
        turns = [
            *HI,
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "audio": None},
            {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
        ]
        answer = live.openai.chat.completions.create(model="scripted", messages=turns, tools=TOOLS)
        assert answer.choices[0].message.content == "It rains." and answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].message.tool_calls is None
        seen = template.seen[-1]
        assert [tool["function"]["name"] for tool in seen["tools"]] == ["get_weather", "clock"]
        assert seen["messages"][1]["tool_calls"][0]["function"] == {"name": "clock", "arguments": {"a": [1]}}
        assert seen["messages"][2] == {"role": "tool", "content": "noon", "tool_call_id": "call_1"}


def test_one_call_is_kept_where_parallel_calls_are_off() -> None:
    with over(SAID["hermes"]) as (live, _):
        ask: Any = {"messages": HI, "tools": TOOLS, "parallel_tool_calls": False}
        answer = live.openai.chat.completions.create(model="scripted", **ask)
        assert [call.function.name for call in answer.choices[0].message.tool_calls or ()] == ["get_weather"]
        assert [call["name"] for call in Streamed(live, **ask).calls] == ["get_weather"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_forced_calls_ask_for_grammar_and_need_no_flag(choice: Any) -> None:
    forced = '[{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}]'
    reply = forced if choice == "required" else '{"city": "Paris", "days": 2}'
    with over(reply, tool_call_parser=None, enable_auto_tool_choice=False) as (live, engine):
        ask = {"messages": HI, "tools": TOOLS, "tool_choice": choice}
        [answer] = live.openai.chat.completions.create(model="scripted", **ask).choices
        [call] = answer.message.tool_calls or ()
        assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", PARIS)
        assert answer.message.content is None and answer.finish_reason == "tool_calls"
        assert Streamed(live, **ask).calls[0]["arguments"] == call.function.arguments
        wanted = engine.seen[-1][1].structured_outputs
        assert wanted is not None and wanted.json is not None
        schema = wanted.json
        assert isinstance(schema, dict)
        if choice == "required":
            import jsonschema

            jsonschema.validate(json.loads(forced), schema)
            for wrong in ([], [{"name": "other", "parameters": {}}], [{"name": "clock"}]):
                with pytest.raises(jsonschema.ValidationError):
                    jsonschema.validate(wrong, schema)
        else:
            assert schema == PARAMETERS


def test_the_schema_of_forced_calls_keeps_each_tools_own_references() -> None:
    import jsonschema

    def tool(name: str, leaf: str) -> Tool:
        parameters = {
            "type": "object",
            "properties": {"node": {"$ref": "#/$defs/node"}},
            "required": ["node"],
            "$defs": {
                "node": {"anyOf": [{"type": leaf}, {"type": "array", "items": {"$ref": "#/$defs/node"}}]}
            },
        }
        return Tool.model_validate({"type": "function", "function": {"name": name, "parameters": parameters}})

    schema = list_schema([tool("a", "string"), tool("b", "integer")], parallel=False)
    jsonschema.validate([{"name": "a", "parameters": {"node": [["x"], "y"]}}], schema)
    jsonschema.validate([{"name": "b", "parameters": {"node": [[1]]}}], schema)
    for wrong in ([{"name": "b", "parameters": {"node": ["x"]}}], [{"name": "a", "parameters": {"node": 1}}]):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
    two = [{"name": "a", "parameters": {"node": "x"}}] * 2
    jsonschema.validate(two, list_schema([tool("a", "string")], parallel=True))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(two, schema)


def test_a_choice_of_none_hides_the_tools() -> None:
    template = Template()
    with over("plain", template) as (live, _):
        ask: Any = {"messages": HI, "tools": TOOLS, "tool_choice": "none"}
        assert (
            live.openai.chat.completions.create(model="scripted", **ask).choices[0].message.content == "plain"
        )
        assert template.seen[-1]["tools"] is None


def test_a_template_without_a_place_for_tools_gets_a_system_turn() -> None:
    class Plain(Template):
        takes_tools = False
        takes_documents = False

        def __call__(self, *args: Any, **options: Any) -> str:
            return super().__call__(*args, **options)[-20:]  # the scripted engine takes no long prompts

    template = Plain()
    with over(SAID["hermes"], template) as (live, _):
        for turns in (HI, [{"role": "system", "content": "Be kind."}, *HI]):
            answer = live.openai.chat.completions.create(model="scripted", messages=turns, tools=TOOLS)
            assert answer.choices[0].finish_reason == "tool_calls"
            [system] = [turn for turn in template.seen[-1]["messages"] if turn["role"] == "system"]
            assert '"name": "get_weather"' in system["content"] and "<tool_call>" in system["content"]
        assert system["content"].startswith("Be kind.")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools.0.function.parameters",
        ),
        ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]}, "tools"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name",
        ),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        (
            {"messages": [*HI, {"role": "assistant", "tool_calls": [{"id": "x"}]}]},
            "messages.1.tool_calls.0.function",
        ),
        (
            {
                "messages": [
                    *HI,
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": "{"}}],
                    },
                ]
            },
            "messages.1.tool_calls.0.function.arguments",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": "x",
                        "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": "{}"}}],
                    }
                ]
            },
            "messages.0.tool_calls",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_tools_that_make_no_sense_are_refused_by_name(fields: Any, param: str, stream: bool) -> None:
    with over("x") as (live, engine):
        live.refused("/v1/chat/completions", {"messages": HI, "stream": stream, **fields}, param)
        assert not engine.seen


def test_auto_needs_its_flags() -> None:
    for options in ({"tool_call_parser": None}, {"tool_call_parser": "hermes"}):
        with over("x", **(options | {"enable_auto_tool_choice": False})) as (live, _):
            for choice in ({}, {"tool_choice": "auto"}):
                body = {"messages": HI, "tools": TOOLS, **choice}
                message = live.refused("/v1/chat/completions", body, "tool_choice")
                assert "--enable-auto-tool-choice" in message


def test_a_call_that_is_cut_ends_with_length() -> None:
    with over(SAID["hermes"]) as (live, _):
        ask: Any = {"messages": HI, "tools": TOOLS, "max_tokens": 60}
        [choice] = live.openai.chat.completions.create(model="scripted", **ask).choices
        assert choice.finish_reason == "length"
        [call] = choice.message.tool_calls or ()
        assert call.function.arguments and '{"city": "Paris", "days": 2}'.startswith(call.function.arguments)
        streamed = Streamed(live, **ask)
        assert streamed.finish == "length" and streamed.calls[0]["arguments"] == call.function.arguments


def test_samples_call_each_for_itself() -> None:
    with over('<tool_call>{"name": "clock", "arguments": {}}</tool_call>') as (live, _):
        ask: Any = {"model": "scripted", "messages": HI, "tools": TOOLS, "n": 2}
        answer = live.openai.chat.completions.create(**ask)
        assert [len(choice.message.tool_calls or ()) for choice in answer.choices] == [1, 1]
        assert answer.choices[1].message.content == "1", "the script adds the sample's index"
        assert answer.choices[0].message.tool_calls[0].id != answer.choices[1].message.tool_calls[0].id
        reasons = [
            (choice.index, choice.finish_reason)
            for chunk in live.openai.chat.completions.create(**ask, stream=True)
            for choice in chunk.choices
            if choice.finish_reason
        ]
        assert sorted(reasons) == [(0, "tool_calls"), (1, "tool_calls")]


THOUGHT = "<think>\nIt may rain.\n</think>\n\n"


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1"])
def test_thoughts_come_apart_whole_and_in_deltas(name: str) -> None:
    with over(THOUGHT + "Yes.", reasoning_parser=name) as (live, _):
        answer = live.openai.chat.completions.create(model="scripted", messages=HI)
        message: Any = answer.choices[0].message
        assert (message.reasoning_content, message.content) == ("It may rain.", "Yes.")
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None and answer.usage.completion_tokens_details is not None
        assert answer.usage.completion_tokens_details.reasoning_tokens == len("It may rain.")
        streamed = Streamed(live, messages=HI)
        assert (streamed.thoughts, streamed.content) == ("It may rain.", "Yes.")
        hidden: Any = {"messages": HI, "extra_body": {"include_reasoning": False}}
        without = live.openai.chat.completions.create(model="scripted", **hidden).choices[0].message
        assert not hasattr(without, "reasoning_content") and without.content == "Yes."
        assert Streamed(live, **hidden).thoughts == ""


def test_thoughts_before_a_call_and_thoughts_alone() -> None:
    with over(THOUGHT + SAID["hermes"], reasoning_parser="qwen3") as (live, _):
        ask: Any = {"messages": HI, "tools": TOOLS}
        message: Any = live.openai.chat.completions.create(model="scripted", **ask).choices[0].message
        assert message.reasoning_content == "It may rain." and message.content is None
        assert len(message.tool_calls) == len(Streamed(live, **ask).calls) == 2
        cut: Any = live.openai.chat.completions.create(model="scripted", messages=HI, max_tokens=14).choices[
            0
        ]
        assert (cut.message.reasoning_content, cut.message.content) == ("It may", None)
        assert cut.finish_reason == "length"


def test_effort_and_earlier_thoughts_reach_the_template() -> None:
    template = Template()
    with over("x", template, reasoning_parser="qwen3") as (live, _):
        turns: list[Any] = [*HI, {"role": "assistant", "content": "a", "reasoning_content": "b"}, *HI]
        live.openai.chat.completions.create(model="scripted", messages=turns, reasoning_effort="none")
        seen = template.seen[-1]
        assert (seen["reasoning_effort"], seen["enable_thinking"]) == ("none", False)
        assert seen["messages"][1] == {"role": "assistant", "content": "a", "reasoning_content": "b"}


def test_the_real_engine_forces_calls_by_grammar(tiny_model: Any) -> None:
    """Random weights call a tool all the same, with arguments of its schema."""
    schema = {
        "type": "object",
        "properties": {"unit": {"enum": ["c", "f"]}, "days": {"type": "integer", "maximum": 9, "minimum": 1}},
        "required": ["unit", "days"],
        "additionalProperties": False,
    }
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
    named: Any = {"type": "function", "function": {"name": "weather"}}
    model = make_text_model(tiny_model, max_position_embeddings=1024)
    spaceless = {"disable_any_whitespace": True}
    with real_server(model, max_model_len=1024, structured_outputs_config=spaceless) as live:
        for choice in ("required", named):
            ask = {"messages": HI, "tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
            answer = live.openai.chat.completions.create(model="real", max_tokens=150, **ask)
            assert answer.choices[0].finish_reason == "tool_calls"
            (call,) = answer.choices[0].message.tool_calls or ()
            assert call.function.name == "weather"
            jsonschema.validate(json.loads(call.function.arguments), schema)
