"""Inputs that broke other engines, through HTTP on the real engine. Numbers are rows of the list of reported
faults."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from live import Live
from openai import AsyncOpenAI
from real import real_server
from text_model import VOCAB, ids_of, make_text_model
from waiting import wait_for

PROMPT = "Monday, Tuesday,"
GREEDY = {"prompt": PROMPT, "temperature": 0, "max_tokens": 24}
CHAT = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "max_tokens": 24}
PATHS = {"/v1/completions": GREEDY, "/v1/chat/completions": CHAT}
BOTH = pytest.mark.parametrize("path", PATHS)
STREAMS = pytest.mark.parametrize("stream", [False, True])


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return make_text_model(tiny_model)


@pytest.fixture(scope="module")
def real(model: Path) -> Iterator[Live]:
    with real_server(model) as live:
        yield live


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "real" in request.fixturenames:
        live: Live = request.getfixturevalue("real")
        assert wait_for(lambda: live.metric("num_requests_running") == 0)
        assert wait_for(lambda: live.metric("kv_blocks_free") == live.metric("kv_blocks_total"))
        assert live.raw_json("/v1/completions", GREEDY)["usage"]["completion_tokens"] >= 1


def joined(live: Live, path: str, body: Any) -> tuple[dict[int, str], list[Any]]:
    """Text of each choice of a stream, and its events."""
    events = live.events(path, body | {"stream": True})
    text: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            piece = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            text[choice["index"]] = text.get(choice["index"], "") + piece
    return text, events


def whole(live: Live, path: str, body: Any) -> dict[int, str]:
    choices = live.raw_json(path, body)["choices"]
    return {c["index"]: c["text"] if "text" in c else c["message"]["content"] for c in choices}


@BOTH
@STREAMS
def test_a_bad_neighbour_is_refused_and_leaves_a_batch_alone(real: Live, path: str, stream: bool) -> None:
    """Rows 1 and 5."""
    alone = whole(real, path, PATHS[path])
    bad = [
        {"stop_token_ids": [VOCAB + 7], "min_tokens": 2},
        {"logit_bias": {str(VOCAB + 50): 1}},
        {"allowed_token_ids": [VOCAB]},
        {"stop_token_ids": [-1]},
    ]

    def ask(number: int) -> Any:
        extra = bad[number // 2 % 4] if number % 2 else {}
        return real.http.post(path, json=PATHS[path] | {"stream": stream and bool(extra)} | extra)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(16)))
    assert [answer.status_code for answer in answers] == [200, 400] * 8
    for answer in answers[::2]:
        choice = answer.json()["choices"][0]
        assert {0: choice["text"] if "text" in choice else choice["message"]["content"]} == alone


@BOTH
@STREAMS
@pytest.mark.parametrize("temperature", [0, 1])
def test_an_allowed_token_that_is_banned_is_refused(
    real: Live, path: str, stream: bool, temperature: float
) -> None:
    """Row 15."""
    extra = {
        "allowed_token_ids": ids_of("A"),
        "bad_words": ["A"],
        "temperature": temperature,
        "stream": stream,
    }
    assert "no token could be chosen" in real.refused(path, PATHS[path] | extra, "allowed_token_ids")


def test_allowed_tokens_are_the_only_ones_that_come(real: Live) -> None:
    """Row 15, where one token is left."""
    extra = {
        "allowed_token_ids": ids_of("AB"),
        "bad_words": ["A"],
        "return_token_ids": True,
        "temperature": 2.0,
    }
    choice = real.raw_json("/v1/completions", GREEDY | extra)["choices"][0]
    assert set(choice["token_ids"]) == set(ids_of("B")) and choice["text"] == "B" * 24


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["a", ""], [[5], []]])
@STREAMS
def test_empty_prompts_are_refused_without_a_start_token(real: Live, prompt: Any, stream: bool) -> None:
    """Row 17."""
    real.refused("/v1/completions", {"prompt": prompt, "stream": stream}, "prompt")


def test_an_empty_text_starts_from_the_start_token_where_there_is_one(
    tiny_model: Callable[..., Path],
) -> None:
    """Row 17."""
    with real_server(make_text_model(tiny_model, adds_start=True)) as live:
        ask = {"prompt": "", "max_tokens": 4, "temperature": 0, "return_token_ids": True}
        answer = live.raw_json("/v1/completions", ask)
        assert answer["choices"][0]["prompt_token_ids"] == [1] and answer["usage"]["prompt_tokens"] == 1
        by_ids = live.raw_json("/v1/completions", ask | {"prompt": [1]})
        assert by_ids["choices"][0]["token_ids"] == answer["choices"][0]["token_ids"]
        live.refused("/v1/completions", ask | {"add_special_tokens": False}, "prompt")
        live.refused("/v1/completions", ask | {"prompt": [[]]}, "prompt")


@STREAMS
def test_a_prompt_can_be_scored_without_generating(real: Live, model: Path, stream: bool) -> None:
    """Row 19."""
    ask = GREEDY | {"echo": True, "logprobs": 1, "max_tokens": 0, "stream": stream}
    usage = {"stream_options": {"include_usage": True}} if stream else {}
    answers = (
        real.events("/v1/completions", ask | usage) if stream else [real.raw_json("/v1/completions", ask)]
    )
    choice = answers[0]["choices"][0]
    assert choice["text"] == PROMPT and answers[-1]["usage"]["completion_tokens"] == 0
    expected = reference(model, ids_of(PROMPT))
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(expected, abs=1e-4)


@STREAMS
@pytest.mark.parametrize("n", [1, 2])
def test_echo_with_logprobs_has_an_entry_for_every_token(
    real: Live, model: Path, stream: bool, n: int
) -> None:
    """Row 27; the values are transformers'."""
    ask = GREEDY | {
        "prompt": "five words of a prompt",
        "echo": True,
        "logprobs": 3,
        "max_tokens": 2,
        "n": n,
        "return_token_ids": True,
        "stream": stream,
    }
    answers = real.events("/v1/completions", ask) if stream else [real.raw_json("/v1/completions", ask)]
    for index in range(n):
        pieces = [choice for answer in answers for choice in answer["choices"] if choice["index"] == index]
        token_ids = pieces[0]["prompt_token_ids"] + [
            token for piece in pieces for token in piece["token_ids"]
        ]
        scores = [score for piece in pieces for score in piece["logprobs"]["token_logprobs"]]
        tops = [top for piece in pieces for top in piece["logprobs"]["top_logprobs"]]
        assert len(scores) == len(tops) == len(ask["prompt"]) + 2
        assert scores[0] is None and tops[0] is None
        assert scores[1:] == pytest.approx(reference(model, token_ids), abs=1e-4)
        assert all(1 <= len(top) <= 4 for top in tops[1:])


