"""top_p: only the fewest most probable tokens that together reach top_p stay, with those equal to
the last."""

from __future__ import annotations

import torch

from slipstream.contracts.request import EngineRequest
from slipstream.kernels.truncate import keep_top_p
from slipstream.rows.columns import Column, RowWriter
from slipstream.sampling.protocol import SampleBatch
from slipstream.sampling.top_k import has_small_top_k

Tensor = torch.Tensor


LEAST = torch.finfo(torch.float32).tiny  # a GPU may take what is nearer to 0 for 0, which keeps no token


class TopP:
    """Column top_p."""

    name = "top_p"
    columns: tuple[Column, ...] = (Column("top_p", "f32", default=1.0),)

    def admit(self, request: EngineRequest, write: RowWriter) -> bool:
        params = request.params
        write.scalar("top_p", max(params.top_p, LEAST))
        return not params.greedy and params.top_p < 1.0 and not has_small_top_k(params)

    def apply(self, logits_NV: Tensor, batch: SampleBatch) -> None:
        lane_n = batch.feature_lanes[self.name]
        keep_top_p(logits_NV, lane_n, batch.of(lane_n, "top_p"))
