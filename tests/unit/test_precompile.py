"""Kernels that are compiled ahead: what is remembered of them."""

import os
import subprocess
import sys

from slipstream.kernels import cache, precompile
from slipstream.kernels.precompile import Known, Workers


def test_launches_that_were_compiled_are_known_at_the_next_start(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    first = Known()
    assert not first
    assert first.missing(["a", "b"]) == ["a", "b"]
    first.add(["a", "b"])
    second = Known()
    assert second
    assert second.missing(["b", "c", "a"]) == ["c"]
    second.add(["c"])
    assert Known().missing(["a", "b", "c", "d"]) == ["d"]


def test_a_change_of_the_sources_begins_anew(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    Known().add(["a"])
    copied = tmp_path / "kernels"
    copied.mkdir()
    (copied / "precompile.py").write_text("other")
    monkeypatch.setattr(precompile, "__file__", str(copied / "precompile.py"))
    assert not Known()


def test_a_kernels_key_is_the_same_in_whatever_order_kernels_are_met():
    """Else what a worker compiled would not be found by the process that launches it."""
    keys = []
    for order in ("sorted(modules)", "sorted(modules, reverse=True)"):
        script = f"""
import importlib, pathlib, slipstream.kernels as package
from slipstream.kernels.backend import triton
from slipstream.kernels.precompile import settle_key
modules = [file.stem for file in pathlib.Path(package.__path__[0]).glob("[a-z]*.py")]
for name in {order}:
    module = importlib.import_module("slipstream.kernels." + name)
    for kernel in vars(module).values():
        if isinstance(kernel, triton.runtime.jit.JITFunction):
            settle_key(kernel)
            print(kernel.__module__, kernel.__name__, kernel.cache_key)
"""
        environment = {**os.environ, "SLIPSTREAM_COMPILE_KERNELS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, check=True, capture_output=True, text=True
        )
        keys.append(sorted(set(done.stdout.splitlines())))
    assert len(keys[0]) > 50
    assert keys[0] == keys[1]


def test_a_process_that_dies_over_a_kernel_is_missed_and_leaves_no_open_pipe(monkeypatch, caplog):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    workers = Workers((9, 0))
    workers.compile(["not a launch"])
    (process,) = workers._workers
    assert process.poll() == 1 and process.stdin.closed and process.stdout.closed
    assert "has died" in caplog.text
