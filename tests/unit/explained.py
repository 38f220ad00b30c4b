"""`slipstream explain --json` run in this process, on machines that are made up."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli.main import main
from slipstream.config.device import DeviceFacts
from slipstream.config.runner import OUR_VARIABLE, VLLM_VARIABLE

H200 = DeviceFacts(kind="cuda", name="H200", memory_bytes=140 << 30, has_triton=True, capability=(9, 0))
NO_TRITON = DeviceFacts(kind="cuda", name="H200", memory_bytes=140 << 30, capability=(9, 0))
CPU = DeviceFacts(kind="cpu", name="no CUDA device", memory_bytes=8 << 30)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


@dataclass
class Answer:
    """What one run printed. plan: the object of --json, empty where there was none."""

    status: int
    plan: dict[str, Any]
    error: str

    def two(self, column: dict[str, Any]) -> str:
        """Runner and async scheduling of a column, such as "v2 on"."""
        return f"{column['model_runner']['value']} {'on' if column['async_scheduling']['value'] else 'off'}"


Explain = Callable[..., Answer]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's folder without a single weight."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.fixture
def explain(model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Explain:
    """explain(flags, machine, variables): variables is "ours=0 vllm=1" or part of it. The old runner is taken
    to be there, since its folder may be deleted."""
    names = {"ours": OUR_VARIABLE, "vllm": VLLM_VARIABLE}

    def run(flags: str = "", machine: DeviceFacts = CPU, variables: str = "", v1: bool = True) -> Answer:
        monkeypatch.setattr("slipstream.engine.explain.device_facts", lambda: machine)
        monkeypatch.setattr("slipstream.config.runner.has_runner_v1", lambda: v1)
        for name in names.values():
            monkeypatch.delenv(name, raising=False)
        for one in variables.split():
            name, _, value = one.partition("=")
            monkeypatch.setenv(names[name], value)
        status = main(["explain", str(model), "--json", *shlex.split(flags)])
        printed = capsys.readouterr()
        return Answer(status, json.loads(printed.out) if printed.out else {}, printed.err)

    return run