def reference(model: Path, token_ids: list[int]) -> list[float]:
    """transformers' log-probability of each token but the first."""
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        scores = net(torch.tensor([token_ids])).logits[0, :-1].log_softmax(-1)
    return [float(scores[at, token]) for at, token in enumerate(token_ids[1:])]


def test_requests_that_choose_one_id_are_served_apart(real: Live) -> None:
    """Row 21."""
    prompts = [f"prompt number {number}" for number in range(8)]
    alone = [whole(real, "/v1/completions", GREEDY | {"prompt": prompt}) for prompt in prompts]

    def ask(number: int) -> Any:
        body = GREEDY | {"prompt": prompts[number]} | ({"request_id": "same"} if number % 2 else {})
        return real.http.post("/v1/completions", json=body, headers={"X-Request-Id": "same"}).json()

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))
    assert {answer["id"] for answer in answers} == {"cmpl-same"}
    assert [{0: answer["choices"][0]["text"]} for answer in answers] == alone


def test_a_prompt_that_can_never_fit_is_refused_and_short_ones_are_served(
    tiny_model: Callable[..., Path],
) -> None:
    """Row 23."""
    model = make_text_model(tiny_model, max_position_embeddings=1024)
    with real_server(model, max_model_len=1024, num_gpu_blocks_override=21) as live:
        for stream in (False, True):
            ask = {"prompt": "x" * 600, "max_tokens": 1, "stream": stream}
            message = live.refused("/v1/completions", ask, "prompt")
            assert "needs 38 KV blocks" in message and "has 20" in message
            short = live.raw_json("/v1/completions", {"prompt": "x" * 200, "max_tokens": 4})
            assert short["usage"]["prompt_tokens"] == 200


