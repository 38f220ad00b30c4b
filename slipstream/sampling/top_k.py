"""top_k: only the k highest logits stay, with those equal to the last of them.

A small k goes the short way: see draw.py.
"""

from __future__ import annotations

import torch

from slipstream.contracts.request import EngineRequest
from slipstream.contracts.sampling_params import SamplingParams
from slipstream.kernels.truncate import keep_top_k
from slipstream.rows.columns import Column, RowWriter
from slipstream.sampling.protocol import SampleBatch

Tensor = torch.Tensor

SMALL_TOP_K = 64


def has_small_top_k(params: SamplingParams) -> bool:
    """True where top_k, top_p and the draw are done on a few candidates."""
    return not params.greedy and 0 < params.top_k <= SMALL_TOP_K


class TopK:
    """Column top_k."""

    name = "top_k"
    columns: tuple[Column, ...] = (Column("top_k"),)

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def admit(self, request: EngineRequest, write: RowWriter) -> bool:
        params = request.params
        write.scalar("top_k", params.top_k)
        return not params.greedy and SMALL_TOP_K < params.top_k < self._vocab_size

    def apply(self, logits_NV: Tensor, batch: SampleBatch) -> None:
        lane_n = batch.feature_lanes[self.name]
        keep_top_k(logits_NV, lane_n, batch.of(lane_n, "top_k"))
