"""min_tokens: the ids that end a row are impossible until its output is that long.

Where a grammar decides what is legal, it also decides whether an end can be put off (grammar/matchers.py).
"""

from __future__ import annotations

import torch

from slipstream.contracts.request import EngineRequest
from slipstream.kernels.edit_rows import ban_ends_rows
from slipstream.kernels.masks import ban_at
from slipstream.rows.columns import Column, RowWriter
from slipstream.sampling.protocol import SampleBatch

Tensor = torch.Tensor


class MinTokens:
    """Reads the base columns end_ids (filled up with -1) and min_len."""

    name = "min_tokens"
    columns: tuple[Column, ...] = ()

    def admit(self, request: EngineRequest, write: RowWriter) -> bool:
        return request.params.min_tokens > 0 and len(request.end_token_ids) > 0 and not request.grammar

    def apply(self, logits_NV: Tensor, batch: SampleBatch) -> None:
        lane_n = batch.feature_lanes[self.name]
        id_nK = batch.of(lane_n, "end_ids")
        early_n = batch.length_N[lane_n] < batch.of(lane_n, "min_len")
        ban_at(logits_NV, lane_n, id_nK.clamp(min=0), (id_nK >= 0) & early_n.unsqueeze(1))

    def launch(self, logits_NV: Tensor, batch: SampleBatch, bit: int) -> None:
        columns = batch.columns
        ban_ends_rows(logits_NV, batch.using(bit), batch.length_N, columns["min_len"], columns["end_ids"])
