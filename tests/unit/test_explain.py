"""`slipstream explain`: every decision with value, reason and flag; no weights; a table that fits; and no
flag of serve that is taken and ignored."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
from explained import CONFIG, CPU, H200, NO_TRITON, Explain, explain, model

from slipstream.cli.main import build_parser, main
from slipstream.config.args import EngineArgs

__all__ = ["explain", "model"]  # fixtures

CLI_PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
DECISIONS = {
    "model_runner", "async_scheduling", "speculation", "attention_backend", "cuda_graphs", "compile_mode",
    "parallel", "kv_cache", "prefix_caching", "dtype", "quantization", "chat_template",
}  # fmt: skip
# A value of each flag that is not its default, on a CUDA machine; it must show in the plan.
OTHER_VALUES = {
    "--tokenizer": "{model}/tokenizer.json",
    "--skip-tokenizer-init": "",
    "--load-format": "dummy",
    "--dtype": "float16",
    "--device": "cpu",
    "--max-model-len": "1024",
    "--max-num-seqs": "8",
    "--max-num-batched-tokens": "512",
    "--block-size": "32",
    "--gpu-memory-utilization": "0.5",
    "--kv-cache-memory-bytes": "1G",
    "--num-gpu-blocks-override": "100",
    "--no-enable-prefix-caching": "",
    "--model-runner": "v1",
    "--no-async-scheduling": "",
    "--max-steps-in-flight": "3",
    "--scheduling-policy": "priority",
    "--distributed-executor-backend": "uni",
    "--enforce-eager": "",
    "--cuda-graph-sizes": "1 4",
    "--attention-backend": "torch",
    "--kv-cache-dtype": "fp8",
    "--batch-invariant": "",
    "--compilation-config": """'{{"mode": "stock_torch_compile"}}'""",
    "--speculative-config": """'{{"method": "ngram"}}'""",
    "--structured-outputs-config": """'{{"disable_any_whitespace": true}}'""",
    "--max-logprobs": "5",
    "--chat-template": "'{{{{ messages }}}}'",
}


def serve_flags() -> dict[str, tuple[str, ...]]:
    """Every flag of `serve --help`, with its other spellings."""
    subparsers = next(a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    actions = subparsers.choices["serve"]._actions
    return {a.option_strings[0]: tuple(a.option_strings) for a in actions if a.option_strings}


def documented() -> set[str]:
    """The flags that docs/cli.md lists as not affecting the plan."""
    section = CLI_PAGE.read_text("utf-8").split("## Flags that do not affect the plan\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `(--[a-z-]+)` \|", section, re.MULTILINE))


def test_every_decision_has_value_reason_and_flag(explain: Explain) -> None:
    for flags in ("", "--device cuda"):
        plan = explain(flags).plan
        columns = plan.pop("vllm_0_31")
        assert plan.keys() >= DECISIONS and columns.keys() == {"model_runner", "async_scheduling"}
        for choice in (*plan.values(), *columns.values()):
            assert choice.keys() == {"value", "reason", "flag"} and choice["reason"]


def test_the_library_of_grammars_is_said_and_must_be_there(
    explain: Explain, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = {"": "llguidance", ".backend auto": "llguidance", ".backend=xgrammar": "xgrammar"}
    for flag, library in chosen.items():
        choice = explain(f"--structured-outputs-config{flag}" if flag else "").plan["structured_outputs"]
        assert library in choice["reason"] and choice["value"]["backend"] in library
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert explain().plan["structured_outputs"]["value"] == {"backend": "none"}
    for backend, package in {"guidance": "llguidance", "xgrammar": "xgrammar"}.items():
        answer = explain(f"--structured-outputs-config.backend {backend}")
        error = answer.error + json.dumps(answer.plan)
        assert f"backend='{backend}': {package} is not installed: pip install {package}" in error
    assert "must be one of auto, guidance, xgrammar" in explain("--structured-outputs-config.backend x").error


def test_the_kv_cache_costs_what_its_shape_says(explain: Explain) -> None:
    # 3 layers, K and V, 2 heads of 16, two bytes each; 4,096 tokens are 256 blocks of 16.
    token = 3 * 2 * 2 * 16 * 2
    value = explain("--device cuda").plan["kv_cache"]["value"]
    assert value == {
        "bytes_per_token": token,
        "block_size": 16,
        "num_blocks": None,
        "bytes_per_request": 4096 * token,
        "bytes_of_all_requests": 256 * 4096 * token,
    }
    odd = explain("--device cuda --kv-cache-dtype fp8 --max-model-len 100 --kv-cache-memory-bytes 100000")
    value = odd.plan["kv_cache"]["value"]
    assert value["bytes_per_token"] == token // 2 and value["bytes_per_request"] == 112 * token // 2
    assert value["num_blocks"] == 100_000 // (16 * token // 2)


def test_a_cuda_machine_is_assumed_where_there_is_none_and_said_so(explain: Explain) -> None:
    assumed = explain("--device cuda", CPU).plan
    assert "H200" in assumed["device"]["reason"] and "assumed" in assumed["device"]["reason"]
    real = explain("--device cuda", H200).plan
    assert "assumed" not in real["device"]["reason"]
    assert {**assumed, "device": 0} == {**real, "device": 0}
    assert explain("--device cuda", NO_TRITON).plan["attention_backend"]["value"] == "torch"


def test_reasons_name_what_decided(explain: Explain) -> None:
    def reason(flags: str = "", variables: str = "", machine=H200, of: str = "model_runner") -> str:
        return str(explain(flags, machine, variables).plan[of]["reason"])

    assert "auto" in reason() and "torch kernels" in reason(machine=NO_TRITON)
    assert "--model-runner=v1" in reason("--model-runner v1")
    assert "SLIPSTREAM_USE_V2_MODEL_RUNNER=0" in reason(variables="ours=0")
    assert "VLLM_USE_V2_MODEL_RUNNER=0, vLLM's" in reason(variables="vllm=0")
    outvoted = reason("--model-runner v2", "ours=0 vllm=0")
    assert "before SLIPSTREAM_USE_V2_MODEL_RUNNER=0 and VLLM_USE_V2_MODEL_RUNNER=0" in outvoted
    assert "runner v1" in reason("--model-runner v1", of="cuda_graphs")
    assert "runner v1" in reason("--model-runner v1", of="async_scheduling")


def test_without_its_folder_the_old_runner_is_refused_by_name(explain: Explain) -> None:
    answer = explain("--model-runner v1", v1=False)
    assert answer.status == 2 and "--model-runner=v1" in answer.error and "runner_v1" in answer.error
    assert explain(v1=False).plan["model_runner"]["value"] == "v2"


def test_what_is_not_there_is_an_error_beside_the_plan(explain: Explain) -> None:
    answer = explain("""--device cuda --tensor-parallel-size 2 --speculative-config '{"method": "mtp"}'""")
    assert answer.status == 0
    assert answer.plan["speculation"]["value"] == "error"
    assert "--speculative-config: method='mtp'" in answer.plan["speculation"]["reason"]
    assert "--tensor-parallel-size" in answer.plan["vllm_flags"]["reason"]


def test_the_template_is_found_where_each_format_keeps_it(explain: Explain, model: Path) -> None:
    def found(flags: str = "") -> str:
        return str(explain(flags).plan["chat_template"]["value"])

    assert found() == "none"
    (model / "tokenizer_config.json").write_text('{"chat_template": [{"name": "default", "template": "x"}]}')
    assert found() == "tokenizer_config.json"
    (model / "chat_template.jinja").write_text("x")
    assert found() == "chat_template.jinja"
    assert found("--chat-template '{{ x }}'") == "inline text"
    assert found(f"--chat-template {model}/chat_template.jinja") == f"{model}/chat_template.jinja"
    assert found("--skip-tokenizer-init") == "none"


@pytest.mark.parametrize("columns", [72, 100, 200])
def test_the_table_fits_the_terminal_and_breaks_no_flag(
    model: Path, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["explain", str(model), "--device", "cuda", "--served-model-name", "x"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert max(map(len, lines)) <= columns
    assert "vLLM 0.31.0 would choose" in lines
    for name in DECISIONS:
        assert sum(line.startswith(name + " ") for line in lines) >= 1, name
    for flag in ("--model-runner", "--max-num-batched-tokens", "--gpu-memory-utilization"):
        assert f"[{flag}]" in text


def test_no_flag_of_serve_is_taken_and_ignored(explain: Explain, model: Path) -> None:
    (model / "tokenizer.json").write_text("{}")
    flags, without = serve_flags(), documented()
    known = {spelling for spellings in flags.values() for spelling in spellings}
    assert without <= known and not without & OTHER_VALUES.keys()
    engine = {"--" + field.name.replace("_", "-") for field in fields(EngineArgs)} - {"--model"}
    assert engine <= flags.keys()
    base = explain("--device cuda").plan
    for flag, spellings in flags.items():
        if without & set(spellings):
            continue
        spelling = next((one for one in spellings if one in OTHER_VALUES), None)
        assert spelling is not None, f"{flag}: neither tried here nor listed in docs/cli.md"
        value = OTHER_VALUES[spelling].format(model=model)
        device = "" if spelling == "--device" else "--device cuda "
        answer = explain(f"{device}{spelling} {value}")
        assert answer.status == 0, (flag, answer.error)
        assert answer.plan != base, f"{flag}: taken and ignored"


def test_flags_listed_as_without_effect_have_none(explain: Explain) -> None:
    values = {"--help": None, "--seed": "7", "--port": "9", "--trace": "t.json", "--log-level": "debug",
              "--uvicorn-log-level": "debug", "--disable-uvicorn-access-log": "", "--host": "0.0.0.0",
              "--api-key": "k", "--served-model-name": "n", "--shutdown-timeout": "5",
              "--max-concurrent-requests": "5", "--max-queue-seconds": "1.5", "--max-request-bytes": "1M",
              "--ssl-certfile": "c", "--ssl-keyfile": "k", "--ssl-keyfile-password": "p",
              "--ssl-ca-certs": "a",
              "--log-format": "json", "--enable-log-requests": "", "--otlp-traces-endpoint": "http://c",
              "--ssl-cert-reqs": "2", "--ssl-ciphers": "x", "--allowed-origins": '["a"]',
              "--allowed-methods": '["GET"]', "--allowed-headers": '["a"]', "--allow-credentials": "",
              "--tool-call-parser": "hermes", "--enable-auto-tool-choice": "", "--reasoning-parser": "qwen3",
              "--engine-progress-timeout": "5", "--max-engine-restarts": "7",
              "--no-spare-processes": ""}
    assert documented() == values.keys()
    base = explain().plan
    for flag, value in values.items():
        if value is not None:
            assert explain(f"{flag} {shlex.quote(value) if value else ''}").plan == base, flag


def test_no_weight_is_read(explain: Explain, model: Path) -> None:
    assert [file.name for file in model.iterdir()] == ["config.json"]
    assert explain().plan["max_model_len"]["value"] == CONFIG["max_position_embeddings"]
