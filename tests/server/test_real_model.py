"""SmolLM2 behind the server: real words, real characters of several bytes, the official client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from live import Live
from real import real_server

from slipstream.text.tokenizer import load_tokenizer

WEEK = "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday. Monday, Tuesday,"
# The model goes on with these, so characters of 2, 3 and 4 bytes are said, not only asked for.
LINES = {
    "emoji": "\U0001f600 \U0001f680 \U0001f40d \U0001f600 \U0001f680 \U0001f40d \U0001f600 \U0001f680",
    "thai": " \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35" * 4,
    "korean": " \uc548\ub155\ud558\uc138\uc694" * 4,
    "greek": " \u0395\u03bb\u03bb\u03ac\u03b4\u03b1" * 4,
}


@pytest.fixture(scope="module")
def smol(demo_model: Any) -> Iterator[Live]:
    with real_server(demo_model.folder, dtype="bfloat16", max_model_len=512) as live:
        yield live


def deltas(live: Live, **ask: Any) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for chunk in live.openai.completions.create(model="real", stream=True, **ask):
        for choice in chunk.choices:
            found.setdefault(choice.index, []).append(choice.text)
    return found


def test_a_stop_string_of_several_tokens_is_never_begun(smol: Live) -> None:
    """Row 31."""
    ask = {"prompt": WEEK, "temperature": 0, "max_tokens": 24}
    free = smol.openai.completions.create(model="real", **ask).choices[0].text  # type: ignore[call-overload]
    assert free.startswith(" Wednesday, Friday, Saturday")  # as transformers says too
    for stop in ("Wednesday, Friday", "Friday, Saturday", ", Sat"):
        text = "".join(deltas(smol, **ask, stop=stop)[0])
        whole = smol.openai.completions.create(model="real", **ask, stop=stop)  # type: ignore[call-overload]
        assert text == whole.choices[0].text == free[: free.index(stop)]
        assert whole.choices[0].finish_reason == "stop" and whole.choices[0].stop_reason == stop
    almost = deltas(smol, **ask, stop="Wednesday, Friday, Sunday")[0]
    assert "".join(almost) == free


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("extra", [{}, {"n": 2, "temperature": 0.5, "seed": 3}, {"stop": "\n"}])
def test_characters_of_several_bytes_come_whole(
    smol: Live, demo_model: Any, name: str, extra: dict[str, Any]
) -> None:
    """Row 33. The text is what all bytes of the tokens together say; a character may be cut only where the
    answer's length ends in it."""
    tokenizer = load_tokenizer(demo_model.folder)
    ask = {"prompt": LINES[name].strip(), "temperature": 0, "max_tokens": 40} | extra
    streamed = deltas(smol, **ask)
    whole = smol.raw_json("/v1/completions", ask | {"return_token_ids": True})
    for choice in whole["choices"]:
        said = b"".join(tokenizer.token_bytes(token) or b"" for token in choice["token_ids"])
        expected = said.decode("utf-8", "replace")
        if choice["stop_reason"] is None:
            assert choice["text"] == expected.removesuffix("<|im_end|>")
        assert "".join(streamed[choice["index"]]) == choice["text"]
        if not extra:
            assert "\ufffd" not in choice["text"][:-1]
            assert len(said) > len(expected) + 8


def test_chat_counts_to_ten(smol: Live) -> None:
    answer = smol.openai.chat.completions.create(
        model="real",
        messages=[{"role": "user", "content": "Count from 1 to 10."}],
        temperature=0,
        max_tokens=60,
    )
    text = answer.choices[0].message.content or ""
    assert [text.find(str(number)) for number in range(1, 11)] == sorted(
        text.find(str(n)) for n in range(1, 11)
    )
    assert "10" in text and answer.choices[0].finish_reason in ("stop", "length")
