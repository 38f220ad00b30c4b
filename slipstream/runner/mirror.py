"""What the runner's host side keeps per row: facts set at admission, and how far a row was scheduled."""

from __future__ import annotations

import numpy as np

from slipstream.contracts.limits import count_logprobs
from slipstream.contracts.step import Admission

Array = np.ndarray


class RowMirror:
    """NumPy columns by row. computed_bound is exact for a prefill and an upper bound for a decode."""

    def __init__(self, num_rows: int) -> None:
        self.features = np.zeros(num_rows, np.int64)
        self.logprobs = np.full(num_rows, -1, np.int32)
        self.prompt_logprobs = np.full(num_rows, -1, np.int32)
        self.prompt_len = np.zeros(num_rows, np.int32)
        self.computed_bound = np.zeros(num_rows, np.int32)

    def admit(self, admission: Admission, features: int, vocab_size: int) -> None:
        row, params = admission.row, admission.request.params
        self.features[row] = features
        self.logprobs[row] = count_logprobs(params.logprobs, vocab_size)
        self.prompt_logprobs[row] = count_logprobs(params.prompt_logprobs, vocab_size)
        self.prompt_len[row] = len(admission.request.prompt_token_ids)
        self.computed_bound[row] = admission.num_cached

    def advance(self, index_L: Array, query_len_L: Array) -> Array:
        """int32 [L], the KV length bound of each lane after a step. index_L: the lanes' rows, int64."""
        bound_L: Array = self.computed_bound[index_L] + query_len_L
        self.computed_bound[index_L] = bound_L
        return bound_L
