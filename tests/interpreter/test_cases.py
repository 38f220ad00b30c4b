"""Every Triton kernel in Triton's interpreter, on a CPU: tests/interpreter/cases_*.py, each in a process of
its own, because Triton reads TRITON_INTERPRET when it is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = sorted(Path(__file__).parent.glob("cases_*.py"))


@pytest.mark.parametrize("cases", CASES, ids=lambda path: path.stem)
def test_kernels_pass_in_tritons_interpreter(cases):
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)],
        env=env, capture_output=True, text=True, timeout=900,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
