"""`slipstream bench offline` and `latency` on a tiny model: counts that follow from the flags, times within
the whole, files that are what they say."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from text_model import make_text_model

from slipstream.cli.bench_engine import StepClock
from slipstream.cli.bench_report import lengths
from slipstream.cli.main import main

SMALL = ["--max-model-len", "96", "--max-num-seqs", "8", "--num-gpu-blocks-override", "65"]
SMALL += ["--dtype", "float32"]
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return make_text_model(tiny_model)


def bench(kind: str, model: Path, folder: Path, *flags: str) -> tuple[dict[str, Any], float]:
    """The report, and the seconds that the command took."""
    file = folder / "report.json"
    begin = time.perf_counter()
    assert main(["bench", kind, str(model), *SMALL, "--no-progress", "--json", str(file), *flags]) == 0
    report: dict[str, Any] = json.loads(file.read_text())
    assert report["benchmark"] == kind and report["engine"]["device"] == "cpu"
    return report, time.perf_counter() - begin


def test_offline_counts_tokens_by_its_flags(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, spent = bench(
        "offline", model, tmp_path, "--num-prompts", "10", "--input-len", "20", "--output-len", "7"
    )
    assert (report["requests"], report["input_tokens"], report["output_tokens"]) == (10, 200, 70)
    assert 0 < report["seconds"] < spent
    assert report["output_tokens_per_second"] == pytest.approx(70 / report["seconds"])
    assert "10 requests" in capsys.readouterr().out


def test_offline_draws_lengths_within_both_ends(model: Path, tmp_path: Path) -> None:
    flags = ["--num-prompts", "30", "--input-len", "4:40", "--output-len", "1:9", "--load-format", "dummy"]
    report, _ = bench("offline", model, tmp_path, *flags, "--temperature", "0.7", "--top-k", "5")
    assert 30 * 4 < report["input_tokens"] < 30 * 40
    assert 30 < report["output_tokens"] < 30 * 9
    again, _ = bench("offline", model, tmp_path, *flags)
    assert again["input_tokens"] == report["input_tokens"], "the load is the same in every run"


def test_latency_has_a_sample_for_every_batch_and_step(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, spent = bench(
        "latency", model, tmp_path, "--batch-size", "3", "--iterations", "4", "--input-len", "5",
        "--output-len", "11",
    )
    assert report["steps"] == 4 * 10  # the first token of each comes before the first step that is timed
    times = report["milliseconds"]
    for part in ("request", "first", "step"):
        assert 0 < times[part]["median"] <= times[part]["p90"] <= times[part]["p99"] < 1e3 * spent
    assert times["first"]["median"] < times["request"]["median"]
    assert "a step after them" in capsys.readouterr().out


def test_one_token_a_request_has_no_steps_to_time(model: Path, tmp_path: Path) -> None:
    report, _ = bench("latency", model, tmp_path, "--iterations", "2", "--output-len", "1")
    assert report["steps"] == 0 and "step" not in report["milliseconds"]


def test_prompts_are_cut_out_of_a_text(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh" * 4)
    flags = ["--text", str(text), "--num-prompts", "3", "--output-len", "2"]
    report, _ = bench("offline", model, tmp_path, *flags, "--input-len", "32")
    assert report["input_tokens"] == 96
    assert main(["bench", "offline", str(model), *SMALL, *flags, "--input-len", "33"]) == 2


@pytest.mark.parametrize("kind", ["offline", "latency"])
def test_plots_are_pictures(model: Path, tmp_path: Path, kind: str) -> None:
    file = tmp_path / "plot.png"
    bench(kind, model, tmp_path, "--plot", str(file), "--input-len", "5", "--output-len", "3")
    assert file.read_bytes().startswith(PNG)


def test_step_plots_too(tmp_path: Path) -> None:
    file = tmp_path / "plot.png"
    assert main(["bench", "step", "--rows", "1", "2", "--steps", "20", "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(PNG)


def test_without_matplotlib_a_plot_is_refused_before_anything_runs(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for command in (["offline", str(model)], ["latency", str(model)], ["step"]):
        assert main(["bench", *command, "--plot", str(tmp_path / "x.png")]) == 2
        assert "--plot=" in (words := capsys.readouterr().err) and "pip install matplotlib" in words
    assert not (tmp_path / "x.png").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--input-len", "200"], "prompt"),
        (["--output-len", "0"], "--output-len"),
        (["--input-len", "9:3"], "--input-len"),
        (["--num-prompts", "-1"], "--num-prompts"),
        (["--json", "/no/such/folder/x.json"], "/no/such/folder"),
        (["--stop", "x"], "stop"),
        (["--text", "/no/such/text"], "/no/such/text"),
    ],
)
def test_mistakes_are_named(
    model: Path, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["bench", "offline", str(model), *SMALL, "--no-progress", *flags])
    except SystemExit as end:
        status = int(end.code or 0)
    assert status == 2 and words in capsys.readouterr().err


def test_lengths_are_one_number_or_both_ends() -> None:
    assert lengths("128") == (128, 128) and lengths("1:9") == (1, 9)


def test_a_clock_finds_the_step_that_brought_the_last_first_token() -> None:
    clock = StepClock()
    clock.seconds, clock.tokens = [1.0, 3.0, 4.0, 6.0], [0, 2, 3, 3]
    assert clock.first(3) == 4.0  # 5 tokens had come by then, 2 before
    assert clock.intervals(3) == [2.0]
    assert clock.first(2) == 3.0 and clock.intervals(2) == [1.0, 2.0]
