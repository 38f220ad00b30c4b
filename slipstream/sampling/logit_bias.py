"""logit_bias: a number added to some tokens' logits."""

from __future__ import annotations

import numpy as np
import torch

from slipstream.contracts.limits import MAX_LOGIT_BIAS
from slipstream.contracts.request import EngineRequest
from slipstream.kernels.edit_rows import add_rows
from slipstream.kernels.masks import add_at
from slipstream.rows.columns import Column, RowWriter
from slipstream.sampling.protocol import SampleBatch

Tensor = torch.Tensor


class LogitBias:
    """Columns bias_ids and bias_values; entries not used add 0 to token 0."""

    name = "logit_bias"
    columns: tuple[Column, ...] = (
        Column("bias_ids", width=MAX_LOGIT_BIAS),
        Column("bias_values", "f32", width=MAX_LOGIT_BIAS),
    )

    def admit(self, request: EngineRequest, write: RowWriter) -> bool:
        bias = request.params.logit_bias
        if not bias:
            return False
        ids, values = np.zeros(MAX_LOGIT_BIAS, np.int32), np.zeros(MAX_LOGIT_BIAS, np.float32)
        ids[: len(bias)] = list(bias.keys())
        values[: len(bias)] = list(bias.values())
        write.span("bias_ids", ids)
        write.span("bias_values", values)
        return True

    def apply(self, logits_NV: Tensor, batch: SampleBatch) -> None:
        lane_n = batch.feature_lanes[self.name]
        add_at(logits_NV, lane_n, batch.of(lane_n, "bias_ids"), batch.of(lane_n, "bias_values"))

    def launch(self, logits_NV: Tensor, batch: SampleBatch, bit: int) -> None:
        add_rows(logits_NV, batch.using(bit), batch.columns["bias_ids"], batch.columns["bias_values"])
