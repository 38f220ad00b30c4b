"""How many drafts the next step verifies: a policy that learns from results some steps late and never waits.

A step of n decode lanes that has room for d drafts of each takes t(n, d) seconds and gives every lane
1 + a_1 + .. + a_d tokens, where a_i is the share of lanes whose i-th draft was taken. Both are measured as
results come in; the d of the most tokens a second is used. Now and then a few steps try another d, so that
figures stay true; the longer nothing changes, the rarer that is. Where drafts pay, they do with fewer lanes,
too, so that a batch that runs out tries nothing again.

Where lanes have unlike many drafts, those of one take room that another has no use for, first drafts before
second ones. Of i-th drafts there are v_i a lane, so the room holds all up to the c-th with
v_1 + .. + v_c = d, and a step gives 1 + a_1 + .. + a_c tokens a lane.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from slipstream.contracts.outputs import EngineStats
from slipstream.contracts.step import draft_limits
from slipstream.scheduler.columns import Array, RowColumns

REVIEW_STEPS = 16
PROBE_STEPS = 6
FIRST_PROBE, LAST_PROBE = 64, 2048  # steps between probes
BETTER = 1.02  # a limit must promise this much more than the one in use
WORTH = 0.75  # a smaller limit is tried again where it promises this share at least, else hardly ever,
SURE = 2 * (PROBE_STEPS - 1)  # once two trials have told its cost
KEEP = 1 - 1 / 256  # of what is known of acceptance, a step
LEAST_MADE = 1e-3  # i-th drafts a lane, however few there are
FRESH = 0.15  # weight of the newest time in the level
OUTLIER = 1.2  # times the level count no more than that


class Drafting(Protocol):
    """limit: drafts a lane, as last chosen, for who looks."""

    limit: int

    def choose(self, lanes: int, tokens: int) -> int:
        """Drafts a lane that the next step, of so many decode lanes and at most so many tokens, has room
        for."""
        ...

    def gain(self, limit: int) -> float:
        """Tokens that a row is expected to have of a step with room for so many drafts a lane."""
        ...

    def learn(self, lanes: int, limit: int, drafted: Array, taken: Array, seconds: float) -> None:
        """A step's result. lanes: decode lanes planned; drafted, taken: int32 [n], drafts that each which
        lived verified, and those of them that were right; seconds on the device, 0 where they say nothing of
        decoding."""
        ...


class NoDrafting:
    """One token a row and step."""

    limit = 0

    def choose(self, lanes: int, tokens: int) -> int:
        return 0

    def gain(self, limit: int) -> float:
        return 1.0

    def learn(self, lanes: int, limit: int, drafted: Array, taken: Array, seconds: float) -> None:
        """There is nothing to choose."""


@dataclass(slots=True)
class Group:
    """Steps of alike many lanes. level: seconds that a step of cost 1 takes at present; cost: of a step by
    limit, of those that were tried, from the steps of its last trial, and told: how many steps told it;
    limit: the one in use; patience: steps until the next probe."""

    level: float = 0.0
    cost: dict[int, float] = field(default_factory=dict)
    trials: dict[int, deque[float]] = field(default_factory=dict)
    told: dict[int, int] = field(default_factory=dict)
    limit: int = 0
    patience: int = FIRST_PROBE
    since: int = 0
    turn: int = 0

    def costs(self, most: int) -> Array:
        """float64 [most + 1]: cost by limit, on straight lines between those that were tried."""
        tried = sorted(self.cost)
        costs: Array = np.interp(np.arange(most + 1), tried, [self.cost[limit] for limit in tried])
        return costs

    def learn(self, limit: int, seconds: float) -> None:
        """Lanes and contexts of a group change from step to step, so seconds of a probe long ago say nothing
        beside those of today. The limit in use tells the level; others, what they cost beside it."""
        self.level = self.level or seconds / self.cost.get(limit, 1.0)
        cost = seconds / self.level
        told = self.told[limit] = self.told.get(limit, 0) + 1
        if limit == self.limit and told > PROBE_STEPS:
            self.level *= 1 + FRESH * (min(cost / self.cost[limit], OUTLIER) - 1)
        else:
            # Some steps of a trial wait for their kernels, others have few lanes left.
            trial = self.trials.setdefault(limit, deque(maxlen=PROBE_STEPS))
            trial.append(cost)
            self.cost[limit] = statistics.median_low(trial)


def group_of(lanes: int) -> int:
    """Steps of up to 1, 2, 4, 8, ... lanes."""
    return max(lanes - 1, 0).bit_length()


class DraftPolicy:
    """most: drafts of a row at most. max_tokens: of a step that verifies drafts. uneven: see
    SchedulerConfig."""

    def __init__(self, most: int, max_tokens: int, uneven: bool = False) -> None:
        self.limit = most
        self._limits = draft_limits(most)
        self._max_tokens, self._uneven = max_tokens, uneven
        # A prior of one lane that took half of its drafts, so that drafting begins.
        self._seen, self._made, self._taken = np.ones(most), np.ones(most), 0.5 ** np.arange(1, most + 1)
        self._groups: dict[int, Group] = {}
        self._current = -1
        self._left = 0
        self._before = (-1, 0)  # group and limit of the last step learnt from

    def choose(self, lanes: int, tokens: int) -> int:
        self._left -= 1
        if self._left < 0 or group_of(lanes) != self._current:
            self._review(group_of(lanes), min(tokens, self._max_tokens))
        return self.limit

    def _review(self, number: int, tokens: int) -> None:
        self._current = number
        group = self._groups.get(number) or self._groups.setdefault(number, self._like_larger(number))
        # The group's largest step must fit, so that all of it has the same choices.
        most = tokens // (1 << number) - 1
        limits = [limit for limit in self._limits if limit <= most] or [0]
        untried = [limit for limit in (limits[-1], 0) if limit not in group.cost]
        self._left = PROBE_STEPS
        if untried:
            self.limit = untried[0]
            return
        speeds = self.tokens() / group.costs(self._limits[-1])
        best = max(limits, key=lambda limit: float(speeds[limit]))
        if group.limit not in limits or speeds[best] > BETTER * speeds[group.limit]:
            group.limit, group.patience = best, FIRST_PROBE
        group.since += REVIEW_STEPS
        self.limit = group.limit
        if group.since >= group.patience and len(limits) > 1:
            group.since, group.patience = 0, min(2 * group.patience, LAST_PROBE)
            self.limit = self._probe(group, limits, speeds)
            return
        self._left = REVIEW_STEPS

    def _like_larger(self, number: int) -> Group:
        """A new group. What is known of the next larger one holds where drafts pay there."""
        larger = [self._groups[other] for other in sorted(self._groups) if other > number]
        if not larger or not larger[0].limit:
            return Group()
        return Group(cost={**larger[0].cost}, told={**larger[0].told}, limit=larger[0].limit)

    @staticmethod
    def _probe(group: Group, limits: list[int], speeds: Array) -> int:
        """The next larger limit, none, and the next smaller, in turn: what would matter most if its first
        trial was wrong comes before what matters least. What a smaller one gives is known, and so is its
        cost after two trials, but for changes."""
        place = limits.index(group.limit)
        others = [limits[min(place + 1, len(limits) - 1)], 0, limits[max(place - 1, 0)]]
        least = 0.0 if group.patience == LAST_PROBE else WORTH * float(speeds[group.limit])
        others = [
            limit for limit in others
            if limit > group.limit
            or (limit < group.limit and (group.told.get(limit, 0) < SURE or speeds[limit] >= least))
        ]
        chosen = others[group.turn % len(others)] if others else group.limit
        group.turn += 1
        return chosen

    def gain(self, limit: int) -> float:
        return float(self.tokens()[limit])

    def tokens(self) -> Array:
        """float64 [K + 1]: expected tokens of a lane's step, by limit."""
        rates = np.minimum.accumulate(self._taken / self._seen)
        gains = 1.0 + np.concatenate(([0.0], np.cumsum(rates)))
        if not self._uneven:
            return gains
        made = np.maximum(np.minimum.accumulate(self._made / self._seen), LEAST_MADE)
        tokens: Array = np.interp(np.arange(len(gains)), np.concatenate(([0.0], np.cumsum(made))), gains)
        return tokens

    def learn(self, lanes: int, limit: int, drafted: Array, taken: Array, seconds: float) -> None:
        before, self._before = self._before, (group_of(lanes), limit)
        if limit > before[1] and not (self._uneven and before[1]):
            return  # the step before it made no more drafts than it could use itself
        if limit and len(taken):
            shown = self._shown(lanes, limit, drafted)
            self._seen[:shown] = KEEP * self._seen[:shown] + len(taken)
            for sums, counts in ((self._made, drafted), (self._taken, taken)):
                reached = np.bincount(np.minimum(counts, shown), minlength=shown + 1)[::-1].cumsum()[::-1]
                sums[:shown] = KEEP * sums[:shown] + reached[1:]
        if seconds > 0.0 and before == self._before:  # the first of a kind may wait for its kernels
            self._groups.setdefault(group_of(lanes), Group()).learn(limit, seconds)

    def _shown(self, lanes: int, limit: int, drafted: Array) -> int:
        """Up to which draft of a lane the step shows how many there were: all, unless they filled it."""
        most = self._limits[-1]
        if not self._uneven or limit == most:
            return limit
        if int(drafted.sum()) < lanes * limit:
            return most
        return max(int(drafted.max()) - 1, limit)


def count_drafts(
    columns: RowColumns, stats: EngineStats, rows: Array, counts: Array, drafted: Array, live: Array
) -> tuple[Array, Array]:
    """Enter a step's drafts into rows and stats. All [n], over decode lanes, but drafted may go on; live:
    bool, lanes that delivered to the owner they were planned for. Returns int32, drafts verified and drafts
    taken, of each lane that lived and whose drafts were a drafter's."""
    taken: Array = np.maximum(counts - 1, 0) * live
    drafted = drafted[: len(rows)] * live
    columns.drafted[rows] += drafted
    columns.accepted[rows] += taken
    stats.drafts += int(np.count_nonzero(drafted))
    stats.draft_tokens += int(drafted.sum())
    stats.accepted_tokens += int(taken.sum())
    most = len(stats.accepted_per_position)
    reached = np.bincount(taken, minlength=most + 1)[::-1].cumsum()[::-1][1:]
    stats.accepted_per_position = tuple(
        before + more for before, more in zip(stats.accepted_per_position, reached.tolist(), strict=True)
    )
    own = live & ~columns.constrained[rows]
    return drafted[own], taken[own]
