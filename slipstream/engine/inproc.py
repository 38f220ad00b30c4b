"""The engine in this process: receive() runs steps."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.contracts.outputs import EngineOutputs
from slipstream.contracts.request import EngineRequest
from slipstream.engine.core import EngineCore


class InprocClient:
    """An EngineClient whose caller lends its thread to the engine."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.info = core.info

    def add(self, requests: Sequence[EngineRequest]) -> None:
        self.core.add(requests)

    def abort(self, keys: Sequence[int]) -> None:
        self.core.abort(keys)

    def receive(self, timeout: float | None = None) -> EngineOutputs | None:
        """One step's outputs; None where there is no work. A step is never cut short, whatever the
        timeout."""
        outputs = None
        while outputs is None and self.core.has_work:
            outputs = self.core.step()
        return outputs

    def close(self) -> None:
        self.core.close()
