"""Compiled kernels go to a folder that outlives the process. Each case is a process of its own, as the folder
is chosen once."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch

SCRIPT = """
import slipstream.kernels.backend as backend
print(backend.triton.knobs.cache.dir)
"""


def folder_of(home: Path, **environment: str) -> Path:
    """What Triton itself says, in a process with this home."""
    base = {name: value for name, value in os.environ.items() if name != "TRITON_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=base | {"HOME": str(home), "SLIPSTREAM_COMPILE_KERNELS": "1"} | environment,
        capture_output=True,
        text=True, check=True,
    )
    return Path(done.stdout.strip())


def test_kernels_are_kept_in_the_users_cache_by_version(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    assert folder.parent == tmp_path / ".cache" / "slipstream" / "triton"
    assert metadata.version("triton") in folder.name and torch.__version__ in folder.name


def test_a_folder_that_the_user_named_is_kept(tmp_path: Path) -> None:
    assert folder_of(tmp_path, TRITON_CACHE_DIR=str(tmp_path / "mine")) == tmp_path / "mine"
