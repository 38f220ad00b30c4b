"""A worker process with a fault, for tests: python -m faulty_worker. FAULT in the environment says which:

poison: it is killed in any step that computes a request with the token POISON; hungry: a step of more tokens
than FITS, or with POISON, finds too little memory; doomed: it is killed in every step; broken: every step
raises; hold: the device runs none of the first HELD steps before the plan of the next one is there; starving:
the device finds no memory in one step; slow: the first step is launched late.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from slipstream.engine import worker_process
from slipstream.engine.faults import LOOK_SECONDS

POISON, FITS, HELD = 77, 48, 40


def watch(runner: Any, fault: Callable[[Any, set[int]], None]) -> None:
    """fault: called before each step with its plan and the rows of poisoned requests."""
    step, poisoned = runner.step, set()

    def watched(plan: Any) -> Any:
        for admission in plan.admissions:
            bad = POISON in admission.request.prompt_token_ids
            (poisoned.add if bad else poisoned.discard)(admission.row)
        fault(plan, poisoned & set(plan.lane_row.tolist()))
        return step(plan)

    runner.step = watched


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def poison(plan: Any, rows: set[int]) -> None:
    if rows:
        die()


def hungry(plan: Any, rows: set[int]) -> None:
    if rows or plan.lane_query_len.sum() > FITS:
        raise torch.OutOfMemoryError("CUDA out of memory, as it were")


def doomed(plan: Any, rows: set[int]) -> None:
    die()


def broken(plan: Any, rows: set[int]) -> None:
    raise RuntimeError("the device fell off")


def slow(plan: Any, rows: set[int]) -> None:
    if plan.step == 0:
        time.sleep(4 * LOOK_SECONDS)


def starving(runner: Any) -> None:
    """With other steps before and after it in flight."""
    run, counted = runner._tick.run, itertools.count()

    def starved(work: Any) -> Any:
        if next(counted) == 10:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 byte")
        return run(work)

    runner._tick.run = starved


def hold(runner: Any) -> None:
    """A worker that waited for a result before it took the next plan would wait for ever. For a CPU: what a
    CUDA stream is given runs at once."""
    step, came = runner.step, defaultdict[int, threading.Event](threading.Event)

    def held(plan: Any) -> Any:
        came[plan.step].set()
        following = came[plan.step + 1]
        if plan.step < HELD:
            runner.stream.submit(following.wait)
        return step(plan)

    runner.step = held


if __name__ == "__main__":
    build = worker_process.build_runner

    def build_with_fault(plan: Any, known: Any) -> Any:
        built = build(plan, known)
        fault = os.environ["FAULT"]
        if fault in ("hold", "starving"):
            globals()[fault](built.runner)
        else:
            watch(built.runner, globals()[fault])
        return built

    worker_process.build_runner = build_with_fault
    sys.exit(worker_process.main())
