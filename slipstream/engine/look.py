"""What somebody who looks at a running engine sees, and those who wait to see it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from slipstream.contracts.outputs import EngineOutputs, EngineSnapshot, EngineStats
from slipstream.engine.output_processor import OutputProcessor
from slipstream.engine.request_state import RequestState


@dataclass(frozen=True, slots=True)
class Look:
    """The engine at one moment. owners: the live request of each row that has one in this front end."""

    snapshot: EngineSnapshot
    stats: EngineStats
    owners: Mapping[int, RequestState]


class Lookers:
    """Those who wait for the next snapshot: however many, the engine makes one. One event loop's thread."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[Look]] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def join(self) -> asyncio.Future[Look]:
        future: asyncio.Future[Look] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        return future

    def show(self, outputs: EngineOutputs, requests: OutputProcessor) -> None:
        """Outputs came; where they hold a snapshot, everybody gets it."""
        snapshot = outputs.snapshot
        if snapshot is None:
            return
        rows = np.flatnonzero(snapshot.phase)
        owners = {}
        for row, key in zip(rows.tolist(), snapshot.key[rows].tolist(), strict=True):
            if (state := requests.request_of(key)) is not None:
                owners[row] = state
        for future in self._take():
            future.set_result(Look(snapshot, outputs.stats, owners))

    def fail(self, error: Exception) -> None:
        """There will be no snapshot."""
        for future in self._take():
            future.set_exception(error)

    def _take(self) -> list[asyncio.Future[Look]]:
        taken, self._waiting = self._waiting, []
        return [future for future in taken if not future.done()]
