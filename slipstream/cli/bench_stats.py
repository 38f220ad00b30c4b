"""What repeats of a benchmark say: medians with their spread, and effects with the spread of paired repeats.
Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

# Where nothing differs, all of n pairs lean the same way in 2 ** (1 - n) of all cases: 6 % with five.
MIN_PAIRS = 5
WITHIN = "within the spread"


class Spread(NamedTuple):
    """Of one figure over repeats: median, least and greatest."""

    median: float
    low: float
    high: float


class Effect(NamedTuple):
    """Of a change, as a factor: ratio is the changed median over the base's; low and high are the least and
    the greatest ratio of two runs of the same repeat; pairs is how many there are."""

    ratio: float
    low: float
    high: float
    pairs: int

    def verdict(self, more_is_faster: bool) -> str:
        """faster or slower only where every pair says so and enough pairs do."""
        if self.low <= 1 <= self.high:
            return WITHIN
        if self.pairs < MIN_PAIRS:
            return f"too few repeats to tell ({self.pairs}, not {MIN_PAIRS})"
        return "faster" if (self.ratio > 1) == more_is_faster else "slower"


def spread(values: Sequence[float]) -> Spread:
    """values: at least one."""
    return Spread(median(values), min(values), max(values))


def effect(base: Sequence[float], changed: Sequence[float]) -> Effect:
    """base[i] and changed[i], above 0, were measured in the same repeat on the same requests."""
    ratios = [new / old for old, new in zip(base, changed, strict=True)]
    return Effect(median(changed) / median(base), min(ratios), max(ratios), len(ratios))


def chance(pairs: int) -> float:
    """How often noise alone, as likely up as down, puts every pair on the same side of 1."""
    return 2.0 ** (1 - pairs)