@BOTH
def test_nothing_of_a_stop_string_is_ever_streamed(real: Live, path: str) -> None:
    """Row 31. The stop string is cut from what the model says, at every place and length, with a tail that no
    text has for those which never match."""
    free = whole(real, path, PATHS[path] | {"seed": 1})[0]
    assert len(free) > 12
    for start in range(1, len(free) - 6, 3):
        for length in (1, 2, 5):
            stop = free[start : start + length]
            expected = free[: free.index(stop)]
            body = PATHS[path] | {"stop": [stop, free[start : start + length] + "never"]}
            text, events = joined(real, path, body)
            assert text[0] == whole(real, path, body)[0] == expected
            last = [choice for event in events for choice in event["choices"]][-1]
            assert last["finish_reason"] == "stop" and last["stop_reason"] == stop
    never = PATHS[path] | {"stop": [free[:6] + "never", free[-1] + "never"]}
    assert joined(real, path, never)[0][0] == free


@BOTH
def test_a_stop_string_can_be_kept(real: Live, path: str) -> None:
    free = whole(real, path, PATHS[path])[0]
    stop = free[5:8]
    body = PATHS[path] | {"stop": stop, "include_stop_str_in_output": True}
    expected = free[: free.index(stop) + len(stop)]
    assert joined(real, path, body)[0][0] == whole(real, path, body)[0] == expected


@BOTH
@pytest.mark.parametrize(
    "extra", [{}, {"n": 2}, {"stop": ["\u00e9"]}, {"n": 2, "stop": ["\U0001f600", "\u0e01\u0e02"]}]
)
def test_streamed_text_equals_whole_text_byte_for_byte(real: Live, path: str, extra: Any) -> None:
    """Row 33: outputs are random bytes, so characters are split, whole and broken."""
    for seed in range(6):
        body = PATHS[path] | {"seed": seed, "temperature": 1.0, "max_tokens": 60, "min_tokens": 60, **extra}
        assert joined(real, path, body)[0] == whole(real, path, body)


def test_characters_that_are_forced_byte_by_byte_come_whole(real: Live) -> None:
    """Row 33: logit_bias leaves only the bytes of one emoji, in whatever order the model says them."""
    ids = ids_of("\U0001f600")
    body = GREEDY | {
        "allowed_token_ids": ids,
        "max_tokens": 80,
        "temperature": 3.0,
        "seed": 2,
        "return_token_ids": True,
    }
    text, events = joined(real, "/v1/completions", body)
    said = [token for event in events for choice in event["choices"] for token in choice["token_ids"]]
    assert text[0] == bytes(token - 3 for token in said).decode("utf-8", "replace")


@BOTH
def test_a_seed_repeats_alone_and_in_a_batch(real: Live, path: str) -> None:
    """Row 39, without drafts."""
    body = PATHS[path] | {"seed": 11, "temperature": 1.3}
    alone = [whole(real, path, body) for _ in range(5)]
    with ThreadPoolExecutor(8) as pool:
        others = [body, body | {"seed": 12}, body | {"seed": None}]
        batch = list(pool.map(lambda number: whole(real, path, others[number % 3]), range(9)))
    assert alone == [alone[0]] * 5
    assert batch[::3] == [alone[0]] * 3 and alone[0] not in batch[1::3]


@BOTH
@pytest.mark.parametrize("seed", [None, 7, 0, -1])
def test_samples_of_one_request_differ_and_repeat_with_their_seed(
    real: Live, path: str, seed: int | None
) -> None:
    """Row 41."""
    body = PATHS[path] | {"n": 8, "temperature": 1.0, "seed": seed}
    first, second = whole(real, path, body), whole(real, path, body)
    assert len(set(first.values())) == 8
    assert (first == second) == (seed is not None)


