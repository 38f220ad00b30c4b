"""The shapes of bucketed steps: what a captured graph is made for, and which one serves a step.

A step of decode lanes alone has as many tokens as lanes, or so many for each lane where drafts are verified.
A mixed step has a bucket of tokens and one of lanes. Lanes that sample by the simplest means suffice for have
a graph of their own (stage); logprobs, and features that edit logits, are served by one graph for all, in
coarser buckets.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from slipstream.contracts.step import draft_limits

GREEDY, SAMPLED, FULL = "greedy", "sampled", "full"
# Lanes of a mixed step, and of a step whose rows use rare features: few buckets, since there are many others.
FEW_LANES = (16, 64)
# Beyond so many lanes a step with drafts takes every fourth bucket: padding costs little beside them.
DRAFT_LANES_STEP = 64
# Up to so many lanes a step with drafts has a graph of its own where all rows are greedy: it is short enough
# for that to show.
GREEDY_DRAFT_LANES = 16
# Positions that a step with drafts samples at most, unless lanes alone are more: logits take their memory.
MOST_SAMPLES, MOST_FULL_SAMPLES = 1024, 512
# Positions of a mixed step with drafts, for each of its lanes.
MIXED_SAMPLES = 4


def all_samples(max_num_seqs: int, drafts: int) -> int:
    """Positions that any step samples."""
    return min(max_num_seqs * (1 + drafts), max(MOST_SAMPLES, max_num_seqs))


@dataclass(frozen=True, slots=True)
class Shape:
    """lanes; tokens; decode: one token a lane, and drafts; stage: of the sampling pipeline; num_logprobs: -1
    for none; drafts: that a lane has at most, 0 in a plain step; samples: positions sampled, of which each
    lane has one, and others are for drafts of any lane."""

    lanes: int
    tokens: int
    decode: bool
    stage: str
    num_logprobs: int
    drafts: int
    samples: int


class Shapes:
    """decode_lanes: ascending, the last is the most lanes; token_buckets: ascending, the last is the most
    tokens of a step. stage_of: the least stage for a set of features. max_logprobs: top logprobs that a graph
    computes. most_drafts: of a lane, 0 without speculation; uneven: one lane may have them all."""

    def __init__(
        self,
        decode_lanes: Sequence[int],
        token_buckets: Sequence[int],
        stage_of: Callable[[Iterable[str]], str],
        max_logprobs: int,
        most_drafts: int = 0,
        uneven: bool = False,
    ) -> None:
        most = decode_lanes[-1]
        self._decode = tuple(decode_lanes)
        self._few = (*(lanes for lanes in FEW_LANES if lanes < most), most)
        self._tokens = tuple(tokens for tokens in token_buckets if tokens < token_buckets[-1])
        self._tokens += (token_buckets[-1],)
        self._stage_of = stage_of
        self._max_logprobs = max_logprobs
        self._limits, self._uneven = draft_limits(most_drafts)[1:], uneven
        step = DRAFT_LANES_STEP
        self._drafting = tuple(n for n in decode_lanes if n <= step or n % step == 0 or n == most)

    def find(
        self,
        lanes: int,
        tokens: int,
        *,
        decode: bool,
        features: Iterable[str],
        num_logprobs: int,
        drafts: int = 0,
        room: int = 0,
    ) -> Shape:
        """The least shape that holds the step; of its drafts, drafts of a lane and room of all together, it
        may hold fewer."""
        stage, scored = self._stage_of(features), num_logprobs >= 0
        count = max(num_logprobs, self._max_logprobs) if scored else -1
        stage = FULL if scored else stage
        if decode:
            if drafts and (found := self._verify(lanes, room // lanes, stage, count)) is not None:
                return found
            lanes = _least(self._few if stage == FULL else self._decode, lanes)
            return Shape(lanes, lanes, True, stage, count, 0, lanes)
        stage = SAMPLED if stage == GREEDY else stage
        few = self._few[-1:] if stage == FULL else self._few
        room = room if drafts and stage == SAMPLED else 0
        if room:
            few = tuple(n for n in few if _mixed_samples(n) >= lanes + room) or few[-1:]
        lanes = _least(few, lanes)
        most = self._tokens[-1]
        tokens = _least(self._tokens, max(tokens + min(room, most - tokens), lanes))
        return self._mixed(lanes, tokens, stage, count, bool(drafts))

    def _verify(self, lanes: int, share: int, stage: str, count: int) -> Shape | None:
        """Decode lanes with room for so many drafts of each, or what a step can hold; None where that is not
        one."""
        full = stage == FULL
        lanes = _least(self._few if full else self._drafting, lanes)
        room = (MOST_FULL_SAMPLES if full else MOST_SAMPLES) // lanes - 1
        enough = self._limits[-1] if full else _least(self._limits, share)
        limit = max((limit for limit in self._limits if limit <= min(enough, room)), default=0)
        tokens = lanes * (1 + limit)
        if not limit:
            return None
        drafts = self._limits[-1] if self._uneven else limit
        stage = SAMPLED if stage == GREEDY and lanes > GREEDY_DRAFT_LANES else stage
        return Shape(lanes, tokens, True, stage, count, drafts, tokens)

    def _mixed(self, lanes: int, tokens: int, stage: str, count: int, drafts: bool) -> Shape:
        """Lanes that use rare features verify none beside prompts, but their drafter goes on."""
        limit = self._limits[-1] if self._limits and (drafts or stage == FULL) else 0
        samples = _mixed_samples(lanes) if limit and stage == SAMPLED else lanes
        return Shape(lanes, tokens, False, stage, count, limit, samples)

    def all(self) -> list[Shape]:
        """Every shape that find() gives for up to max_logprobs, the largest first."""
        most, top = self._decode[-1], self._max_logprobs
        found = [Shape(n, n, True, stage, -1, 0, n) for n in self._decode for stage in (GREEDY, SAMPLED)]
        found += [Shape(n, n, True, FULL, count, 0, n) for n in self._few for count in (-1, top)]
        for limit in self._limits:
            verify: list[Shape | None] = []
            for stage in (GREEDY, SAMPLED):
                verify += [self._verify(n, limit, stage, -1) for n in self._drafting]
            verify += [self._verify(n, limit, FULL, count) for n in self._few for count in (-1, top)]
            found += [shape for shape in verify if shape is not None]
        for tokens in self._tokens:
            for drafts in (False, True)[: 1 + bool(self._limits)]:
                found += [self._mixed(n, tokens, SAMPLED, -1, drafts) for n in self._few if n <= tokens]
            counts = (-1, top) if most <= tokens else ()
            found += [self._mixed(most, tokens, FULL, count, False) for count in counts]
        found = list(dict.fromkeys(found))
        return sorted(found, key=lambda shape: (shape.tokens, shape.lanes, shape.samples), reverse=True)


def most_samples(max_lanes: int, drafts: bool) -> int:
    """Positions that a step of stage "full" samples at most."""
    return max(max_lanes, MOST_FULL_SAMPLES) if drafts else max_lanes


def _mixed_samples(lanes: int) -> int:
    return max(lanes, min(MIXED_SAMPLES * lanes, MOST_SAMPLES))


def _least(buckets: Sequence[int], count: int) -> int:
    return buckets[bisect_left(buckets, count)]
