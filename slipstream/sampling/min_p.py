"""min_p: tokens less probable than min_p times the most probable one are dropped, after temperature."""

from __future__ import annotations

import torch

from slipstream.contracts.request import EngineRequest
from slipstream.kernels.truncate import keep_min_p
from slipstream.rows.columns import Column, RowWriter
from slipstream.sampling.protocol import SampleBatch

Tensor = torch.Tensor


class MinP:
    """Column min_p."""

    name = "min_p"
    columns: tuple[Column, ...] = (Column("min_p", "f32"),)

    def admit(self, request: EngineRequest, write: RowWriter) -> bool:
        write.scalar("min_p", request.params.min_p)
        return not request.params.greedy and request.params.min_p > 0

    def apply(self, logits_NV: Tensor, batch: SampleBatch) -> None:
        lane_n = batch.feature_lanes[self.name]
        keep_min_p(logits_NV, lane_n, batch.of(lane_n, "min_p"))
