"""What repeats of a benchmark say: medians with their spread, and effects with the spread of paired repeats.
Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from statistics import median
from typing import NamedTuple

# A verdict may be noise in as many cases as five pairs that all lean the same way, 6 %, and no more.
MIN_PAIRS = 5
WITHIN = "within the spread"


class Spread(NamedTuple):
    """Of one figure over repeats: median, least and greatest."""

    median: float
    low: float
    high: float


class Effect(NamedTuple):
    """Of a change, as a factor: ratio is the changed median over the base's; low and high are two ratios of
    runs of the same repeat, between which their median lies: the least and the greatest of few pairs, and of
    more than eight those further in (the sign test's interval). pairs is how many there are."""

    ratio: float
    low: float
    high: float
    pairs: int

    def verdict(self, more_is_faster: bool) -> str:
        """faster or slower only where 1 is outside, and pairs are enough to tell."""
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
    ratios = sorted(new / old for old, new in zip(base, changed, strict=True))
    out = _outside(len(ratios))
    return Effect(median(changed) / median(base), ratios[out], ratios[-1 - out], len(ratios))


def chance(pairs: int) -> float:
    """How often noise alone, as likely up as down, puts low and high on the same side of 1."""
    return _tails(pairs, _outside(pairs))


def _outside(pairs: int) -> int:
    """Ratios to leave out at either end."""
    most = _tails(MIN_PAIRS, 0)
    return next(out for out in range(pairs) if _tails(pairs, out + 1) > most)


def _tails(pairs: int, out: int) -> float:
    """How often at most `out` of fair coins fall on one side, whichever that is."""
    return min(1.0, 2.0 ** (1 - pairs) * sum(comb(pairs, k) for k in range(out + 1)))
