"""Streams that end early, late or badly; and the keys, counters and health that watch over them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any

import pytest
from conftest import render
from live import Live, serve
from openai import APIError, AsyncOpenAI, OpenAI
from scripted import ByteTokenizer, ScriptedEngine
from waiting import wait_for

from slipstream.contracts.errors import EngineDeadError
from slipstream.server.app import build_app
from slipstream.server.options import ServerOptions
from slipstream.server.streams import merge

HI: list[Any] = [{"role": "user", "content": "hi"}]
PATHS = {"/v1/completions": {"prompt": "hi"}, "/v1/chat/completions": {"messages": HI}}
BOTH = pytest.mark.parametrize("path", PATHS)


@contextmanager
def over(engine: ScriptedEngine, **options: Any) -> Iterator[Live]:
    app = build_app(
        engine, "scripted", tokenizer=ByteTokenizer(), render=render, options=ServerOptions(**options)
    )
    with serve(app) as live:
        yield live


@BOTH
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(path: str, stream: bool) -> None:
    engine = ScriptedEngine(reply="x" * 200, delay=0.05)
    body = PATHS[path] | {"stream": stream, "max_tokens": 150, "n": 2}
    with over(engine) as live:
        connection = HTTPConnection(live.url.removeprefix("http://"), timeout=60)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        assert wait_for(lambda: engine.running)
        if stream:
            answer = connection.getresponse()
            assert answer.status == 200 and all(answer.readline() for _ in range(6))
            answer.close()
        connection.close()
        assert wait_for(lambda: not engine.running), "the request still runs"
        assert len(engine.aborted) == 1
        assert wait_for(lambda: live.metric("request_success_total") == 1)
        assert live.metric("num_requests_running") == 0


@BOTH
def test_hundreds_of_dropped_streams_leave_nothing_behind(path: str) -> None:
    """Row 45."""
    engine = ScriptedEngine(reply="x" * 200, delay=0.005)
    body = PATHS[path] | {"stream": True, "max_tokens": 150}

    def drop(live: Live) -> None:
        with live.http.stream("POST", path, json=body) as answer:
            lines = (line for line in answer.iter_lines() if line)
            for _ in range(3):
                next(lines)

    with over(engine) as live, ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda _: drop(live), range(100)))
        assert wait_for(lambda: not engine.running)
        assert len(engine.aborted) == 100
        assert live.metric("num_requests_running") == 0
        engine.delay = 0.0
        assert live.raw_json(path, PATHS[path])["choices"][0]["finish_reason"]


@BOTH
def test_an_engine_error_before_the_first_token_is_a_500_of_that_request_alone(path: str) -> None:
    engine = ScriptedEngine(fail_after=0)
    with over(engine) as live:
        answer = live.http.post(path, json=PATHS[path] | {"stream": True})
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "row 3: no token was left to choose"
        assert live.raw_json(path, PATHS[path])["choices"][0]["finish_reason"]


@BOTH
def test_an_engine_error_in_a_stream_is_an_event_and_then_done(path: str) -> None:
    engine = ScriptedEngine(fail_after=3)
    with over(engine) as live:
        events = live.events(path, PATHS[path] | {"stream": True})
        assert events[-1]["error"]["type"] == "internal_server_error"
        assert "no token was left" in events[-1]["error"]["message"]
        assert sum(bool(event.get("choices")) for event in events) == (3 if path == "/v1/completions" else 4)
        assert live.metric("request_success_total") == 1
        with pytest.raises(APIError, match="no token was left"):
            engine.fail_after = 3
            list(live.openai.chat.completions.create(model="scripted", messages=HI, stream=True))


def test_the_text_of_an_unforeseen_error_stays_in_the_log() -> None:
    engine = ScriptedEngine()

    def broken(*_: Any, **__: Any) -> Any:
        raise KeyError("secret path")

    engine.generate = broken  # type: ignore[method-assign]
    with over(engine) as live:
        answer = live.http.post("/v1/completions", json={"prompt": "hi"})
        assert answer.status_code == 500 and "secret" not in answer.text
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_health_tells_a_dead_engine() -> None:
    engine = ScriptedEngine()
    with over(engine) as live:
        answer = live.http.get("/health")
        assert (answer.status_code, answer.json()["status"], answer.json()["reason"]) == (200, "ready", "")
        engine.errored = True
        answer = live.http.get("/health")
        assert (answer.status_code, answer.json()["live"], answer.json()["reason"]) == (503, False, "gone")


def test_a_dead_engine_is_a_503() -> None:
    engine = ScriptedEngine()

    def dead(*_: Any, **__: Any) -> Any:
        raise EngineDeadError("the engine process ended")

    engine.generate = dead  # type: ignore[method-assign]
    with over(engine) as live:
        assert live.http.post("/v1/completions", json={"prompt": "hi"}).status_code == 503


def test_64_streams_at_once_all_end_with_a_reason() -> None:
    """Row 37, without its grammar and drafts."""
    engine = ScriptedEngine(reply="y" * 40, delay=0.002)

    async def run(url: str) -> list[tuple[str, str | None]]:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

            async def one() -> tuple[str, str | None]:
                text, reason = "", None
                stream = await client.chat.completions.create(model="scripted", messages=HI, stream=True)
                async for chunk in stream:
                    text += chunk.choices[0].delta.content or ""
                    reason = chunk.choices[0].finish_reason
                return text, reason

            return await asyncio.gather(*(one() for _ in range(64)))

    with over(engine) as live:
        assert asyncio.run(run(live.url)) == [("y" * 40, "stop")] * 64


def test_two_live_requests_may_choose_one_id() -> None:
    """Row 21: by the body, by the header, and by both."""
    engine = ScriptedEngine(reply="z" * 20, delay=0.01)
    asks = [
        ({"request_id": "same"}, {}),
        ({}, {"X-Request-Id": "same"}),
        ({"request_id": "same"}, {"X-Request-Id": "x"}),
    ]

    def ask(live: Live, number: int) -> Any:
        body, headers = asks[number % 3]
        prompt = chr(ord("a") + number)
        return live.http.post(
            "/v1/completions",
            json={"prompt": prompt, "echo": True, "max_tokens": 20, **body},
            headers=headers,
        ).json()

    with over(engine) as live, ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda number: ask(live, number), range(6)))
        assert {answer["id"] for answer in answers} == {"cmpl-same"}
        assert [answer["choices"][0]["text"] for answer in answers] == [c + "z" * 20 for c in "abcdef"]
        assert live.metric("request_success_total") == 6 and live.metric("num_requests_running") == 0


@pytest.mark.parametrize("header", ["Bearer wrong", "Bearer", "Basic one", "one", "", "Bearer one two"])
def test_a_wrong_key_is_a_401_everywhere_but_on_the_watchers_paths(header: str) -> None:
    with over(ScriptedEngine(), api_keys=["one", "two"]) as live:
        headers = {"Authorization": header} if header else {}
        for method, path in (
            ("POST", "/v1/completions"),
            ("GET", "/v1/models"),
            ("POST", "/tokenize"),
            ("GET", "/x"),
        ):
            answer = live.http.request(method, path, headers=headers, json={})
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
        for path in ("/health", "/version", "/metrics"):
            assert live.http.get(path, headers=headers).status_code == 200


def test_any_of_several_keys_opens() -> None:
    with over(ScriptedEngine(), api_keys=["one", "two"]) as live:
        for key in ("one", "two"):
            with OpenAI(base_url=f"{live.url}/v1", api_key=key, max_retries=0) as client:
                assert client.completions.create(model="scripted", prompt="hi").choices[0].text


def test_metrics_count_tokens_and_reasons() -> None:
    with over(ScriptedEngine(reply="abcd")) as live:
        live.raw_json("/v1/completions", {"prompt": "hey", "max_tokens": 2})
        live.raw_json("/v1/completions", {"prompt": ["hey", "you"], "n": 2})
        live.events("/v1/chat/completions", {"messages": HI, "stream": True})
        text = live.http.get("/metrics").text
        chat = len("<user>hi<assistant>")
        assert live.metric("prompt_tokens_total") == 3 + 6 + chat
        assert live.metric("generation_tokens_total") == 2 + 2 * 9 + 4
        labels = 'engine="0",finished_reason="%s",model_name="scripted"'
        assert f"vllm:request_success_total{{{labels % 'length'}}} 1.0" in text
        assert f"vllm:request_success_total{{{labels % 'stop'}}} 5.0" in text
        for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_prompt_tokens"):
            assert live.metric(f"{name}_count") == 4, name
        assert live.metric("inter_token_latency_seconds_count") == 3
        assert live.metric("kv_blocks_free") == live.metric("kv_blocks_total")


def test_merged_iterators_are_closed_when_one_fails() -> None:
    closed: list[int] = []

    async def count(index: int, fail: bool) -> Any:
        try:
            for number in range(100):
                await asyncio.sleep(0)
                if fail and number == 3:
                    raise ValueError("three")
                yield number
        finally:
            closed.append(index)

    async def run() -> list[tuple[int, int]]:
        seen: list[tuple[int, int]] = []
        with pytest.raises(ValueError, match="three"):
            async for item in merge([count(0, False), count(1, True), count(2, False)]):
                seen.append(item)  # noqa: PERF401 (the items before the error count)
        return seen

    seen = asyncio.run(run())
    assert sorted(closed) == [0, 1, 2]
    assert [number for index, number in seen if index == 1] == [0, 1, 2]


def test_events_are_framed_as_server_sent_events() -> None:
    with over(ScriptedEngine()) as live:
        answer = live.http.post("/v1/completions", json={"prompt": "hi", "stream": True})
        assert answer.headers["content-type"].startswith("text/event-stream")
        *events, end = answer.text.split("\n\n")
        assert end == "" and events[-1] == "data: [DONE]"
        assert all(event.startswith("data: {") and json.loads(event[6:]) for event in events[:-1])


def test_shutting_down_the_app_shuts_down_the_engine() -> None:
    engine = ScriptedEngine()
    before = threading.active_count()
    with over(engine):
        assert not engine.errored
    assert engine.errored and threading.active_count() <= before
