"""structured_outputs: tokens that the grammar does not allow next become impossible.

The host computes the mask from the row's tokens (grammar/) and the plan of each step in which the row samples
writes it, so admission leaves the column as it is. It holds for the one token that such a step gives the row.
"""

from __future__ import annotations

import torch

from slipstream.contracts.request import EngineRequest
from slipstream.kernels.edit_rows import allow_rows
from slipstream.kernels.masks import allow_only
from slipstream.rows.columns import LEGAL, Column, RowWriter
from slipstream.sampling.protocol import SampleBatch

Tensor = torch.Tensor


class StructuredOutputs:
    """Column legal: token t is bit t % 32 of word t // 32."""

    name = "structured_outputs"

    def __init__(self, vocab_size: int) -> None:
        width = max(2, -(-vocab_size // 32))  # a column of one word would be a scalar
        self.columns: tuple[Column, ...] = (Column(LEGAL, width=width, writer="plan"),)

    def admit(self, request: EngineRequest, write: RowWriter) -> bool:
        return bool(request.grammar)

    def apply(self, logits_NV: Tensor, batch: SampleBatch) -> None:
        lane_n = batch.feature_lanes[self.name]
        allow_only(logits_NV, lane_n, batch.of(lane_n, LEGAL))

    def launch(self, logits_NV: Tensor, batch: SampleBatch, bit: int) -> None:
        allow_rows(logits_NV, batch.using(bit), batch.columns[LEGAL])
