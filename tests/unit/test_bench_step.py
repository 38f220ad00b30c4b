"""`slipstream bench step` measures what it says: the real scheduler, in steady decode and with requests that
end."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from slipstream.cli.main import main
from slipstream.cli.step_load import STEPS_IN_FLIGHT, StepLoad, measure


def test_the_report_holds_every_part_of_every_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "step.json"
    assert main(["bench", "step", "--rows", "1", "8", "--steps", "60", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert [run["rows"] for run in report["runs"]] == [1, 8]
    for run in report["runs"]:
        for part in ("schedule", "apply", "output", "total"):
            assert 0 < run[part]["median"] <= run[part]["p90"] <= run[part]["p99"]
        assert run["total"]["median"] >= max(run[part]["median"] for part in ("schedule", "apply", "output"))
    assert "median" in capsys.readouterr().out


def test_steady_decode_keeps_its_lanes_and_crosses_block_boundaries() -> None:
    run = measure(8, 160)
    assert run["lane_changes"] == 0
    assert abs(run["blocks_granted"] - 8 * 160 / 16) <= 8 * 2  # up to one block ahead, and one rounded up


def test_requests_that_end_are_replaced_so_that_all_rows_stay_busy() -> None:
    load = StepLoad(8, 100, 10)
    load.fill()
    lanes = []
    for _ in range(100):
        plans, _ = load.step()
        lanes += [len(plan.lane_row) for plan in plans]
    # A row is empty only between its owner's last token and the plan after its result.
    assert np.mean(lanes) > 8 - STEPS_IN_FLIGHT
    assert measure(8, 100, 10)["lane_changes"] > 20


@pytest.mark.parametrize("flags", [["--rows", "0"], ["--steps", "-1"], ["--output-len", "x"]])
def test_a_count_that_is_none_is_refused_with_the_flags_name(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", "step", *flags])
    assert end.value.code == 2 and flags[0] in capsys.readouterr().err
