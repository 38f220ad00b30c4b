"""A live server over a scripted engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from live import Live, serve
from scripted import ByteTokenizer, ScriptedEngine

from slipstream.server.app import build_app


def render(
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    template_kwargs: Mapping[str, Any],
) -> str:
    """A chat template: <role>content, and <assistant> to open the answer."""
    turns = [f"<{turn['role']}>{turn['content']}" for turn in messages]
    return (
        "".join(turns)
        + ("<assistant>" if add_generation_prompt else "")
        + str(template_kwargs.get("end", ""))
    )


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def served(engine: ScriptedEngine) -> Iterator[Live]:
    with serve(build_app(engine, "scripted", tokenizer=ByteTokenizer(), render=render)) as live:
        yield live
