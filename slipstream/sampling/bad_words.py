"""bad_words: a word's last token is impossible where the row ends with the rest of the word.

A word of one token is always impossible. A word may begin in the prompt.
"""

from __future__ import annotations

import numpy as np
import torch

from slipstream.contracts.limits import MAX_BAD_WORD_TOKENS
from slipstream.contracts.request import EngineRequest
from slipstream.kernels.edit_rows import ban_words_rows
from slipstream.kernels.masks import ban_at, banned_entries
from slipstream.rows.columns import Column, RowWriter
from slipstream.sampling.protocol import SampleBatch

Tensor = torch.Tensor


class BadWords:
    """Columns bad_tokens, all words one after the other, and bad_back, the tokens left in the word after
    each (-1: not used)."""

    name = "bad_words"
    columns: tuple[Column, ...] = (
        Column("bad_tokens", width=MAX_BAD_WORD_TOKENS),
        Column("bad_back", width=MAX_BAD_WORD_TOKENS),
    )

    def admit(self, request: EngineRequest, write: RowWriter) -> bool:
        words = [word for word in request.bad_word_token_ids if word]
        if not words:
            return False
        tokens, back = np.zeros(MAX_BAD_WORD_TOKENS, np.int32), np.full(MAX_BAD_WORD_TOKENS, -1, np.int32)
        count = sum(map(len, words))
        tokens[:count] = np.concatenate(words)
        back[:count] = np.concatenate([np.arange(len(word))[::-1] for word in words])
        write.span("bad_tokens", tokens)
        write.span("bad_back", back)
        return True

    def apply(self, logits_NV: Tensor, batch: SampleBatch) -> None:
        lane_n = batch.feature_lanes[self.name]
        word_nK = batch.of(lane_n, "bad_tokens")
        banned_nK = banned_entries(
            batch.columns["tokens"],
            batch.row_N[lane_n],
            batch.length_N[lane_n],
            word_nK,
            batch.of(lane_n, "bad_back"),
        )
        ban_at(logits_NV, lane_n, word_nK, banned_nK)

    def launch(self, logits_NV: Tensor, batch: SampleBatch, bit: int) -> None:
        columns = batch.columns
        words = columns["tokens"], columns["bad_tokens"], columns["bad_back"]
        ban_words_rows(logits_NV, batch.using(bit), batch.length_N, *words)
