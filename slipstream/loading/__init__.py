"""Reads models from disk: specs, weights, vocabularies, the demo model. With rows/, the only place where
tensors change device. Import from the files themselves where torch must not be loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.loading.load import load_model, read_spec

__all__ = ["load_model", "read_spec"]


def __getattr__(name: str) -> Any:
    """load_model and read_spec come with torch, which the front end reads a vocabulary without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from slipstream.loading import load

    return getattr(load, name)
