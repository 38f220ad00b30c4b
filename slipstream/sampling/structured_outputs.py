"""structured_outputs: tokens that the grammar does not allow next become impossible.

The host computes masks from the row's tokens (grammar/), and the plan of each step in which the row samples
writes them, so admission leaves the column as it is: for the next token, and for those after each draft that
the plan brings along.
"""

from __future__ import annotations

import torch

from slipstream.contracts.request import EngineRequest
from slipstream.contracts.step import mask_words
from slipstream.kernels.edit_rows import MaskPlaces, allow_rows
from slipstream.kernels.masks import allow_only
from slipstream.rows.columns import LEGAL, Column, RowWriter
from slipstream.sampling.protocol import SampleBatch

Tensor = torch.Tensor


class StructuredOutputs:
    """Column legal: `places` masks, of which token t is bit t % 32 of word t // 32."""

    name = "structured_outputs"

    def __init__(self, vocab_size: int, places: int) -> None:
        words = mask_words(vocab_size)
        self._places = places
        self.columns: tuple[Column, ...] = (Column(LEGAL, width=places * words, writer="plan"),)

    def admit(self, request: EngineRequest, write: RowWriter) -> bool:
        return bool(request.grammar)

    def apply(self, logits_NV: Tensor, batch: SampleBatch) -> None:
        lane_n = batch.feature_lanes[self.name]
        legal_nW = batch.of(lane_n, LEGAL)
        if self._places > 1:
            place_n = (batch.length_N[lane_n] - batch.of(lane_n, "length")).clamp(0, self._places - 1)
            legal_nPW = legal_nW.view(len(lane_n), self._places, -1)
            legal_nW = legal_nPW[torch.arange(len(lane_n), device=lane_n.device), place_n.long()]
        allow_only(logits_NV, lane_n, legal_nW)

    def launch(self, logits_NV: Tensor, batch: SampleBatch, bit: int) -> None:
        places = MaskPlaces(self._places, batch.length_N, batch.columns["length"])
        allow_rows(logits_NV, batch.using(bit), batch.columns[LEGAL], places)
