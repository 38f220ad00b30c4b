"""Rows whose next token is constrained: each waits out of the lanes until the mask for it is there.

A mask depends on the token before it, so a constrained row takes part in a step only once the result of its
last one is known and the mask has been computed from it. Nobody else waits. What is known of a request is
kept by its key, so a preempted one goes on where its delivered tokens end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from slipstream.contracts.step import Finish, no_drafts, no_masks
from slipstream.scheduler.columns import Array, RowColumns
from slipstream.scheduler.lanes import NO_ROWS, Lanes

Legal = tuple[Array, Array, Array, Array]  # the four fields of StepPlan
NO_MASKS: Legal = (NO_ROWS, no_masks(), no_drafts(), NO_ROWS)
FINISH_NONE = int(Finish.NONE)


class Constraints(Protocol):
    """What computes masks; keys are those of constrained requests."""

    def ready(self, key: int) -> bool:
        """Whether the mask after the last token is there."""
        ...

    def take_ready(self) -> list[tuple[int, str | None]]:
        """Keys whose masks have come since the last call, or why there will be none."""
        ...

    def legal(self, keys: Sequence[int], drafts: int) -> tuple[Array, Array]:
        """Of ready requests: int32 [n, P, W], their masks, and int32 [n, P - 1], what their grammars force,
        -1 after the last; P is at most 1 + drafts. Copies."""
        ...

    def advance(self, keys: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        """Delivered tokens; the masks after them are computed in their own time."""
        ...

    def close(self, key: int) -> None:
        """The request has ended. Unknown keys are ignored."""
        ...


class NoConstraints:
    """No request is constrained."""

    def ready(self, key: int) -> bool:
        return True

    def take_ready(self) -> list[tuple[int, str | None]]:
        return []

    def legal(self, keys: Sequence[int], drafts: int) -> tuple[Array, Array]:
        return no_masks(), no_drafts()

    def advance(self, keys: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        """Nobody calls it."""

    def close(self, key: int) -> None:
        """There is nothing to end."""


def take_legal(columns: RowColumns, constraints: Constraints, lanes: Lanes, drafts: int) -> Legal:
    """The constrained lanes that sample in the step to be planned, with their masks and drafts; they are out
    of the steps after it until the next mask is there."""
    lane = np.flatnonzero(columns.constrained[lanes.index] & lanes.samples)
    if not len(lane):
        return NO_MASKS
    rows = lanes.index[lane]
    columns.held[rows] = True
    legal, forced = constraints.legal(columns.key[rows].tolist(), drafts)
    # Only what was delivered is known of a decode row, so its length is exact; a prompt's end has no drafts.
    length = columns.length[rows]
    room = np.where(lane < len(lanes.decode_row), columns.max_len[rows] - length - 1, 0)
    forced[np.arange(forced.shape[1]) >= room[:, None]] = -1
    return lanes.row[lane], legal, forced, length


def advance(
    columns: RowColumns, constraints: Constraints, rows: Array, counts: Array, tokens: Array, finish: Array
) -> None:
    """What a step delivered, by row: the constrained ones that go on need their next mask."""
    if not np.count_nonzero(columns.constrained):
        return
    on = np.flatnonzero(columns.constrained[rows] & (counts > 0) & (finish == FINISH_NONE))
    if len(on):
        delivered = [tokens[lane, : counts[lane]].tolist() for lane in on.tolist()]
        constraints.advance(columns.key[rows[on]].tolist(), delivered)
