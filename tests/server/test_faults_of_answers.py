"""Inputs that broke other engines, where answers are read (tools, thoughts) and on /v1/responses, on the real
engine. Numbers are rows of the list of reported faults."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from live import Live
from openai import AsyncOpenAI
from real import real_server
from text_model import VOCAB, ids_of, make_text_model
from waiting import wait_for

from slipstream.contracts.errors import BadRequest
from slipstream.contracts.structured_outputs import StructuredOutputsParams
from slipstream.server.options import ServerOptions

READ = ServerOptions(tool_call_parser="hermes", enable_auto_tool_choice=True, reasoning_parser="qwen3")
TOOLS = [{"type": "function", "function": {"name": "f"}}]
HI = [{"role": "user", "content": "Monday, Tuesday,"}]
RESPONSES, CHAT = "/v1/responses", "/v1/chat/completions"
PATHS: dict[str, dict[str, Any]] = {
    RESPONSES: {"input": "Monday, Tuesday,", "temperature": 0, "max_output_tokens": 24},
    CHAT: {"messages": HI, "temperature": 0, "max_tokens": 24, "tools": TOOLS},
}
BOTH = pytest.mark.parametrize("path", PATHS)
STREAMS = pytest.mark.parametrize("stream", [False, True])


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return make_text_model(tiny_model, max_position_embeddings=512)


@pytest.fixture(scope="module")
def real(model: Path) -> Iterator[Live]:
    with real_server(model, READ, max_model_len=512) as live:
        yield live


@pytest.fixture(autouse=True)
def nothing_is_left_behind(real: Live) -> Iterator[None]:
    yield
    assert wait_for(lambda: real.metric("num_requests_running") == 0)
    assert wait_for(lambda: real.metric("kv_blocks_free") == real.metric("kv_blocks_total"))


def text_of(answer: Any) -> str:
    if "output" in answer:
        return "".join(part["text"] for item in answer["output"] for part in item["content"])
    return answer["choices"][0]["message"]["content"] or ""


def whole(live: Live, path: str, body: Any) -> str:
    return text_of(live.raw_json(path, body))


def streamed(live: Live, path: str, body: Any) -> tuple[str, list[Any]]:
    """The text of a stream, and its events; each must end as its endpoint ends streams."""
    answer = live.http.post(path, json=body | {"stream": True})
    assert answer.status_code == 200, answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    if path == CHAT:
        assert lines.pop() == "[DONE]"
    events = [json.loads(line) for line in lines]
    if path == CHAT:
        assert events[-1]["choices"][0]["finish_reason"]
        return "".join(event["choices"][0]["delta"].get("content") or "" for event in events), events
    assert events[-1]["type"] in ("response.completed", "response.incomplete")
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert text_of(events[-1]["response"]) == "".join(deltas)
    return "".join(deltas), events


BAD: list[tuple[str, Any]] = [
    ("logit_bias", {str(VOCAB + 50): 1}),
    ("stop_token_ids", [VOCAB + 7]),
    ("stop_token_ids", [-1]),
    ("allowed_token_ids", [VOCAB]),
    ("allowed_token_ids", []),
    ("temperature", -1),
    ("top_p", 0),
    ("min_p", 2),
    ("repetition_penalty", 0),
    ("seed", 2**63),
    ("stop", [""]),
    ("min_tokens", 200),
    ("priority", 1),
]


@BOTH
@STREAMS
def test_bad_values_are_refused_by_name_and_leave_a_batch_alone(real: Live, path: str, stream: bool) -> None:
    """Rows 1, 5, 7."""
    alone = whole(real, path, PATHS[path])

    def ask(number: int) -> Any:
        field, value = BAD[number // 2]
        extra = {field: value, "stream": stream} if number % 2 else {}
        return real.http.post(path, json=PATHS[path] | extra)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(2 * len(BAD))))
    for number, answer in enumerate(answers):
        if number % 2:
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == BAD[number // 2][0]
        else:
            assert text_of(answer.json()) == alone


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@BOTH
def test_numbers_that_are_not_finite_are_refused(real: Live, path: str, number: str) -> None:
    """Row 7: in a field, and in the schema of a tool."""
    body = {key: value for key, value in PATHS[path].items() if key != "temperature"}
    raw = json.dumps(body)[:-1] + f', "temperature": {number}}}'
    assert "finite" in real.refused(path, raw, "temperature")
    function = {"name": "f", "parameters": {"maximum": "HERE"}}
    tool = {"type": "function", "function": function} if path == CHAT else {"type": "function", **function}
    answer = real.raw(path, json.dumps(body | {"tools": [tool]}).replace('"HERE"', number))
    assert answer.status_code == 400 and "finite" in answer.text


@BOTH
@STREAMS
def test_an_allowed_token_that_is_banned_is_refused(real: Live, path: str, stream: bool) -> None:
    """Row 15."""
    extra = {"allowed_token_ids": ids_of("A"), "bad_words": ["A"], "stream": stream}
    real.refused(path, PATHS[path] | extra, "allowed_token_ids")
    only = {"allowed_token_ids": ids_of("AB"), "bad_words": ["A"], "temperature": 2.0}
    assert whole(real, path, PATHS[path] | only) == "B" * 24


@pytest.mark.parametrize(
    "constraint",
    [
        {"json_object": False},
        {"json": ""},
        {"json": " "},
        {"json": 5},
        {"regex": ""},
        {"choice": []},
        {"choice": [1]},
        {"grammar": ""},
        {"structural_tag": ""},
        {},
        {"regex": "a", "json": {}},
    ],
)
def test_degenerate_constraints_are_refused_where_they_are_made(constraint: dict[str, Any]) -> None:
    """Row 9."""
    with pytest.raises(BadRequest, match="structured_outputs"):
        StructuredOutputsParams(**constraint)


@BOTH
@STREAMS
@pytest.mark.parametrize("schema", ["", 5, [], {"type": 5}])
def test_tools_with_a_schema_that_is_none_are_refused_or_served(
    real: Live, path: str, stream: bool, schema: Any
) -> None:
    """Row 9's neighbours: a tool's parameters."""
    function = {"name": "f", "parameters": schema}
    tool = {"type": "function", "function": function} if path == CHAT else {"type": "function", **function}
    answer = real.http.post(path, json=PATHS[path] | {"tools": [tool], "stream": stream})
    assert answer.status_code == (200 if isinstance(schema, dict) else 400), answer.text


@BOTH
def test_requests_that_choose_one_id_are_served_apart(real: Live, path: str) -> None:
    """Row 21."""
    field = "input" if path == RESPONSES else "messages"

    def body(number: int) -> Any:
        text = f"prompt number {number}"
        return PATHS[path] | {field: text if path == RESPONSES else [{"role": "user", "content": text}]}

    alone = [whole(real, path, body(number)) for number in range(6)]
    with ThreadPoolExecutor(6) as pool:
        asks = [body(number) | {"request_id": "same"} for number in range(6)]
        answers = list(pool.map(lambda ask: real.raw_json(path, ask), asks))
    assert len({answer["id"] for answer in answers}) == 1
    assert [text_of(answer) for answer in answers] == alone


@BOTH
def test_nothing_of_a_stop_string_is_ever_streamed(real: Live, path: str) -> None:
    """Row 31."""
    free = whole(real, path, PATHS[path])
    assert len(free) > 12
    for start in range(1, len(free) - 6, 4):
        for length in (1, 3):
            stop = free[start : start + length]
            body = PATHS[path] | {"stop": [stop, stop + "never"]}
            expected = free[: free.index(stop)]
            assert streamed(real, path, body)[0] == whole(real, path, body) == expected


@BOTH
@pytest.mark.parametrize("extra", [{}, {"stop": ["\u00e9", " "]}])
def test_streamed_text_equals_whole_text_byte_for_byte(real: Live, path: str, extra: Any) -> None:
    """Row 33: outputs are random bytes, so characters are split, whole and broken."""
    most = "max_output_tokens" if path == RESPONSES else "max_tokens"
    for seed in range(6):
        body = PATHS[path] | {"seed": seed, "temperature": 1.0, most: 60, "min_tokens": 60, **extra}
        assert streamed(real, path, body)[0] == whole(real, path, body)


@pytest.mark.parametrize("options", [{}, {"include_usage": False}, {"include_usage": None}, None])
def test_usage_of_an_answer_with_tools_comes_only_where_asked(real: Live, options: Any) -> None:
    """Row 35."""
    _, events = streamed(real, CHAT, PATHS[CHAT] | {"stream_options": options})
    assert not any(event.get("usage") for event in events)
    body = PATHS[CHAT] | {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = real.events(CHAT, body)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 24
    assert not any(event.get("usage") for event in chunks)


@BOTH
def test_a_seed_repeats_alone_and_in_a_batch(real: Live, path: str) -> None:
    """Row 39, without drafts."""
    body = PATHS[path] | {"seed": 11, "temperature": 1.3}
    alone = whole(real, path, body)
    with ThreadPoolExecutor(8) as pool:
        others = [body, body | {"seed": 12}]
        batch = list(pool.map(lambda number: whole(real, path, others[number % 2]), range(8)))
    assert batch[::2] == [alone] * 4 and alone not in batch[1::2]


def test_200_streams_at_once_all_end(real: Live) -> None:
    """Row 37, without grammar: half of them responses, half chats with tools."""

    async def run() -> list[str | None]:
        async with AsyncOpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0) as client:

            async def respond(number: int) -> str | None:
                stream = await client.responses.create(
                    model="real", input=f"{number}", stream=True, max_output_tokens=8
                )
                return [event.type async for event in stream][-1]

            async def chat(number: int) -> str | None:
                turns: Any = [{"role": "user", "content": f"{number}"}]
                stream = await client.chat.completions.create(
                    model="real", messages=turns, tools=TOOLS, stream=True, max_tokens=8
                )
                return [chunk.choices[0].finish_reason async for chunk in stream][-1]

            return await asyncio.gather(*((respond, chat)[n % 2](n) for n in range(200)))

    ends = asyncio.run(run())
    assert set(ends[::2]) <= {"response.completed", "response.incomplete"}
    assert set(ends[1::2]) <= {"stop", "length", "tool_calls"}


@BOTH
def test_dropped_streams_leave_no_row_and_no_block(real: Live, path: str) -> None:
    """Row 45."""
    most = "max_output_tokens" if path == RESPONSES else "max_tokens"
    body = PATHS[path] | {most: 200, "min_tokens": 200, "stream": True}

    def drop(_number: int) -> None:
        with real.http.stream("POST", path, json=body) as answer:
            lines = (line for line in answer.iter_lines() if line)
            for _ in range(3):
                next(lines)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(drop, range(100)))
    assert wait_for(lambda: real.metric("num_requests_running") == 0)
