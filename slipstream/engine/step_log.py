"""What the last steps cost on the host and on the device: totals for metrics, a window for who looks. A step
pays about a microsecond for it, whoever looks."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from slipstream.contracts.outputs import STEP_COLUMNS, EngineStats
from slipstream.engine.runners import DeviceTime

KEPT = 256  # steps


class Launch(NamedTuple):
    """A step on its way to the device. Times: time.perf_counter() seconds. tokens: computed in it. starved:
    nothing was left on the device when the host launched it, though there was work."""

    step: int
    lanes: int
    tokens: int
    plan_begin: float
    launch_begin: float
    launch_end: float
    starved: bool


class StepLog:
    """Device times are as the host sees them: on CUDA a step's begin is its launch or its predecessor's end,
    whichever is later, and an idle device whose end was noticed late counts too little."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._steps: deque[tuple[float, ...]] = deque(maxlen=KEPT)
        self._device_end = 0.0
        self._rested = True  # since the last step there was a time without work
        self._host = self._busy = self._idle = 0.0
        self._generated = self._computed = self._starved = 0
        self.worker_pid = self.worker_restarts = 0

    def rest(self) -> None:
        """There is no work: until the next step the device idles for want of requests, not of the host."""
        self._rested = True

    def duration(self, event: DeviceTime) -> float:
        """Seconds that the next step to be added took on the device."""
        return event.end - max(event.begin, self._device_end)

    def add(self, launch: Launch, event: DeviceTime, apply_begin: float, apply_end: float) -> float:
        """A step whose result was applied. Returns when the device began it."""
        end = event.end
        # A step that was launched while another ran begins when that one ends.
        begin = max(event.begin, self._device_end)
        if not self._rested:
            self._idle += begin - self._device_end
            self._starved += launch.starved
        self._rested = False
        self._busy += end - begin
        self._device_end = end
        self._computed += launch.tokens
        self._steps.append((*launch[:6], begin, end, apply_begin, apply_end))
        return begin

    def tell(self, stats: EngineStats, host: float, generated: int) -> None:
        """Put the totals into stats. host: seconds of this step; generated: tokens that it delivered."""
        self._host += host
        self._generated += generated
        stats.host_us = host * 1e6
        self.fill(stats)

    def fill(self, stats: EngineStats) -> None:
        """The totals alone."""
        stats.num_rows = self._num_rows
        stats.generation_tokens, stats.computed_tokens = self._generated, self._computed
        stats.steps_starved, stats.host_seconds = self._starved, self._host
        stats.device_busy_seconds, stats.device_idle_seconds = self._busy, self._idle
        stats.worker_pid, stats.worker_restarts = self.worker_pid, self.worker_restarts

    def table(self, now: float) -> np.ndarray:
        """float64 [S, STEP_COLUMNS], the oldest first; times in seconds before now."""
        steps = np.array(self._steps, np.float64).reshape(-1, len(STEP_COLUMNS))
        steps[:, 3:] -= now
        return steps
