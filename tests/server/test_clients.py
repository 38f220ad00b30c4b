"""The official client, litellm and langchain-openai run the recorded list of calls."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # read when it is imported: no look at the net

import calls_openai
import calls_others
from client_calls import SCRIPTED, SMOL, TINY, Call, Target
from conftest import Template
from live import serve
from real import real_server
from scripted import ByteTokenizer, ScriptedEngine
from text_model import make_text_model

from slipstream.server.app import build_app
from slipstream.server.options import ServerOptions

READ = ServerOptions(tool_call_parser="hermes", enable_auto_tool_choice=True, reasoning_parser="qwen3")


@pytest.fixture(scope="module")
def on_smol(demo_model: Any) -> Iterator[Target]:
    with real_server(demo_model.folder, READ, dtype="bfloat16", max_model_len=512) as live:
        yield Target(live.url, "real", live.openai, lambda _reply: None)


@pytest.fixture(scope="module")
def on_tiny(tiny_model: Any) -> Iterator[Target]:
    with real_server(make_text_model(tiny_model), READ) as live:
        yield Target(live.url, "real", live.openai, lambda _reply: None)


@pytest.fixture(scope="module")
def on_script() -> Iterator[Target]:
    engine = ScriptedEngine()
    app = build_app(engine, "scripted", tokenizer=ByteTokenizer(), render=Template(), options=READ)
    with serve(app) as live:
        yield Target(live.url, "scripted", live.openai, lambda reply: setattr(engine, "reply", reply))


@pytest.mark.parametrize("call", SMOL, ids=lambda call: call.__name__)
def test_a_call_about_words_gets_what_the_reference_promises(call: Call, on_smol: Target) -> None:
    call(on_smol)


@pytest.mark.parametrize("call", TINY, ids=lambda call: call.__name__)
def test_a_call_gets_what_the_reference_promises(call: Call, on_tiny: Target) -> None:
    call(on_tiny)


@pytest.mark.parametrize("call", SCRIPTED, ids=lambda call: call.__name__)
def test_a_call_with_markup_gets_what_the_reference_promises(call: Call, on_script: Target) -> None:
    call(on_script)


def test_the_list_is_long_and_every_client_streams_and_does_not() -> None:
    names = [call.__name__ for call in SMOL + TINY + SCRIPTED]
    assert len(names) == len(set(names)) >= 40
    for client in ("openai", "litellm", "langchain"):
        streamed = [name for name in names if name.startswith(client) and "stream" in name]
        assert 3 <= len(streamed) < sum(name.startswith(client) for name in names) - 3
    assert {call.__module__ for call in SMOL + TINY} == {calls_openai.__name__, calls_others.__name__}
