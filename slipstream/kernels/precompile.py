"""Compiling many kernels at once, in processes of their own, before any of them is launched.

Triton compiles a kernel when it is first launched, one after the other, and holds Python's lock for a good
part of that: a first start would wait most of a minute. So the launches of a trial run are listed without
being done, the kernels are compiled side by side into Triton's cache on disk, and the real launches find them
there. A worker is this module as a program (python -m slipstream.kernels.precompile): it has no device.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from slipstream.kernels.backend import triton
from slipstream.kernels.cache import VARIABLE

log = logging.getLogger("slipstream.kernels")

MOST_WORKERS = 16


def list_launches(run: Callable[[], object]) -> list[str]:
    """run launches kernels; those that are not compiled yet are listed instead, once each, and what they
    would have written is not. So nothing in run may depend on a kernel's result, not even on its being a
    valid index."""
    found: dict[str, None] = {}

    def note(*_: Any, fn: Any, **facts: Any) -> bool:
        # Triton's own text of what a compilation depends on; its name alone does not tell the module.
        found[json.dumps({"module": fn.module, "data": facts["compile"]["specialization_data"]})] = None
        return True

    runtime = triton.knobs.runtime
    before, runtime.jit_cache_hook = runtime.jit_cache_hook, note
    try:
        run()
    finally:
        runtime.jit_cache_hook = before
    return list(found)


class Workers:
    """Processes that import torch and Triton while others do their work. capability: (major, minor) of the
    device to compile for."""

    def __init__(self, capability: tuple[int, int]) -> None:
        count = min(MOST_WORKERS, os.cpu_count() or 1)
        target = str(10 * capability[0] + capability[1])
        command = [sys.executable, "-m", "slipstream.kernels.precompile", target]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


        def start() -> subprocess.Popen[str]:
            pipe = subprocess.PIPE
            return subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, text=True)

        self._workers = [start() for _ in range(count)]

    def compile(self, launches: Sequence[str], meanwhile: Callable[[], object] = lambda: None) -> None:
        """Returns when all are done, and `meanwhile`, which runs at the same time. A kernel that a worker
        could not compile is compiled at its launch, where its error shows."""
        left = list(reversed(launches))
        threads = [threading.Thread(target=self._feed, args=(worker, left)) for worker in self._workers]
        for thread in threads:
            thread.start()
        meanwhile()
        for thread in threads:
            thread.join()

    def _feed(self, worker: subprocess.Popen[str], left: list[str]) -> None:
        """A worker gets one launch after the other: some take many times as long as others."""
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            while True:
                worker.stdin.write(left.pop() + "\n")
                worker.stdin.flush()
                if not worker.stdout.readline():
                    raise BrokenPipeError
        except IndexError:
            worker.stdin.close()
        except BrokenPipeError:
            log.warning("a process that compiles kernels has died; its kernel is compiled at first launch")
        worker.wait()

    def stop(self) -> None:
        """End them without work."""
        for worker in self._workers:
            worker.kill()
            worker.wait()


class Finished:
    """The mark in Triton's cache that all kernels of some engine are there: `facts` decide which they are,
    and the sources of this package."""

    def __init__(self, facts: str) -> None:
        sources = sorted(Path(__file__).parent.glob("*.py"))
        digest = hashlib.sha256(facts.encode())
        for source in sources:
            digest.update(source.read_bytes())
        self._file = Path(os.environ[VARIABLE]) / f"complete-{digest.hexdigest()[:24]}"

    def __bool__(self) -> bool:
        return self._file.exists()

    def mark(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.touch()


class _NoDevice:
    """As much of a Triton driver as compiling for a target needs."""

    def __init__(self, capability: int) -> None:
        compiler = import_module("triton.backends.compiler")
        self._target = compiler.GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


def main() -> None:
    """Compiles what is named on standard input, a launch a line."""
    driver = import_module("triton.runtime.driver").driver
    driver.set_active(_NoDevice(int(sys.argv[1])))
    for line in sys.stdin:
        launch = json.loads(line)
        name = json.loads(launch["data"])["name"].rpartition(".")[2]
        getattr(import_module(launch["module"]), name).preload(launch["data"])
        print("done", flush=True)


if __name__ == "__main__":
    main()