def test_long_prompts_beside_running_decodes_change_no_text(tiny_model: Callable[..., Path]) -> None:
    """Row 43."""
    model = make_text_model(tiny_model, max_position_embeddings=4096)
    sizes = {"max_model_len": 4096, "num_gpu_blocks_override": 2049, "max_num_batched_tokens": 256}

    def ask(live: Live, number: int) -> str:
        if number >= 8:
            time.sleep(0.2)
        prompt = f"{number}: " + "word " * (20 if number < 8 else 600)
        return whole(
            live, "/v1/completions", {"prompt": prompt, "max_tokens": 60 if number < 8 else 8, "seed": number}
        )[0]

    texts = []
    for async_scheduling in (True, False):
        with (
            real_server(model, async_scheduling=async_scheduling, **sizes) as live,
            ThreadPoolExecutor(12) as pool,
        ):
            texts.append(list(pool.map(lambda number, live=live: ask(live, number), range(12))))
    assert texts[0] == texts[1] and all(texts[0])


def test_500_dropped_streams_leave_no_row_and_no_block(real: Live) -> None:
    """Row 45."""

    async def drop(client: AsyncOpenAI, number: int, gate: asyncio.Semaphore) -> None:
        body: Any = {"model": "real", "max_tokens": 220, "stream": True, "extra_body": {"min_tokens": 220}}
        async with gate:
            if number % 2:
                stream = await client.completions.create(prompt=f"{number} goes", **body)
            else:
                stream = await client.chat.completions.create(
                    messages=[{"role": "user", "content": f"{number}"}], **body
                )
            async with stream:
                for _ in range(3):
                    await anext(aiter(stream), None)  # a late reader gets many tokens in one chunk

    async def run() -> None:
        async with AsyncOpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0) as client:
            gate = asyncio.Semaphore(24)
            await asyncio.gather(*(drop(client, number, gate) for number in range(500)))

    before, aborted = real.metric("request_success_total"), real.metric("request_success_total", "abort")
    asyncio.run(run())
    assert wait_for(lambda: real.metric("request_success_total") == before + 500)
    assert real.metric("request_success_total", "abort") > aborted + 400, "too few were dropped in time"
    assert wait_for(lambda: real.metric("num_requests_running") == 0)
    assert real.metric("num_requests_waiting") == 0
    assert wait_for(lambda: real.metric("kv_blocks_free") == real.metric("kv_blocks_total"))
    real.raw_json("/v1/completions", GREEDY)


def test_64_streams_at_once_all_finish(real: Live) -> None:
    async def run() -> list[str | None]:
        async with AsyncOpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0) as client:

            async def one(number: int) -> str | None:
                messages: Any = [{"role": "user", "content": f"{number} times"}]
                stream = await client.chat.completions.create(
                    model="real", messages=messages, stream=True, max_tokens=20
                )
                return [chunk.choices[0].finish_reason async for chunk in stream][-1]

            return await asyncio.gather(*(one(number) for number in range(64)))

    assert set(asyncio.run(run())) <= {"stop", "length"}


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_a_prompt_of_whole_blocks_that_is_all_cached_is_answered_again(real: Live, blocks: int) -> None:
    """Row 47."""
    prompt = f"{blocks}" * (16 * blocks)
    first, second = (real.raw_json("/v1/completions", GREEDY | {"prompt": prompt}) for _ in range(2))
    assert second["choices"][0]["text"] == first["choices"][0]["text"]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == 16 * (blocks - 1) or 16 * (blocks - 1) < cached < 16 * blocks


def test_a_salt_keeps_prefixes_apart(real: Live) -> None:
    ask = GREEDY | {"prompt": "salted " * 10}

    def cached(salt: str) -> int:
        usage = real.raw_json("/v1/completions", ask | {"cache_salt": salt})["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached("a") == 0 and cached("a") > 0 and cached("b") == 0


def test_a_template_that_refuses_the_turns_is_a_400(real: Live) -> None:
    body = CHAT | {"messages": [{"role": "tool", "content": "x"}]}
    assert "no tools here" in real.refused("/v1/chat/completions", body, "messages")


def test_a_priority_needs_its_policy(real: Live) -> None:
    real.refused("/v1/completions", GREEDY | {"priority": 1}, "priority")
