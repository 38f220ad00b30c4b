"""The plan that the scheduler sends the runner for a step, and the result that comes back. Only changes
travel.

Legend: L lanes of the step, Q tokens a decode lane may produce (1, or 1 + drafts), K top logprobs, M
constrained rows, P places of a row that have masks, W words of 32 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from slipstream.contracts.request import EngineRequest

Array = np.ndarray


def empty_i32() -> Array:
    return np.empty(0, np.int32)


def no_masks() -> Array:
    return np.empty((0, 1, 0), np.int32)


def no_drafts() -> Array:
    return np.empty((0, 0), np.int32)


def mask_places(drafts: int) -> int:
    """Masks of a constrained row in a step that verifies so many drafts: few, since each has a bit a
    token."""
    return 1 + min(drafts, 4)


def mask_words(vocab_size: int) -> int:
    """Words of a mask, of which token t is bit t % 32 of word t // 32. A column of one would be a scalar."""
    return max(2, -(-vocab_size // 32))


def draft_limits(most: int) -> tuple[int, ...]:
    """Drafts of a lane that steps are made for, ascending from 0 to the most there may be."""
    return (*(limit for limit in (0, 1, 2, 4, 8, 16) if limit < most), most)


class Finish(IntEnum):
    """Why a row ended, as the device or the engine saw it. The numbers travel in arrays."""

    NONE = 0
    STOP = 1  # an end token or a stop token id
    LENGTH = 2
    ERROR = 3  # the row's own logits were not finite, or no token was left to choose
    ABORT = 4


@dataclass(slots=True)
class Admission:
    """A request takes a row. The runner overwrites every column of the row from this.

    tokens: int32, prompt and everything already produced. num_cached: KV positions that are already in its
    blocks (prefix hit), always less than len(tokens). blocks: int32, the blocks granted so far, in order.
    """

    row: int
    generation: int
    request: EngineRequest
    tokens: Array
    num_cached: int
    blocks: Array


@dataclass(slots=True)
class StepPlan:
    """One step. Applied in this order: released, admissions, block grants, lanes.

    released: int32, rows whose owner left (finished, aborted or preempted) since the last plan; never
        scheduled again before an admission. A row may be in `released` and in `admissions` of one plan.
    grant_row / grant_index / grant_block: int32 [G], block-table cells to set: table[row, index] = block.
    lane_row / lane_generation: int32 [L]; decode lanes come first. Unchanged arrays are the same object as in
        the plan before. lanes_changed: False where all of them, draft_tokens and draft_room are as in the
        plan before.
    lane_query_len: int32 [L], tokens computed in this step: 1 for a decode lane (drafts come on top of that),
        the chunk for a prefill lane. lane_samples: bool [L], True where the step ends in a sampled token:
        every decode lane, and the last chunk of a prefill.
    len_bound: the most KV positions that any lane may hold after this step (host bound).
    draft_tokens: drafts that a decode lane verifies at most; 0 is a plain step, whatever drafts rows hold.
    draft_room: drafts that all decode lanes verify together at most. Where they have more, first drafts come
        before second ones, and so on; of like ones those of earlier lanes.
    legal_row: int32 [M], the rows that sample under a constraint. legal: int32 [M, P, W], the tokens that
        each may sample, bit t % 32 of word t // 32: next, and after each of its drafts. legal_drafts: int32
        [M, P - 1], what the row drafts instead of anything that a drafter left in it; -1 after the last.
        legal_length: int32 [M], tokens in the row.
    half_blocks: int32, blocks of admissions that this step's chunks leave half full, or that lie behind a
        prompt which is whole now, and that no earlier chunk has reached.
    """

    step: int
    lane_row: Array
    lane_generation: Array
    lane_query_len: Array
    lane_samples: Array
    num_decode_lanes: int
    lanes_changed: bool
    len_bound: int
    released: Array = field(default_factory=empty_i32)
    admissions: list[Admission] = field(default_factory=list)
    grant_row: Array = field(default_factory=empty_i32)
    grant_index: Array = field(default_factory=empty_i32)
    grant_block: Array = field(default_factory=empty_i32)
    draft_tokens: int = 0
    draft_room: int = 0
    legal_row: Array = field(default_factory=empty_i32)
    legal: Array = field(default_factory=no_masks)
    legal_drafts: Array = field(default_factory=no_drafts)
    legal_length: Array = field(default_factory=empty_i32)
    half_blocks: Array = field(default_factory=empty_i32)

    def fresh_blocks(self) -> Array:
        """int32, new blocks that will be read half full."""
        if not len(self.half_blocks):
            return self.grant_block
        return np.concatenate((self.half_blocks, self.grant_block))


@dataclass(slots=True)
class TokenLogprobs:
    """Raw log-probabilities of sampled tokens. ids: int32 [L, Q, 1 + K], the sampled token first, then the
    top K in order; values: float32, same shape; rank: int32 [L, Q], 1 for the most likely token."""

    ids: Array
    values: Array
    rank: Array


@dataclass(slots=True)
class PromptLogprobs:
    """Raw log-probabilities of prompt tokens start .. start+n-1 of one row, from one chunk (the token at
    position 0 has none). ids: int32 [n, 1 + K], the prompt token first; values: float32 [n, 1 + K]; rank:
    int32 [n]."""

    row: int
    generation: int
    start: int
    ids: Array
    values: Array
    rank: Array


@dataclass(slots=True)
class StepResult:
    """What a step produced. lane_row and lane_generation are the plan's own arrays.

    num_tokens: int32 [L], tokens appended to the lane's row (0 for dead lanes and unfinished prefills).
    tokens: int32 [L, Q]; the first num_tokens of each are valid. finish: int32 [L], Finish codes.
    drafted: int32 [L], drafts that the lane verified; None of a step without any.
    """

    step: int
    lane_row: Array
    lane_generation: Array
    num_tokens: Array
    tokens: Array
    finish: Array
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    drafted: Array | None = None
