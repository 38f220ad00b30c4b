"""repetition_penalty, frequency_penalty, presence_penalty, in this order, as in vLLM.

Repetition looks at prompt and output, the other two at the output only. Counts come from the row's tokens, so
preemption and async steps need no state.
"""

from __future__ import annotations

import torch

from slipstream.contracts.request import EngineRequest
from slipstream.kernels.edit_rows import PenaltyColumns, penalise_rows
from slipstream.kernels.penalties import penalise
from slipstream.rows.columns import Column, RowWriter
from slipstream.sampling.protocol import SampleBatch

Tensor = torch.Tensor


class Penalties:
    """Columns of the three penalties' own names.

    max_lanes: lanes that launch will be given at most; it counts in 4 * vocab_size bytes a lane.
    """

    name = "penalties"
    columns: tuple[Column, ...] = (
        Column("repetition_penalty", "f32", default=1.0),
        Column("frequency_penalty", "f32"),
        Column("presence_penalty", "f32"),
    )

    def __init__(self, vocab_size: int = 0, max_lanes: int = 0, device: torch.device | None = None) -> None:
        self._count_NV = torch.zeros(max_lanes, vocab_size, dtype=torch.int32, device=device)

    def admit(self, request: EngineRequest, write: RowWriter) -> bool:
        params = request.params
        write.scalar("repetition_penalty", params.repetition_penalty)
        write.scalar("frequency_penalty", params.frequency_penalty)
        write.scalar("presence_penalty", params.presence_penalty)
        return (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1, 0, 0)

    def apply(self, logits_NV: Tensor, batch: SampleBatch) -> None:
        lane_n = batch.feature_lanes[self.name]
        penalise(
            logits_NV,
            lane_n,
            tokens_RM=batch.columns["tokens"],
            row_n=batch.row_N[lane_n],
            prompt_len_n=batch.of(lane_n, "prompt_len"),
            length_n=batch.length_N[lane_n],
            repetition_n=batch.of(lane_n, "repetition_penalty"),
            frequency_n=batch.of(lane_n, "frequency_penalty"),
            presence_n=batch.of(lane_n, "presence_penalty"),
        )

    def launch(self, logits_NV: Tensor, batch: SampleBatch, bit: int) -> None:
        names = ("tokens", "prompt_len", "repetition_penalty", "frequency_penalty", "presence_penalty")
        columns = PenaltyColumns(*(batch.columns[name] for name in names))
        penalise_rows(logits_NV, batch.using(bit), batch.length_N, columns, self._count_NV)
