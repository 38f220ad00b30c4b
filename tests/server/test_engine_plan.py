"""The plan of a running engine: at /v1/engine/plan behind the key, in the log, and the same as explain's."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from live import serve
from scripted import LIMITS, ByteTokenizer, ScriptedEngine

from slipstream.cli.main import main
from slipstream.config.args import EngineArgs
from slipstream.engine.client import EngineInfo
from slipstream.engine.open_core import open_core
from slipstream.server.app import build_app
from slipstream.server.options import ServerOptions

CHOICE = {"value": "v2", "reason": "said", "flag": "--model-runner"}
FLAGS = {"device": "cpu", "dtype": "float32", "num_gpu_blocks_override": 65, "skip_tokenizer_init": True}


def test_the_plan_is_served_and_asks_for_the_key() -> None:
    engine = ScriptedEngine(info=EngineInfo(LIMITS, (0,), {"model_runner": CHOICE}, {"model_runner": CHOICE}))
    app = build_app(engine, "scripted", tokenizer=ByteTokenizer(), options=ServerOptions(api_keys=["k"]))
    with serve(app) as live:
        assert live.http.get("/v1/engine/plan").status_code == 401
        answer = live.http.get("/v1/engine/plan", headers={"authorization": "Bearer k"})
    assert answer.status_code == 200
    assert answer.json() == {"model_runner": CHOICE, "vllm_0_31": {"model_runner": CHOICE}}


def test_an_engine_logs_and_tells_what_explain_says(
    tiny_model: Callable[..., Path],
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("slipstream"), "propagate", True)
    model = tiny_model("llama")
    capsys.readouterr()
    argv = ["explain", str(model), "--json", "--device", "cpu", "--dtype", "float32", "--skip-tokenizer-init"]
    assert main([*argv, "--num-gpu-blocks-override", "65"]) == 0
    said = json.loads(capsys.readouterr().out)
    with caplog.at_level("INFO", "slipstream.engine"):
        core = open_core(EngineArgs(model=str(model), **FLAGS), lambda: None)
    core.close()
    told = json.loads(json.dumps({**core.info.plan, "vllm_0_31": core.info.vllm_0_31}))
    assert told.pop("linear")["value"]
    assert told["kv_cache"]["value"] == said["kv_cache"]["value"]
    assert "MiB" in told.pop("kv_cache")["reason"] and said.pop("kv_cache")
    assert told == said
    lines = [record.getMessage() for record in caplog.records]
    assert "vLLM 0.31.0 would choose" in lines
    for name, choice in said.items():
        if name != "vllm_0_31":
            assert any(line.startswith(name + " ") for line in lines), (name, choice)
