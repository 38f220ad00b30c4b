"""The draw: Gumbel noise on what truncation left, so that the highest logit is a sample.

Greedy rows have none. Noise is a function of (seed, position, token id) alone: a row draws the same token in
any lane, batch and step.
"""

from __future__ import annotations

import torch

from slipstream.contracts.request import EngineRequest
from slipstream.kernels.noise import PURPOSE_TOKEN, lane_keys
from slipstream.kernels.sampling import add_gumbel, draw_among_top
from slipstream.rows.columns import Column, RowWriter
from slipstream.sampling.protocol import SampleBatch
from slipstream.sampling.top_k import SMALL_TOP_K, has_small_top_k

Tensor = torch.Tensor

# Room for tokens that are equal to the last of the top k.
NUM_CANDIDATES = 2 * SMALL_TOP_K


class Draw:
    """Noise on the whole vocabulary. Reads the base columns seed_lo and seed_hi."""

    name = "draw"
    columns: tuple[Column, ...] = ()

    def admit(self, request: EngineRequest, write: RowWriter) -> bool:
        return not request.params.greedy and not has_small_top_k(request.params)

    def apply(self, logits_NV: Tensor, batch: SampleBatch) -> None:
        lane_n = batch.feature_lanes[self.name]
        add_gumbel(logits_NV, lane_n, token_keys(batch, lane_n))


class DrawAmongTop:
    """top_k, top_p and noise at once, for rows with a small top_k. Reads the columns of TopK and TopP."""

    name = "draw_among_top"
    columns: tuple[Column, ...] = ()

    def admit(self, request: EngineRequest, write: RowWriter) -> bool:
        return has_small_top_k(request.params)

    def apply(self, logits_NV: Tensor, batch: SampleBatch) -> None:
        lane_n = batch.feature_lanes[self.name]
        draw_among_top(
            logits_NV,
            lane_n,
            batch.of(lane_n, "top_k"),
            batch.of(lane_n, "top_p"),
            token_keys(batch, lane_n),
            NUM_CANDIDATES,
        )


def token_keys(batch: SampleBatch, lane_n: Tensor) -> Tensor:
    """The noise keys of the tokens to be drawn, int32 [2, n]."""
    return lane_keys(
        batch.of(lane_n, "seed_lo"), batch.of(lane_n, "seed_hi"), batch.length_N[lane_n], PURPOSE_TOKEN
    )
