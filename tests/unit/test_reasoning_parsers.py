"""What a model thinks, told apart from what it answers: whole, and in pieces of any size."""

from __future__ import annotations

import pytest

from slipstream.text.parsers.reasoning import ThinkParser
from slipstream.text.parsers.registry import REASONING_PARSERS

PLAIN, OPENED, CLOSED = "<user>hi<assistant>", "<assistant><think>\n", "<assistant><think>\n\n</think>\n\n"


def read(parser: ThinkParser, pieces: list[str]) -> tuple[str, str]:
    found = [parser.feed(piece) for piece in pieces] + [parser.end()]
    return "".join(thoughts for thoughts, _ in found), "".join(content for _, content in found)


@pytest.mark.parametrize(
    ("name", "prompt", "text", "thoughts", "content"),
    [
        ("qwen3", PLAIN, "<think>\nHm.\n\nSo.\n</think>\n\nYes.\n", "Hm.\n\nSo.", "Yes.\n"),
        ("qwen3", PLAIN, "Yes.", "", "Yes."),
        ("qwen3", PLAIN, "  Yes <think>no</think>", "", "  Yes <think>no</think>"),
        ("qwen3", PLAIN, "\n<think>Hm", "Hm", ""),
        ("qwen3", PLAIN, "<think>\n\n</think>\n\nYes.", "", "Yes."),
        ("qwen3", OPENED, "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("qwen3", CLOSED, "Yes.", "", "Yes."),
        ("qwen3", PLAIN, "<thin air>", "", "<thin air>"),
        ("qwen3", PLAIN, "", "", ""),
        ("deepseek_r1", PLAIN, "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("deepseek_r1", PLAIN, "<think>\nHm.\n</think>\nYes.", "Hm.", "Yes."),
        ("deepseek_r1", OPENED, "Hm, a < b", "Hm, a < b", ""),
        ("deepseek_r1", OPENED, "Hm </thin", "Hm </thin", ""),
        ("deepseek_r1", CLOSED, "Yes.", "", "Yes."),
        ("deepseek_r1", OPENED, "</think>Yes </think> yes", "", "Yes </think> yes"),
    ],
)
def test_thoughts_and_answer_are_told_apart(
    name: str, prompt: str, text: str, thoughts: str, content: str
) -> None:
    make = REASONING_PARSERS[name]
    for size in (1, 2, 3, 7, 100):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert read(make(prompt), pieces) == (thoughts, content), size
