"""Every Triton kernel that an engine launches passes Triton's compiler as far as its own language goes: the
interpreter takes more Python than the compiler. No device and no assembler are needed. And a start's trial of
one layer of each kind launches all that the whole model does.

The launches are those of whole bucketed steps of tiny models, in a process of its own whose Triton believes
in a Hopper GPU.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", ["plain", "float8", "invariant", "window", "drafts", "drafters", "compiled"])
def test_kernels_of_an_engine_compile(kind, tiny_model):
    family = "mistral" if kind == "window" else "qwen3"
    more = dict(sliding_window=24) if kind == "window" else {}
    model = tiny_model(family, num_hidden_layers=4, **more)
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "compile_kernels.py"), str(model), kind],
        env=env | {"PYTHONPATH": str(ROOT), "SLIPSTREAM_COMPILE_KERNELS": "1"},
        capture_output=True, text=True, timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[0]) > 25
