"""The command line without a model: flags, their errors, and what a terminal sees of a mistake."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest

from slipstream.cli.flags import (
    Parser,
    add_engine_flags,
    add_sampling_flags,
    engine_args,
    integer,
    sampling_params,
)
from slipstream.cli.main import main
from slipstream.config.args import EngineArgs
from slipstream.contracts.limits import NUMBERS


def parse(*argv: str) -> EngineArgs:
    parser = Parser()
    add_engine_flags(parser)
    return engine_args(parser.parse_args(argv))


def test_every_field_has_a_flag_and_unset_flags_keep_the_defaults() -> None:
    assert parse("m") == EngineArgs(model="m")
    parser = Parser()
    add_engine_flags(parser)
    text = parser.format_help()
    for field in fields(EngineArgs):
        assert field.name == "model" or "--" + field.name.replace("_", "-") in text, field.name


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--max-num-seqs", "8"], {"max_num_seqs": 8}),
        (["--max_num_seqs=8"], {"max_num_seqs": 8}),
        (["--no-enable-prefix-caching"], {"enable_prefix_caching": False}),
        (["--async-scheduling"], {"async_scheduling": True}),
        (["--model-runner", "v2"], {"model_runner": "v2"}),
        (["--no-async-scheduling"], {"async_scheduling": False}),
        (["--max-model-len", "8K"], {"max_model_len": 8192}),
        (["--kv-cache-memory-bytes", "1.5G"], {"kv_cache_memory_bytes": 3 * 2**29}),
        (["--gpu-memory-utilization", "0.5"], {"gpu_memory_utilization": 0.5}),
        (["--served-model-name", "x_y", "z"], {"served_model_name": ["x_y", "z"]}),
        (["--skip-tokenizer-init"], {"skip_tokenizer_init": True}),
        (["--cuda-graph-sizes", "1", "8", "1K"], {"cuda_graph_sizes": [1, 8, 1024]}),
        (["--compilation-config", '{"mode": "none"}'], {"compilation_config": '{"mode": "none"}'}),
        (
            ["--structured_outputs_config.backend", "guidance", "--structured-outputs-config.disable_x=5"],
            {"structured_outputs_config": '{"backend": "guidance", "disable_x": 5}'},
        ),
        (["--compilation-config.a.b", "true"], {"compilation_config": '{"a": {"b": true}}'}),
        (["--batch-invariant", "--enforce-eager"], {"batch_invariant": True, "enforce_eager": True}),
    ],
)
def test_flags_become_fields(flags: list[str], expected: dict[str, Any]) -> None:
    assert parse("m", *flags) == EngineArgs(model="m", **expected)


def test_an_object_and_keys_of_it_are_not_both_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("m", "--compilation-config.mode", "none", "--compilation_config={}")
    assert "--compilation-config: an object, and keys of it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("-1", -1),
        ("32k", 32_000),
        ("32K", 32_768),
        ("2M", 2**21),
        ("2m", 2_000_000),
        ("1.5k", 1500),
        ("1g", 10**9),
        ("1G", 2**30),
        ("9223372036854775807", 2**63 - 1),
    ],
)
def test_whole_numbers_take_units(text: str, value: int) -> None:
    assert integer(text) == value


@pytest.mark.parametrize("text", ["", "k", "1.5", "1.0001k", "1kb", "0x10", "1e3", "nan", "--1", "1 k"])
def test_what_is_no_whole_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        integer(text)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["serve"], "model"),
        (["serve", "m", "--max-num-seq", "3"], "--max-num-seq"),
        (["walk"], "invalid choice"),
        (["serve", "m", "--port", "x"], "--port"),
        (["serve", "m", "--max-model-len", "many"], "--max-model-len"),
        (["generate", "m", "--temperature", "hot"], "--temperature"),
        ([], "COMMAND"),
        (["bench"], "BENCHMARK"),
        (["serve", "m", "--log-level", "loud"], "--log-level"),
        (["serve", "m", "--log-format", "xml"], "--log-format"),
        (["serve", "m", "--compilation-config.a", "1", "--compilation-config.a.b", "2"], "config.a.b"),
    ],
)
def test_wrong_flags_are_named(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert exit_.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["serve", "m", "--port", "99999"], "--port=99999"),
        (["serve", "m", "--api-key", ""], "--api-key"),
        (["serve", "m", "--host", "203.0.113.7"], "--host=203.0.113.7"),
        (["generate", "m"], "--prompt"),
        (["generate", "m", "--prompt", "x", "--top-p", "3"], "top_p=3.0"),
        (["generate", "m", "--prompt-file", "/no/such/file"], "--prompt-file=/no/such/file: No such file"),
        (["generate", "m", "--prompt-file", sys.executable], f"--prompt-file={sys.executable}: 'utf-8'"),
        (["bench", "step", "--json", "/no/such/file"], "--json=/no/such/file: No such file"),
        (["bench", "serve", "--plot", "/"], "--plot=/: "),
        (["bench", "serve", "--text", "/no/such/file"], "--text=/no/such/file: No such file"),
        (["bench", "serve", "--dataset", "/no/such/file"], "--dataset=/no/such/file: No such file"),
        (["generate", "/no/such/model", "--prompt", "x"], "/no/such/model"),
        (["chat", "m", "--min-tokens", "5", "--max-tokens", "2"], "min_tokens=5"),
        (["demo-model", "--wheel", "/no/such/wheel", "/tmp/no-such-demo"], "/no/such/wheel"),
    ],
)
def test_mistakes_are_one_line_and_status_2(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("error: ") and words in lines[-1]
    assert not any("Traceback" in line for line in lines)


def test_sampling_flags_are_those_of_the_table() -> None:
    parser = Parser()
    add_sampling_flags(parser, max_tokens=99)
    assert sampling_params(parser.parse_args([])).max_tokens == 99
    text = parser.format_help()
    for rule in NUMBERS:
        assert (f"--{rule.field.replace('_', '-')} " in text) == (
            rule.field not in ("n", "logprobs", "prompt_logprobs")
        )
    argv = [
        "--temperature",
        "0",
        "--stop",
        "a",
        "--stop",
        "b",
        "--stop-token-ids",
        "7",
        "--ignore-eos",
        "--seed",
        "-3",
    ]
    params = sampling_params(parser.parse_args(argv))
    assert (params.temperature, params.stop, params.stop_token_ids) == (0.0, ["a", "b"], [7])
    assert params.ignore_eos and params.seed == -3


def test_help_loads_no_torch_and_no_web_server() -> None:
    code = (
        "import sys\nfrom slipstream.cli.main import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'uvicorn', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
