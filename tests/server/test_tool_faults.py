"""Calls whose arguments are nested deep or hold halves of characters, asked and answered."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conftest import Template
from test_tools import CLOCK, HI, Streamed, over

from slipstream.text.parsers.protocol import MAX_DEPTH

WHERE = {"type": "object", "properties": {"where": {"type": "array"}}}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": WHERE}}


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


DEEP = ["[" * 100_000, '{"a":' * 100_000, nested(990), nested(MAX_DEPTH + 1)]


def turns(arguments: str) -> list[Any]:
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [*HI, {"role": "assistant", "tool_calls": [call]}]


@pytest.mark.parametrize(
    ("name", "reply", "call"),
    [
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', ("\ufffd", "{}")),
        ("hermes", '<tool_call>{"name": "clock", "arguments": "{\\"a\\": \\"\\ud83d\\"}"}</tool_call>',
         ("clock", '{"a": "\ufffd"}')),
        ("qwen3_coder", '<function=get_weather><parameter=where>["\\ud83d"]</parameter></function>',
         ("get_weather", '{"where": ["\ufffd"]}')),
    ],
)  # fmt: skip
def test_halves_of_surrogate_pairs_in_a_call_are_replaced(
    name: str, reply: str, call: tuple[str, str]
) -> None:
    with over(reply, tool_call_parser=name) as (live, _):
        ask: Any = {"messages": HI, "tools": [WEATHER, CLOCK]}
        answer = live.openai.chat.completions.create(model="scripted", **ask)
        [whole] = answer.choices[0].message.tool_calls or ()
        assert (whole.function.name, whole.function.arguments) == call
        [streamed] = Streamed(live, **ask).calls
        assert (streamed["name"], streamed["arguments"]) == call
        flat: Any = {"type": "function", **WEATHER["function"]}  # type: ignore[dict-item]
        asked: Any = {"model": "scripted", "input": "hi", "tools": [flat]}
        found = list(live.openai.responses.create(stream=True, **asked))[-1].response
        for response in (live.openai.responses.create(**asked), found):
            [item] = response.output
            assert (item.type, item.name, item.arguments) == ("function_call", *call)


def test_deep_arguments_within_the_limit_reach_the_template() -> None:
    template = Template()
    with over("ok", template) as (live, _):
        live.openai.chat.completions.create(model="scripted", messages=turns(nested(MAX_DEPTH)))
        [seen] = template.seen[-1]["messages"][1]["tool_calls"]
        assert seen["function"]["arguments"] == json.loads(nested(MAX_DEPTH))


@pytest.mark.parametrize("arguments", DEEP)
def test_arguments_that_are_too_deep_are_refused_by_name(arguments: str) -> None:
    with over("ok", Template()) as (live, engine):
        where = "messages.1.tool_calls.0.function.arguments"
        message = live.refused("/v1/chat/completions", {"messages": turns(arguments)}, where)
        assert f"at most {MAX_DEPTH} levels deep" in message and not engine.seen
