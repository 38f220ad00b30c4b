"""allowed_token_ids: every other token becomes impossible.

A list may hold the whole vocabulary, so the row keeps a bit a token: V / 8 bytes a row, 6 KiB at 49,152
tokens and 19 KiB at 152k (1.6 and 4.9 MB of a table of 257 rows). Admission writes it only where it is used.
"""

from __future__ import annotations

import numpy as np
import torch

from slipstream.contracts.request import EngineRequest
from slipstream.kernels.edit_rows import allow_rows
from slipstream.kernels.masks import allow_only
from slipstream.rows.columns import Column, RowWriter
from slipstream.sampling.protocol import SampleBatch

Tensor = torch.Tensor


class AllowedTokenIds:
    """Column allowed_mask: token t is bit t % 32 of word t // 32."""

    name = "allowed_token_ids"

    def __init__(self, vocab_size: int) -> None:
        self._words = max(2, -(-vocab_size // 32))  # a column of one word would be a scalar
        self.columns: tuple[Column, ...] = (Column("allowed_mask", width=self._words),)

    def admit(self, request: EngineRequest, write: RowWriter) -> bool:
        allowed = request.params.allowed_token_ids
        if allowed is None:
            return False
        bits = np.zeros(self._words * 32, np.bool_)
        bits[np.asarray(allowed)] = True
        write.span("allowed_mask", np.packbits(bits, bitorder="little").view("<i4"))
        return True

    def apply(self, logits_NV: Tensor, batch: SampleBatch) -> None:
        lane_n = batch.feature_lanes[self.name]
        allow_only(logits_NV, lane_n, batch.of(lane_n, "allowed_mask"))

    def launch(self, logits_NV: Tensor, batch: SampleBatch, bit: int) -> None:
        allow_rows(logits_NV, batch.using(bit), batch.columns["allowed_mask"])
