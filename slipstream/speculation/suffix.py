"""Suffix drafts: the continuation that most occurrences of the row's end agree on, in the row itself and in
outputs of requests that have ended. No model.

Parameters as in vLLM (arctic-inference); kernels/suffix_draft.py states how a continuation is chosen.
"""

from __future__ import annotations

import torch

from slipstream.contracts.request import EngineRequest
from slipstream.kernels.attention_common import LayerAttention
from slipstream.kernels.backend import next_power_of_2
from slipstream.kernels.history import LONGEST_MATCH
from slipstream.kernels.suffix_draft import SuffixRules, draft_suffixes
from slipstream.kernels.suffix_log import log_outputs, make_log
from slipstream.rows.columns import Column, RowWriter
from slipstream.speculation.ngram import histories_of
from slipstream.speculation.protocol import Drafts, DraftStep

LOGGED = "suffix_logged"
# With its index 36 bytes a token.
MOST_LOGGED_TOKENS = 1 << 20


class Suffix:
    """See Drafter. max_tree_depth: one more than the longest match looked for, at most 64;
    max_cached_requests: past outputs remembered, the oldest forgotten first, and at most 2**20 tokens of
    them (0: none); max_spec_factor: drafts for a matched token; min_token_prob: the share of the occurrences'
    weight that has to agree; num_drafts: K. Raises ValueError where a number is out of range.

    An output is logged by the first step after the row's end, so one that the host ends (a stop string, an
    abort) is lost where another request takes the row at once.
    """

    name = "suffix"
    columns: tuple[Column, ...] = (Column(LOGGED, writer="commit"),)
    layers: tuple[LayerAttention, ...] = ()
    aux_layers: tuple[int, ...] = ()

    def __init__(
        self,
        *,
        max_tree_depth: int,
        max_cached_requests: int,
        max_spec_factor: float,
        min_token_prob: float,
        num_drafts: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        if not 2 <= max_tree_depth <= LONGEST_MATCH + 1:
            raise ValueError(
                f"suffix_decoding_max_tree_depth={max_tree_depth}: must be 2 to {LONGEST_MATCH + 1}"
            )
        longest = max_tree_depth - 1
        # A little more than 0, for products that would be whole: 0.7 * 10.
        most = [int(min(max_spec_factor * n + 1e-6, num_drafts)) for n in range(1, longest + 1)]
        limit_N = torch.tensor([0, *most], dtype=torch.int32, device=device)
        self._rules = SuffixRules(longest, num_drafts, min_token_prob, limit_N)
        self._remembers = max_cached_requests > 0
        wanted = next_power_of_2(max_cached_requests * max_model_len)
        self._log = make_log(max(max_cached_requests, 1), min(wanted, MOST_LOGGED_TOKENS), device)
        self.num_bytes = self._log.num_bytes + limit_N.nbytes

    def admit(self, request: EngineRequest, write: RowWriter) -> None:
        """The column's default says that the output is not logged yet."""

    def propose(self, step: DraftStep) -> Drafts:
        columns = step.columns
        if self._remembers:
            log_outputs(
                self._log,
                tokens_RM=columns["tokens"],
                alive_R=columns["alive"],
                length_R=columns["length"],
                prompt_len_R=columns["prompt_len"],
                logged_R=columns[LOGGED],
            )
        return Drafts(*draft_suffixes(histories_of(step), self._log, self._rules))
