"""Where compiled kernels are kept, so that a second start compiles nothing."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

import torch

VARIABLE = "TRITON_CACHE_DIR"


def keep_compiled_kernels() -> None:
    """Names Triton's folder, one for each pair of versions, unless the user has. Triton and torch's inductor
    read the variable when they compile, but backend.py calls this before it imports Triton."""
    try:
        versions = f"triton-{metadata.version('triton')}-torch-{torch.__version__}"
    except metadata.PackageNotFoundError:
        return  # nothing will be compiled
    os.environ.setdefault(VARIABLE, str(Path("~/.cache/slipstream/triton").expanduser() / versions))
