"""The GPU table: what the logs of a benchmark say, held against the goals; and the script that makes them,
with a stand-in for both engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu_table import Goal, compare, read_results, table  # noqa: E402

LOG = """noise
RESULT {"load": "startup", "import_s": 3.0, "init_s": 10.5}
RESULT {"load": "bs1", "seconds": 0.36, "tok_s": 1422.2, "ms_per_step": 0.703}
RESULT {"load": "bs256", "seconds": 2.0, "tok_s": 65536.0, "ms_per_step": 3.906}
 RESULT {"load": "indented", "seconds": 1}
RESULT {"load": "bs256-sampled", "seconds": 2.2, "tok_s": 59578.0, "ms_per_step": 4.297}
RESULT {"load": "nano", "seconds": 4.0, "tok_s": 31000.0, "ms_per_step": 4.0}
"""
PEER = """RESULT {"load": "startup", "import_s": 27.0, "init_s": 90}
RESULT {"load": "bs1", "seconds": 1.26, "tok_s": 406.0, "ms_per_step": 2.461}
RESULT {"load": "bs256", "seconds": 3.8, "tok_s": 34492.0, "ms_per_step": 7.42}
RESULT {"load": "nano", "seconds": 6.2, "tok_s": 20000.0, "ms_per_step": 6.0}
"""


def test_rows_hold_both_engines_and_how_many_times_faster_ours_is() -> None:
    ours = read_results(LOG)
    assert "indented" not in ours and ours["startup"]["seconds"] == 13.5
    rows = {row.load: row for row in compare("Qwen3-0.6B", ours, read_results(PEER), {})}
    assert rows["bs1"].ratio == pytest.approx(3.5) and rows["bs1"].peer_seconds == 1.26
    assert rows["bs1"].missed == ["at most 0.7 ms a step"]  # 0.703, though 3.5 times vLLM
    assert rows["bs256"].missed == ["at least 2x vLLM"]  # 1.9, though under 4.1 ms
    assert rows["bs256-sampled"].missed == ["within 5% of bs256, is 10.0% over"]
    assert rows["nano"].missed == [] and rows["nano"].ratio == pytest.approx(1.55)
    assert rows["startup"].missed == ["at most 12 s"]


def test_without_the_peer_its_ratios_stay_open() -> None:
    rows = {row.load: row for row in compare("Qwen3-0.6B", read_results(LOG), {}, read_results(LOG))}
    assert rows["first startup"].missed == [] and rows["startup"].missed == ["at most 12 s"]
    assert rows["nano"].ratio is None and rows["nano"].open == ["at least 1.55x vLLM"]
    text = table(list(rows.values()))
    assert "open: at least 1.55x vLLM" in text and "missed: at most 0.7 ms a step" in text


def test_a_model_without_goals_is_only_shown() -> None:
    rows = compare("tiny", read_results(LOG), read_results(PEER), {})
    assert all(row.goal == Goal() and not row.missed for row in rows)
    assert "reached" not in table(rows)


BENCH = """
import argparse, json, os, sys
parser = argparse.ArgumentParser()
for flag in ("--engine", "--model", "--loads", "--runner", "--llm"): parser.add_argument(flag, default="")
args = parser.parse_args()
if args.model.endswith("bad"): sys.exit("this model fails")
if args.engine == "vllm" and "without" in args.model: sys.exit("the peer fails")
slow = 2.0 if args.engine == "vllm" else 1.0
slow = 0.5 if "flash" in args.llm else 4.0 if "invariant" in args.llm else slow
print("RESULT " + json.dumps({"load": "startup", "import_s": slow, "init_s": 0}))
for load in args.loads.split(","):
    print("RESULT " + json.dumps({"load": load, "seconds": slow, "tok_s": 1.0, "ms_per_step": slow}))
"""


def run_script(tmp_path: Path, *models: str, peer: Path, **more: str) -> subprocess.CompletedProcess[str]:
    bench = tmp_path / "bench.py"
    bench.write_text(BENCH)
    environment = {
        "BENCH": str(bench), "PEER": str(peer), "LOADS": "bs1,nano", "RESULTS": str(tmp_path / "results"),
        "PYTHON": sys.executable, "HOME": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "cache"),
    }
    command = [str(ROOT / "benchmarks" / "gpu.sh"), *models]
    environment = os.environ | environment | more
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_script_runs_both_engines_and_stores_one_file_a_model(tmp_path: Path) -> None:
    (tmp_path / "site" / "vllm").mkdir(parents=True)
    (tmp_path / "site" / "vllm" / "__init__.py").touch()
    done = run_script(tmp_path, "/m/one", "/m/two", peer=tmp_path / "site", VARIANTS="flash invariant")
    assert done.returncode == 0, done.stderr
    for name in ("one", "two"):
        record = json.loads((tmp_path / "results" / f"gpu_{name}.json").read_text())
        assert [row["load"] for row in record["rows"]] == ["first startup", "startup", "bs1", "nano"]
        assert [row["ratio"] for row in record["rows"]] == [2.0] * 4
        for name, ratio, price in (("flash", 4.0, 0.5), ("invariant", 0.5, 4.0)):
            assert [(row["load"], row["ratio"], row["price"]) for row in record["variant_rows"][name]] == [
                (load, ratio, price) for load in ("startup", "bs1", "nano")
            ]
        asked = "VARIANTS='flash invariant' LOADS=bs1,nano"
        assert record["command"] == f"{asked} benchmarks/gpu.sh {record['model']}"
        assert record["kernel_cache_at_first_start"] == "empty" and record["vllm"]["nano"]["seconds"] == 2.0
    assert "nano" in done.stdout and "price" in done.stdout


def test_the_script_runs_ours_alone_where_there_is_no_peer(tmp_path: Path) -> None:
    done = run_script(tmp_path, "/m/one", peer=tmp_path / "nothing")
    assert done.returncode == 0 and "ours alone" in done.stderr
    assert json.loads((tmp_path / "results" / "gpu_one.json").read_text())["vllm"] == {}


def test_a_peer_that_fails_costs_its_own_figures_only(tmp_path: Path) -> None:
    (tmp_path / "site" / "vllm").mkdir(parents=True)
    (tmp_path / "site" / "vllm" / "__init__.py").touch()
    done = run_script(tmp_path, "/m/without-peer", peer=tmp_path / "site")
    assert done.returncode == 0 and "the peer fails" in done.stderr
    record = json.loads((tmp_path / "results" / "gpu_without-peer.json").read_text())
    assert record["vllm"] == {} and record["slipstream"]["bs1"]["seconds"] == 1.0


def test_the_script_shows_why_an_engine_failed(tmp_path: Path) -> None:
    done = run_script(tmp_path, "/m/bad", peer=tmp_path / "nothing")
    assert done.returncode == 1 and "this model fails" in done.stderr
    assert run_script(tmp_path, peer=tmp_path).returncode == 2
    done = run_script(tmp_path, "/m/one", peer=tmp_path / "nothing", VARIANTS="fast")
    assert done.returncode == 2 and "VARIANTS=fast: must be of" in done.stderr
