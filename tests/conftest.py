"""Fixtures that several folders of tests share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_tiny_model


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
