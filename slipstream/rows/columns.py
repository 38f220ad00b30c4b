"""Columns of the row table: one declaration each, and the writer that admission fills.

Scalars live together in one record per row, so that admission overwrites all of them with one span; list
columns have a region each. Everything is 32-bit words in one arena (see table.py), so one kernel can apply
any change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

Array = np.ndarray

LEGAL = "legal"  # the list column of tokens that a row may sample, which plans write


@dataclass(frozen=True, slots=True)
class Column:
    """name; dtype: i32 or f32; width: words a row (1 is a scalar of the record); default: what admission
    writes where nobody says otherwise (scalars only); writer: who may change it after admission."""

    name: str
    dtype: Literal["i32", "f32"] = "i32"
    width: int = 1
    default: float = 0
    writer: Literal["admit", "commit", "plan"] = "admit"


def blocks_width(max_model_len: int, block_size: int) -> int:
    """Words of the column "blocks": at least two, since one would be a scalar of the record."""
    return max(-(-max_model_len // block_size), 2)


class RowWriter(Protocol):
    """Where admission writes a row's columns. Scalars not set take their default."""

    def scalar(self, name: str, value: float) -> None:
        """Set a scalar column; 64-bit values go in two columns (low and high word)."""
        ...

    def span(self, name: str, values: Array, start: int = 0) -> None:
        """Set values (int32 or float32, as the column says) at start of a list column."""
        ...
