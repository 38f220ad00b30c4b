"""The version that runs."""

from __future__ import annotations

from importlib import metadata


def package_version() -> str:
    """The installed version; "unknown" when run from a bare source tree."""
    try:
        return metadata.version("slipstream")
    except metadata.PackageNotFoundError:
        return "unknown"
