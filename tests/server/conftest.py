"""A live server over a scripted engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from live import Live, serve
from scripted import ByteTokenizer, ScriptedEngine

from slipstream.server.app import build_app


class Template:
    """<role>content of every turn, tools in front, and <assistant> to open the answer."""

    takes_tools = True
    takes_documents = False

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any],
    ) -> str:
        self.seen.append({"messages": messages, "tools": tools, **template_kwargs})
        names = "".join(f"[{tool['function']['name']}]" for tool in tools or ())
        turns = "".join(f"<{turn['role']}>{turn['content']}" for turn in messages)
        end = str(template_kwargs.get("end", ""))
        return names + turns + ("<assistant>" if add_generation_prompt else "") + end


render = Template()


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def served(engine: ScriptedEngine) -> Iterator[Live]:
    with serve(build_app(engine, "scripted", tokenizer=ByteTokenizer(), render=render)) as live:
        yield live
