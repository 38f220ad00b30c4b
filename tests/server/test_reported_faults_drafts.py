"""Inputs that broke other engines with speculation on, through HTTP on the real engine with n-gram drafts.
Numbers are rows of the list of reported faults."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from live import Live
from real import real_server
from schemas import record
from text_model import BYTE_ZERO, ids_of, make_text_model

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
PROMPT = "again and again and again and again"
PATHS: dict[str, Any] = {
    "/v1/completions": {"prompt": PROMPT, "logprobs": 3},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": PROMPT}], "logprobs": True, "top_logprobs": 3},
}  # fmt: skip
BOTH = pytest.mark.parametrize("path", PATHS)
SMALL = record(name={"type": "string", "maxLength": 4}, n={"type": "integer", "minimum": 0, "maximum": 99})
LEAD = {str(BYTE_ZERO + ord(char)): bias for char, bias in zip('"}],', (7, 8, 8, 6), strict=True)}


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return make_text_model(tiny_model)


@pytest.fixture(scope="module")
def drafting(model: Path) -> Iterator[Live]:
    with real_server(model, speculative_config=NGRAM, num_gpu_blocks_override=400) as live:
        yield live


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[Live]:
    with real_server(model) as live:
        yield live


def said(answer: Any) -> tuple[str, list[float]]:
    """Text and logprobs of the first choice."""
    choice = answer["choices"][0]
    if "text" in choice:
        return choice["text"], choice["logprobs"]["token_logprobs"]
    return choice["message"]["content"], [one["logprob"] for one in choice["logprobs"]["content"]]


@BOTH
@pytest.mark.parametrize("temperature", [0, 1])
def test_logprobs_are_those_of_plain_decoding(
    drafting: Live, plain: Live, path: str, temperature: float
) -> None:
    """Row 29."""
    ask = PATHS[path] | {"temperature": temperature, "seed": 4, "max_tokens": 60, "min_tokens": 60}
    ask["allowed_token_ids"] = ids_of("ab")  # so that there is much to draft
    (text, ours), (expected, theirs) = (said(live.raw_json(path, ask)) for live in (drafting, plain))
    assert text == expected and ours == pytest.approx(theirs, abs=2e-4)
    assert max(ours) < 0.0 and len(ours) == 60
    assert drafting.metric("spec_decode_num_draft_tokens_total") > 0


@BOTH
def test_a_seed_repeats_alone_and_in_a_batch(drafting: Live, plain: Live, path: str) -> None:
    """Row 39."""
    ask = PATHS[path] | {"seed": 11, "temperature": 1.3, "max_tokens": 40}
    alone = [said(drafting.raw_json(path, ask))[0] for _ in range(5)]
    assert alone == [said(plain.raw_json(path, ask))[0]] * 5
    asks = [ask if number % 2 else ask | {"seed": number} for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        batch = [said(one)[0] for one in pool.map(lambda each: drafting.raw_json(path, each), asks)]
    assert batch[1::2] == alone[:4] and len(set(batch[::2])) == 4


def test_200_streams_with_a_schema_all_end(drafting: Live) -> None:
    """Row 37: every stream has a reason to end, and whole answers are of the schema."""
    form = {"type": "json_schema", "json_schema": {"name": "small", "schema": SMALL}}

    def ask(number: int) -> tuple[str, str]:
        path = list(PATHS)[number % 2]
        body = {**PATHS[path], "logit_bias": LEAD, "response_format": form, "seed": number, "stream": True}
        body["max_tokens"] = 9 if number % 5 == 0 else 100
        choices = [choice for event in drafting.events(path, body) for choice in event["choices"]]
        reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        assert len(reasons) == 1 and choices[-1]["finish_reason"] == reasons[0], choices[-1]
        pieces = [one["text"] if "text" in one else one["delta"].get("content", "") for one in choices]
        return reasons[0], "".join(pieces)

    with ThreadPoolExecutor(40) as pool:
        ended = list(pool.map(ask, range(200)))
    whole = [text for reason, text in ended if reason == "stop"]
    assert {reason for reason, _ in ended} == {"stop", "length"} and len(whole) > 100
    for text in whole:
        jsonschema.validate(json.loads(text), SMALL)
