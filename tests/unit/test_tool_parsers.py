"""Readers of tool calls: what each format says, in pieces of any size, with and without the mistakes that
models make. Formats are those of the models' own chat templates."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.text.parsers.forced import ForcedCallParser, ForcedListParser
from slipstream.text.parsers.protocol import MAX_DEPTH, Arguments, CallStart, Event, ToolParser
from slipstream.text.parsers.qwen3_coder import convert
from slipstream.text.parsers.registry import TOOL_PARSERS

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "number"},
        "metric": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "where": {"$ref": "#/$defs/place"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "level": {"enum": ["low", "high"]},
    },
    "$defs": {"place": {"type": "object"}},
}
SCHEMAS = {"f": SCHEMA, "get_weather": SCHEMA}
MARKUP = (
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    "<function=",
    "</parameter>",
    "<parameter=",
)


@dataclass
class Read:
    """What came of an answer: content, and (name, arguments) of each call."""

    content: str = ""
    calls: list[list[str]] = field(default_factory=list)

    def add(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, CallStart):
                self.calls.append([event.name, ""])
            elif isinstance(event, Arguments):
                self.calls[-1][1] += event.text
            else:
                self.content += event

    @property
    def parsed(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


def read(parser: ToolParser, pieces: list[str], cut: bool = False) -> Read:
    found = Read()
    for piece in pieces:
        found.add(parser.feed(piece))
    found.add(parser.end(cut))
    return found


def both(make: Callable[[], ToolParser], text: str, cut: bool = False) -> Read:
    """Read whole and letter by letter, which must be the same."""
    whole, letters = read(make(), [text], cut), read(make(), list(text), cut)
    assert whole == letters
    return whole


def of(name: str) -> Callable[[], ToolParser]:
    return lambda: TOOL_PARSERS[name](SCHEMAS)


PARIS = {"city": "Paris", "days": 3}
WEATHER = '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}'
PARAMETERS = WEATHER.replace("arguments", "parameters")
NOTHING = '{"name": "f", "arguments": {}}'
ONE = [("get_weather", PARIS)]
TWO = [("get_weather", PARIS), ("f", {})]
CODER = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
GOOD: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("hermes", f"<tool_call>\n{WEATHER}\n</tool_call>", "", ONE),
    (
        "hermes",
        '<tool_call>{"arguments": {"city": "Paris", "days": 3}, "name": "get_weather"}</tool_call>',
        "",
        ONE,
    ),
    (
        "hermes",
        f"I look.\n<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>\n{NOTHING}\n</tool_call>",
        "I look.",
        TWO,
    ),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", {"a": 1})]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call> \\" {"}}</tool_call>',
        "",
        [("f", {"a": '</tool_call> " {'})],
    ),
    ("llama3_json", PARAMETERS, "", ONE),
    ("llama3_json", f'<|python_tag|>{PARAMETERS}; {{"name": "f", "parameters": {{}}}}', "", TWO),
    ("llama3_json", '\n\n{"type": "function", "name": "f", "parameters": {}}', "", [("f", {})]),
    ("llama3_json", 'Sure:\n{"name": "f", "arguments": {}}', "Sure:", [("f", {})]),
    ("mistral", f"[TOOL_CALLS] [{WEATHER}, {NOTHING}]", "", TWO),
    ("mistral", 'Well.[TOOL_CALLS]get_weather{"city": "Paris", "days": 3}[TOOL_CALLS]f{}', "Well.", TWO),
    ("mistral", '[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{"city": "Paris", "days": 3}', "", ONE),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS]"}', "", [("f", {"a": "[TOOL_CALLS]"})]),
    ("qwen3_coder", CODER, "", ONE),
    (
        "qwen3_coder",
        f"I look.\n\n{CODER}\n<tool_call>\n<function=f>\n</function>\n</tool_call>",
        "I look.",
        TWO,
    ),
    ("qwen3_coder", CODER.removeprefix("<tool_call>\n"), "", ONE),
    (
        "qwen3_coder",
        '<tool_call>\n<function=f>\n<parameter=city>\na\n"b\\c\n\n</parameter>\n'
        "<parameter=exact>\n1.5\n</parameter>\n<parameter=metric>\nTrue\n</parameter>\n"
        '<parameter=tags>\n["x", "y"]\n</parameter>\n'
        '<parameter=where>\n{"lat": 1}\n</parameter>\n<parameter=maybe>\nnull\n</parameter>\n'
        "<parameter=level>\nlow\n</parameter>\n<parameter=unknown>\n7\n</parameter>\n"
        "</function>\n</tool_call>",
        "",
        [
            (
                "f",
                {
                    "city": 'a\n"b\\c\n',
                    "exact": 1.5,
                    "metric": True,
                    "tags": ["x", "y"],
                    "where": {"lat": 1},
                    "maybe": None,
                    "level": "low",
                    "unknown": "7",
                },
            )
        ],
    ),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), GOOD)
def test_a_format_is_read_whole_and_in_pieces(name: str, text: str, content: str, calls: Any) -> None:
    found = both(of(name), text)
    assert (found.content, found.parsed) == (content, calls)


@pytest.mark.parametrize("name", TOOL_PARSERS)
@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "",
        " \n white \n",
        "a < b and <tool is no tag, nor is [TOOL",
        'The answer is {"a": 1}.',
        "two\n\nparagraphs\n",
        '{"answer": {"name": "f", "parameters": {}}}',
        '{"name": "Ada", "age": 36}',
        "[1, 2]",
        "{not json}",
    ],
)
def test_text_without_a_call_stays_as_it_is(name: str, text: str) -> None:
    found = both(of(name), text)
    assert (found.content, found.calls) == (text, [])


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_arguments_stream_before_they_are_whole(name: str) -> None:
    text = next(text for parser, text, _, calls in GOOD if parser == name and calls == ONE)
    parser, before_end = of(name)(), Read()
    for letter in text[: text.index("Paris") + 3]:
        before_end.add(parser.feed(letter))
    assert before_end.calls == [["get_weather", before_end.calls[0][1]]]
    assert before_end.calls[0][1].endswith("Pa") or before_end.calls[0][1].endswith("Par")


MISTAKES: list[tuple[str, str, str, list[list[str]]]] = [
    ("hermes", "<tool_call>no json</tool_call> after", "no json after", []),
    ("hermes", '<tool_call>{"name": 5}</tool_call>', '{"name": 5}', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}}</tool_call>', "", [["f", "{}"]]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}</tool_call>', "", [["f", "{}"]]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> so', "so", [["f", '{"a": 1']]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {}}\n<tool_call>{"name": "g", "arguments": {}}',
        "",
        [["f", "{}"], ["g", "{}"]],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call></tool_call>', "", [["f", "{}"]]),
    ("hermes", 'a <tool_call>{"name": "f"}</tool_call> b', "a  b", [["f", "{}"]]),
    ("mistral", "[TOOL_CALLS][TOOL_CALLS]f{}", "", [["f", "{}"]]),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}] and more', "", [["f", "{}"]]),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=city>Paris</function></tool_call>",
        "",
        [["f", '{"city": "Paris"}']],
    ),
    (
        "qwen3_coder",
        "<function=f><parameter=city>\nParis\n<parameter=days>\n3",
        "",
        [["f", '{"city": "Paris", "days": 3}']],
    ),
    (
        "qwen3_coder",
        "<function=f><parameter=days>three</parameter></function>",
        "",
        [["f", '{"days": "three"}']],
    ),
    ("llama3_json", '{"name": "f", "parameters": {}} then text', "then text", [["f", "{}"]]),
    (
        "qwen3_coder",
        "<function=f><parameter=city>a</parameter><parameter=days>1</parameter><parameter=city>b</parameter>"
        "<parameter=days>x</parameter><parameter=metric>true</parameter></function>"
        "<function=f><parameter=city>c\n<parameter=city>d",
        "",
        [["f", '{"city": "a", "days": 1, "metric": true}'], ["f", '{"city": "c"}']],
    ),
    ("qwen3_coder", "<function=f><parameter=tags>[NaN]", "", [["f", '{"tags": "[NaN]"}']]),
    # Halves of surrogate pairs, alone and together.
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', "", [["\ufffd", "{}"]]),
    ("hermes", '<tool_call>{"name": "\\ud83d\\ude00"}</tool_call>', "", [["\U0001f600", "{}"]]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\ud83d\\"}"}</tool_call>',
        "",
        [["f", '{"a": "\ufffd"}']],
    ),
    (
        "qwen3_coder",
        '<function=f><parameter=tags>["\\ud83d", "\\ud83d\\ud83d\\ude00\\ude00"]</parameter></function>',
        "",
        [["f", '{"tags": ["\ufffd", "\ufffd\U0001f600\ufffd"]}']],
    ),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), MISTAKES)
def test_mistakes_of_models_leak_no_markup(name: str, text: str, content: str, calls: Any) -> None:
    found = both(of(name), text)
    assert (found.content, found.calls) == (content, calls)


@pytest.mark.parametrize("depth", [MAX_DEPTH, 900, 3000])
def test_what_is_nested_too_deep_is_read_as_broken_json_is(depth: int) -> None:
    deep = "[" * depth + "]" * depth
    call = both(of("hermes"), f'<tool_call>{{"name": "f", "arguments": {deep}}}</tool_call>')
    assert (call.content, call.calls) == ("", [["f", deep]])
    key = both(of("hermes"), f"<tool_call>{{{deep}: 1}}</tool_call>")
    assert (key.content, key.calls) == (f"{{{deep}: 1}}", [])
    bare = both(of("llama3_json"), f'{{"name": "f", "parameters": {deep}}}')
    assert (bare.content, bare.calls) == ("", [["f", deep]])
    for value in (deep, deep[:depth]):
        coder = both(of("qwen3_coder"), f"<function=f><parameter=tags>{value}</parameter></function>")
        assert (coder.content, coder.parsed) == ("", [("f", {"tags": value})])


def test_what_is_nested_as_deep_as_may_be_is_no_text() -> None:
    deep = "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1)
    found = both(of("qwen3_coder"), f"<function=f><parameter=tags>{deep}</parameter></function>")
    assert found.calls == [["f", f'{{"tags": {deep}}}']]


@pytest.mark.parametrize(("name", "text", "content", "calls"), GOOD)
def test_an_answer_that_is_cut_anywhere_gives_a_beginning_of_what_it_would_have(
    name: str, text: str, content: str, calls: Any
) -> None:
    whole = both(of(name), text)
    for end in range(len(text)):
        part = both(of(name), text[:end], cut=True)
        assert len(part.calls) <= len(whole.calls)
        for mine, theirs in zip(part.calls, whole.calls, strict=False):
            assert mine[0] == theirs[0] and theirs[1].startswith(mine[1])
        if part.calls:
            assert part.content == content
        assert not any(tag in part.content for tag in MARKUP)


PARTS = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "<|python_tag|>",
        "<function=f>",
        "</function>",
        "<parameter=city>",
        "<parameter=days>",
        "</parameter>",
        '{"name": "f", "arguments": {"a": "b"}}',
        "{",
        "}",
        "[",
        "]",
        '"',
        "\\",
        ",",
        "; ",
        "\n",
        " ",
        "f",
        '{"name": ',
        '"f"',
        '"parameters": ',
        "3",
        "text",
        "<",
        "<tool",
    ]
)


@pytest.mark.parametrize("name", TOOL_PARSERS)
@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(PARTS, max_size=14), st.booleans(), st.data())
def test_pieces_of_any_size_say_the_same(name: str, parts: list[str], cut: bool, data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = both(of(name), text, cut)
    assert read(of(name)(), pieces, cut) == whole
    own = {
        "hermes": MARKUP[:2],
        "mistral": MARKUP[2:3],
        "llama3_json": MARKUP[3:4],
        "qwen3_coder": MARKUP[:2],
    }
    assert not any(tag in whole.content for tag in own[name]), whole.content


def test_forced_calls_are_read_as_grammar_writes_them() -> None:
    text = '[{"name": "f", "parameters": {"a": [1, {"b": "]"}]}}, {"name": "g", "parameters": {}}]'
    assert both(ForcedListParser, text).parsed == [("f", {"a": [1, {"b": "]"}]}), ("g", {})]
    named = both(lambda: ForcedCallParser("f"), ' {"a": 1}')
    assert named.calls == [["f", '{"a": 1}']] and named.content == ""


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("3", {"integer"}, 3),
        ("3.0", {"integer"}, 3),
        ("3.5", {"integer"}, "3.5"),
        ("3", {"number"}, 3),
        ("3", {"string", "integer"}, 3),
        ("False", {"boolean"}, False),
        ("yes", {"boolean"}, "yes"),
        ("None", {"string", "null"}, None),
        ("nothing", {"string", "null"}, "nothing"),
        ('{"a": 1}', {"object"}, {"a": 1}),
        ("[1", {"array"}, "[1"),
        ("1e999", {"integer"}, "1e999"),
        ("1e999", {"number"}, "1e999"),
        ("NaN", {"number"}, "NaN"),
        ("-Infinity", {"number"}, "-Infinity"),
        ('{"a": [-1e999]}', {"object"}, '{"a": [-1e999]}'),
        ('"\\ud800"', {"string", "null"}, "\ufffd"),
    ],
)
def test_values_get_the_type_that_their_schema_allows(text: str, types: set[str], value: Any) -> None:
    assert json.loads(convert(text, frozenset(types))) == value
