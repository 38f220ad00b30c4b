"""Compiling many kernels at once, in processes of their own, before any of them is launched.

Triton compiles a kernel when it is first launched, one after the other, and holds Python's lock for a good
part of that: a first start would wait most of a minute. So the launches of a trial run are listed without
being done, the kernels are compiled side by side into Triton's cache on disk, and the real launches find them
there. A worker is this module as a program (python -m slipstream.kernels.precompile): it has no device.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from ctypes.util import find_library
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from slipstream.kernels.backend import triton
from slipstream.kernels.cache import VARIABLE

log = logging.getLogger("slipstream.kernels")

MOST_WORKERS = 16
# These take seconds each, most others a fraction: begun last, one would keep all waiting.
SLOWEST = ("_pick_kernel", "_decode_kernel", "direct_kernel")


_listing = False


def is_listing() -> bool:
    """Whether launches are being listed instead of done: what other compilers launch may not be listed, and
    libraries whose kernels need more than zeros may not run."""
    return _listing


class _Zeros(TorchFunctionMode):
    """What would be written by kernels reads as zeros, which are valid as tokens, positions and indices: in
    tensors that are made as the package makes them."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _FILLED.get(function, function)(*args, **(kwargs or {}))


_FILLED = {
    torch.empty: torch.zeros,
    torch.empty_like: torch.zeros_like,
    torch.Tensor.new_empty: torch.Tensor.new_zeros,
}


def list_launches(run: Callable[[], object]) -> list[str]:
    """What run launches and is not compiled yet, once each. No kernel of Triton's is launched at all; what
    else there is in run finds zeros where they would have written."""
    found: dict[str, None] = {}
    function = triton.runtime.jit.JITFunction
    launch, runtime = function.run, triton.knobs.runtime

    def note(*_: Any, fn: Any, **facts: Any) -> bool:
        # Triton's own text of what a compilation depends on; its name alone does not tell the module.
        found[json.dumps({"module": fn.module, "data": facts["compile"]["specialization_data"]})] = None
        return True

    def only_look(kernel: Any, *args: Any, warmup: bool, **named: Any) -> Any:
        settle_key(kernel)
        return launch(kernel, *args, warmup=True, **named)

    global _listing
    before, runtime.jit_cache_hook = runtime.jit_cache_hook, note
    function.run, _listing = only_look, True
    try:
        with _Zeros():
            run()
    finally:
        _listing = False
        function.run, runtime.jit_cache_hook = launch, before
    return list(found)


def settle_key(kernel: Any) -> str:
    """The kernel's key. Triton's depends on whether the keys of the functions it calls were there before: it
    merges the globals that they use first, and looks for them afterwards. From the innermost outwards it is
    the same in every process; else what a worker compiled would not be found."""
    for name in kernel.fn.__code__.co_names:
        callee = kernel.fn.__globals__.get(name)
        if isinstance(callee, triton.runtime.jit.JITFunction):
            settle_key(callee)
    key: str = kernel.cache_key
    return key


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
        left = iter(sorted(launches, key=lambda launch: not any(name in launch for name in SLOWEST)))
        threads = [threading.Thread(target=self._feed, args=(worker, left)) for worker in self._workers]
        for thread in threads:
            thread.start()
        meanwhile()
        for thread in threads:
            thread.join()

    def _feed(self, worker: subprocess.Popen[str], left: Iterator[str]) -> None:
        """A worker gets one launch after the other: some take many times as long as others. left: what all
        have to do between them."""
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            for launch in left:
                worker.stdin.write(launch + "\n")
                worker.stdin.flush()
                if not worker.stdout.readline():
                    raise BrokenPipeError
        except BrokenPipeError:
            log.warning("a process that compiles kernels has died; its kernel is compiled at first launch")
        _end(worker)

    def stop(self) -> None:
        """End them without work."""
        for worker in self._workers:
            worker.kill()
            _end(worker)


def _end(worker: subprocess.Popen[str]) -> None:
    """Close its pipes, at which it ends, and wait for that."""
    with contextlib.suppress(BrokenPipeError), worker:  # what a dead one has not read goes nowhere
        pass


class Known:
    """Which launches were compiled on this machine before, by a list in Triton's cache. It begins anew when
    the sources of this package change."""

    def __init__(self) -> None:
        digest = hashlib.sha256()
        for source in sorted(Path(__file__).parent.glob("*.py")):
            digest.update(source.read_bytes())
        self._file = Path(os.environ[VARIABLE]) / f"known-{digest.hexdigest()[:24]}"
        self._names = set(self._file.read_text().split()) if self._file.exists() else set()

    def __bool__(self) -> bool:
        """False at a first start."""
        return bool(self._names)

    def missing(self, launches: Sequence[str]) -> list[str]:
        """Those of them that are new here."""
        return [launch for launch in launches if _name(launch) not in self._names]

    def add(self, launches: Sequence[str]) -> None:
        """They are compiled now. Engines that start side by side may both add: a line a launch, at the
        end."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a") as file:
            file.write("".join(f"{_name(launch)}\n" for launch in launches))


def _name(launch: str) -> str:
    return hashlib.sha256(launch.encode()).hexdigest()[:32]


class _NoDevice:
    """As much of a Triton driver as compiling for a target needs."""

    def __init__(self, capability: int) -> None:
        compiler = import_module("triton.backends.compiler")
        self._target = compiler.GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


def _build_launcher(kernel: Any) -> None:
    """Up to Triton 3.6 a kernel's launcher is a C module of its own, which takes gcc a third of a second."""
    nvidia = import_module("triton.backends.nvidia.driver")
    if hasattr(nvidia, "make_launcher"):
        nvidia.CudaLauncher(kernel.src, kernel.metadata)


def main() -> None:
    """Compiles what is named on standard input, a launch a line."""
    driver = import_module("triton.runtime.driver").driver
    driver.set_active(_NoDevice(int(sys.argv[1])))
    for line in sys.stdin:
        launch = json.loads(line)
        name = json.loads(launch["data"])["name"].rpartition(".")[2]
        function = getattr(import_module(launch["module"]), name)
        settle_key(function)
        kernel = function.preload(launch["data"])
        if find_library("cuda") is not None:
            _build_launcher(kernel)
        print("done", flush=True)


if __name__ == "__main__":
    main()
