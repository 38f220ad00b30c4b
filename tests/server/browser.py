"""A headless Chromium for tests of the dashboard: the machine's own, or the one that Playwright fetched."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        found = next(filter(None, map(shutil.which, NAMES)), None)
        if found is None and not Path(playwright.chromium.executable_path).exists():
            pytest.skip(f"no browser: none of {', '.join(NAMES)} on PATH, and none of Playwright's own")
        # A container's root user has no sandbox.
        flags = ["--no-sandbox"] if os.getuid() == 0 else []
        started = playwright.chromium.launch(executable_path=found, args=flags)
        yield started
        started.close()
