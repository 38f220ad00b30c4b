"""temperature: logits are divided by it. Greedy rows (under 1e-5) and rows at 1 have nothing to do."""

from __future__ import annotations

import torch

from slipstream.contracts.request import EngineRequest
from slipstream.kernels.sampling import divide_temperature
from slipstream.rows.columns import Column, RowWriter
from slipstream.sampling.protocol import SampleBatch

Tensor = torch.Tensor


class Temperature:
    """Column temperature, 0 for greedy rows."""

    name = "temperature"
    columns: tuple[Column, ...] = (Column("temperature", "f32", default=1.0),)

    def admit(self, request: EngineRequest, write: RowWriter) -> bool:
        write.scalar("temperature", 0.0 if request.params.greedy else request.params.temperature)
        return not request.params.greedy and request.params.temperature != 1.0

    def apply(self, logits_NV: Tensor, batch: SampleBatch) -> None:
        lane_n = batch.feature_lanes[self.name]
        divide_temperature(logits_NV, lane_n, batch.of(lane_n, "temperature"))
