"""N-gram drafts ("prompt lookup"): what followed the row's last tokens where they stood before. No model.

Parameters as in vLLM; of equally long matches the most recent counts, where vLLM takes the first.
"""

from __future__ import annotations

from slipstream.contracts.request import EngineRequest
from slipstream.kernels.attention_common import LayerAttention
from slipstream.kernels.history import LONGEST_MATCH, Histories
from slipstream.kernels.ngram import draft_ngrams
from slipstream.rows.columns import Column, RowWriter
from slipstream.speculation.protocol import Drafts, DraftStep


class Ngram:
    """See Drafter. lookup_min, lookup_max: tokens of the n-gram, the longest tried first; num_drafts: K.
    Raises ValueError where they are out of order or range."""

    name = "ngram"
    columns: tuple[Column, ...] = ()
    layers: tuple[LayerAttention, ...] = ()
    aux_layers: tuple[int, ...] = ()
    num_bytes = 0

    def __init__(self, *, lookup_min: int, lookup_max: int, num_drafts: int) -> None:
        if not 1 <= lookup_min <= lookup_max <= LONGEST_MATCH:
            raise ValueError(
                f"prompt_lookup_min={lookup_min}, prompt_lookup_max={lookup_max}: an n-gram has 1 to "
                f"{LONGEST_MATCH} tokens"
            )
        self._lookup_min, self._lookup_max, self._num_drafts = lookup_min, lookup_max, num_drafts

    def admit(self, request: EngineRequest, write: RowWriter) -> None:
        """Nothing of its own: it reads the row's tokens."""

    def propose(self, step: DraftStep) -> Drafts:
        histories = histories_of(step)
        return Drafts(*draft_ngrams(histories, self._lookup_min, self._lookup_max, self._num_drafts))


def histories_of(step: DraftStep) -> Histories:
    """The texts of a step's lanes."""
    columns = step.columns
    return Histories(
        step.inputs.row_L, step.appended_L, columns["tokens"], columns["length"], columns["alive"]
    )
