"""The verifier: what steps whose rows have drafts do besides. There is room for drafts among the inputs, and
at the end they verify, propose and put.

Legend: T tokens, L lanes, N sampled positions, H hidden size, X auxiliary states, Q tokens a lane may gain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slipstream.attention.protocol import AttentionBackend, AttentionBatch
from slipstream.kernels.commit import CommitRing
from slipstream.kernels.commit_drafts import Appended, CommitColumns, chances, commit_drafts
from slipstream.kernels.draft_inputs import DraftColumns, DraftInputs, build_draft_inputs, wanted_drafts
from slipstream.kernels.put_drafts import put_drafts
from slipstream.rows.table import RowTable
from slipstream.sampling.pipeline import SampledTokens
from slipstream.speculation.protocol import Drafter, DraftStep

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Computed:
    """What a step computed, for the drafter. num_drafts: that it may propose; length_bound: of any lane after
    the step, drafts of the next not counted."""

    batch: AttentionBatch
    hidden_TH: Tensor
    aux_TX: Tensor | None
    num_drafts: int
    length_bound: int


class Verifier:
    """One for every drafter. acceptance: empty, or for each draft the probability with which it is taken,
    whatever the sampler says."""

    def __init__(
        self,
        table: RowTable,
        drafter: Drafter,
        attention: AttentionBackend,
        acceptance: Sequence[float] = (),
    ) -> None:
        self.drafter = drafter
        self._table, self._attention = table, attention
        columns = table.columns
        self._inputs = DraftColumns(
            columns["tokens"], columns["blocks"], columns["alive"], columns["length"],
            columns["num_computed"], columns["draft_count"],
        )  # fmt: skip
        self._commit = CommitColumns(
            columns["tokens"], columns["end_ids"], columns["alive"], columns["length"],
            columns["num_computed"], columns["max_len"], columns["draft_count"], columns["seed_lo"],
            columns["seed_hi"],
        )  # fmt: skip
        # Kept, and zero at first: a trial that computes nothing may use them as indices all the same.
        lanes, device = table.num_rows - 1, table.device
        self._out = Appended(
            torch.zeros(lanes, dtype=torch.int32, device=device),
            torch.zeros(lanes, dtype=torch.int64, device=device),
        )
        rates = torch.tensor(acceptance, dtype=torch.float64, device=device)
        self._accept = chances(rates) if len(acceptance) else None

    def wanted(self, lanes: int) -> Tensor:
        """int32 [L]: drafts that lanes would verify if there were room."""
        arrays = self._table.lanes
        return wanted_drafts(
            arrays["lane_to_row"][:lanes], arrays["lane_query_len"][:lanes], arrays["draft_limits"],
            self._inputs,
        )

    def inputs(self, lanes: int, tokens: int, samples: int) -> DraftInputs:
        """The inputs of the step that the table's lane arrays describe."""
        arrays = self._table.lanes
        return build_draft_inputs(
            arrays["lane_to_row"][:lanes], arrays["lane_query_len"][:lanes], arrays["draft_limits"], tokens,
            samples, self._inputs, self._table.block_size,
        )

    def finish(
        self, inputs: DraftInputs, sampled: SampledTokens, record: Tensor | CommitRing, step: Computed
    ) -> None:
        """Verify what was drafted, and draft anew."""
        lanes, columns = inputs.row_L.shape[0], self._table.columns
        out = Appended(self._out.appended_L[:lanes], self._out.source_L[:lanes])
        commit_drafts(inputs, sampled.tokens_N, sampled.ok_N, self._commit, record, out, self._accept)
        drafts = self.drafter.propose(
            DraftStep(
                inputs=inputs,
                batch=step.batch,
                columns=columns,
                attention=self._attention,
                block_size=self._table.block_size,
                appended_L=out.appended_L,
                source_L=out.source_L,
                hidden_TH=step.hidden_TH,
                aux_TX=step.aux_TX,
                length_bound=step.length_bound + step.num_drafts,
                num_drafts=step.num_drafts,
            )
        )
        if step.num_drafts:
            put_drafts(
                inputs.row_L, drafts.token_LK[:, : step.num_drafts], drafts.count_L, out.appended_L,
                tokens_RM=columns["tokens"], alive_R=columns["alive"], length_R=columns["length"],
                max_len_R=columns["max_len"], draft_count_R=columns["draft_count"],
            )  # fmt: skip
