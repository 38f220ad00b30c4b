"""The scheduler's columns by row. Host bounds may be ahead of the device; what was delivered is exact.

What every step does is spelled as NumPy does it fastest: rows are int64 where they are indices (a third of
int32's time), and count_nonzero says what any() and all() would (a fifth).
"""

from __future__ import annotations

import numpy as np

from slipstream.contracts.outputs import EngineSnapshot
from slipstream.scheduler.config import SchedulerConfig

Array = np.ndarray


# What a row is doing. Plain numbers: looking up an enum's member costs as much as a small array operation.
FREE, PREFILL, DECODE = 0, 1, 2


class RowColumns:
    """[R] columns unless said otherwise; R = max_num_seqs (the padding row is never scheduled).

    key: int64, the owner. generation: int32, owners that left so far. length: tokens known on the host
    (prompt and delivered). target: tokens to prefill. computed_bound: KV positions after every step planned
    so far, exact in prefill; a decode row's lags by the steps since it was settled (see Scheduler).
    registered: leading blocks offered to the prefix cache. granted: blocks in blocks[row]. blocks: int32 [R,
    blocks of max_model_len]. drafted, accepted: int32, draft tokens that were verified and taken since the
    owner came. constrained: bool; held: bool, constrained and without a mask for its next token (see
    constrained.py). tokens: int32 [R, max_model_len], zeros that cost memory only where written. """

    def __init__(self, config: SchedulerConfig) -> None:
        rows = config.max_num_seqs
        self.phase = np.zeros(rows, np.int8)
        self.key = np.zeros(rows, np.int64)
        self.generation = np.zeros(rows, np.int32)
        self.length = np.zeros(rows, np.int32)
        self.target = np.zeros(rows, np.int32)
        self.max_len = np.zeros(rows, np.int32)
        self.computed_bound = np.zeros(rows, np.int32)
        self.registered = np.zeros(rows, np.int32)
        self.granted = np.zeros(rows, np.int32)
        self.drafted = np.zeros(rows, np.int32)
        self.accepted = np.zeros(rows, np.int32)
        self.constrained = np.zeros(rows, np.bool_)
        self.held = np.zeros(rows, np.bool_)
        self.blocks = np.zeros((rows, config.blocks_for(config.max_model_len)), np.int32)
        self.tokens = np.zeros((rows, config.max_model_len), np.int32)
        self.tokens_flat = self.tokens.reshape(-1)
        self.token_start = np.arange(rows, dtype=np.int64) * config.max_model_len

    def decoding(self, in_flight: int) -> Array:
        """int64, rows that may gain a token. Where the steps in flight end a row even if they bring it one
        token each, it only waits for its results; that all drafts are taken, as bounds assume, is a guess.
        Bounds must be settled."""
        goes_on = (self.computed_bound + 1 < self.max_len) | (self.length + in_flight < self.max_len)
        return np.flatnonzero((self.phase == DECODE) & ~self.held & goes_on)

    def snapshot(self, steps: Array) -> EngineSnapshot:
        """Copies of what a reader may see. What a row's owner left stays in its columns while it is free."""
        # A decode row's last token is known and not computed yet; its bound runs ahead of that.
        computed = np.where(self.phase == PREFILL, self.computed_bound, np.maximum(self.length - 1, 0))
        return EngineSnapshot(
            self.phase.copy(), self.key.copy(), self.length.copy(), computed.astype(np.int32),
            self.max_len.copy(), self.granted.copy(), self.drafted.copy(), self.accepted.copy(), steps,
        )

    def append(self, rows: Array, counts: Array, tokens: Array) -> Array:
        """Delivered tokens. rows [n]: all different; counts: int32 [n]; tokens: int32 [n, Q], of which the
        first counts[i] are valid. Returns those, row after row."""
        place = self.token_start[rows] + self.length[rows]
        self.length[rows] += counts
        if tokens.shape[1] == 1 and np.count_nonzero(counts) == len(counts):
            self.tokens_flat[place] = tokens[:, 0]
            return tokens[:, 0]
        column = np.arange(tokens.shape[1])
        valid = column < counts[:, None]
        taken: Array = tokens[valid]
        self.tokens_flat[(place[:, None] + column)[valid]] = taken
        return taken
