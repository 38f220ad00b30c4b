"""`slipstream bench compare` of both runners, whole: plans, refusals, runs, JSON and plot."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from text_model import make_text_model

from slipstream.cli.main import main

SMALL = ["--max-model-len", "96", "--max-num-seqs", "8", "--dtype", "float32", "--no-progress"]
LOAD = ["--input-len", "5:9", "--output-len", "6", "--concurrency", "1,3"]
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return make_text_model(tiny_model)


def test_a_comparison_runs_every_cell_on_the_same_load_and_refuses_what_cannot_be(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, plot = tmp_path / "report.json", tmp_path / "plot.png"
    flags = ["--methods", "none,ngram,mtp", "--num-speculative-tokens", "3"]
    flags += ["--runners", "v1,v2", "--async", "on,off", "--repeats", "2", *LOAD]
    flags += ["--json", str(file), "--plot", str(plot)]
    assert main(["bench", "compare", str(model), *SMALL, *flags]) == 0
    assert plot.read_bytes().startswith(PNG)
    report, words = json.loads(file.read_text()), capsys.readouterr().out
    cells = {(c["method"], c["runner"], c["asynchrony"]): c for c in report["cells"]}
    assert len(cells) == 12
    measured = {key for key, cell in cells.items() if not cell["refused"]}
    could = {("v1", "off"), ("v2", "on"), ("v2", "off")}
    assert measured == {(method, *rest) for method in ("none", "ngram") for rest in could}
    for key in measured:
        cell = cells[key]
        assert cell["plan"]["model_runner"]["value"] == key[1]
        assert cell["plan"]["async_scheduling"]["value"] is (key[2] == "on")
        for concurrency in (1, 3):
            runs = cell["runs"][str(concurrency)]
            assert [run["repeat"] for run in runs] == [0, 1]
            for run in runs:
                assert run["output_tokens"] == 6 * concurrency
                assert key[0] == "ngram" or run["acceptance"] is run["accepted_length"] is None
                assert run["acceptance"] is None or 0 <= run["acceptance"] <= 1 <= run["accepted_length"] <= 4
                assert run["tokens_per_second"] == pytest.approx(run["output_tokens"] / run["seconds"])
                assert 0 < run["ttft_ms"] + 5 * run["tpot_ms"] < 1e3 * run["seconds"]
    orders = [run["order"] for key in measured for runs in cells[key]["runs"].values() for run in runs]
    assert sorted(orders) == list(range(6 * 2 * 2)), "no run is lost, and none of the warm-up counts"
    assert "--async-scheduling" in cells["none", "v1", "on"]["refused"]
    assert "--speculative-config: method='mtp'" in cells["mtp", "v2", "off"]["refused"]
    assert "up to 3 drafts a step" in cells["ngram", "v2", "on"]["plan"]["speculation"]["reason"]
    assert report["engines"].startswith("kept alive") and report["engines"] in words
    assert "runner v1 waits for every token" in words and "refused [1]" in words
    assert "tokens a draft" in words
    kinds = {(e["attribute"], e["within"]) for e in report["effects"]}
    assert kinds == {
        ("runner", "none, async off"), ("runner", "ngram, async off"), ("asynchrony", "none, v2"),
        ("asynchrony", "ngram, v2"), ("method", "v1, async off"), ("method", "v2, async off"),
        ("method", "v2, async on"),
    }  # fmt: skip
