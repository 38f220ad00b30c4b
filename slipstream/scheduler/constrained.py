"""Rows whose next token is constrained: each waits out of the lanes until the mask for it is there.

A mask depends on the token before it, so a constrained row takes part in a step only once the result of its
last one is known and the mask has been computed from it. Nobody else waits. What is known of a request is
kept by its key, so a preempted one goes on where its delivered tokens end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from slipstream.contracts.step import Finish, no_masks
from slipstream.scheduler.columns import Array, RowColumns
from slipstream.scheduler.lanes import NO_ROWS, Lanes

Legal = tuple[Array, Array]
NO_MASKS: Legal = (NO_ROWS, no_masks())
FINISH_NONE = int(Finish.NONE)


class Constraints(Protocol):
    """What computes masks; keys are those of constrained requests."""

    def ready(self, key: int) -> bool:
        """Whether the mask after the last token is there."""
        ...

    def take_ready(self) -> list[tuple[int, str | None]]:
        """Keys whose masks have come since the last call, or why there will be none."""
        ...

    def legal(self, keys: Sequence[int]) -> Array:
        """int32 [n, W]: the masks of ready requests, a copy."""
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

    def legal(self, keys: Sequence[int]) -> Array:
        return no_masks()

    def advance(self, keys: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        """Nobody calls it."""

    def close(self, key: int) -> None:
        """There is nothing to end."""


def take_legal(columns: RowColumns, constraints: Constraints, lanes: Lanes) -> Legal:
    """The constrained lanes that sample in the step to be planned, and their masks; they are out of the steps
    after it until the next mask is there."""
    rows = lanes.row[columns.constrained[lanes.row] & lanes.samples]
    if not len(rows):
        return NO_MASKS
    columns.held[rows] = True
    return rows, constraints.legal(columns.key[rows].tolist())


def advance(
    columns: RowColumns, constraints: Constraints, rows: Array, counts: Array, tokens: Array, finish: Array
) -> None:
    """What a step delivered, by row: the constrained ones that go on need their next mask."""
    on = np.flatnonzero(columns.constrained[rows] & (counts > 0) & (finish == FINISH_NONE))
    if len(on):
        delivered = [tokens[lane, : counts[lane]].tolist() for lane in on.tolist()]
        constraints.advance(columns.key[rows[on]].tolist(), delivered)
