"""Runs cases_triton.py in a process of its own, because Triton reads TRITON_INTERPRET when it is imported."""

import os
import subprocess
import sys
from pathlib import Path


def test_the_old_runner_runs_on_tritons_attention():
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    cases = Path(__file__).with_name("cases_triton.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)],
        env=env, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
