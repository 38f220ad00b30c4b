"""The shapes of bucketed steps: what a captured graph is made for, and which one serves a step.

A step of decode lanes alone has as many tokens as lanes. A mixed step has a bucket of tokens and one of
lanes. Lanes that sample by the simplest means suffice for have a graph of their own (stage); logprobs, and
features that edit logits, are served by one graph for all, in coarser buckets.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

GREEDY, SAMPLED, FULL = "greedy", "sampled", "full"
# Lanes of a mixed step, and of a step whose rows use rare features: few buckets, since there are many others.
FEW_LANES = (16, 64)


@dataclass(frozen=True, slots=True)
class Shape:
    """lanes; tokens; decode: one token a lane, and drafts; stage: of the sampling pipeline; num_logprobs: -1
    for none; drafts: that a lane verifies at most, 0 in a plain step."""

    lanes: int
    tokens: int
    decode: bool
    stage: str
    num_logprobs: int
    drafts: int = 0


class Shapes:
    """decode_lanes: ascending, the last is the most lanes; token_buckets: ascending, the last is the most
    tokens of a step. stage_of: the least stage for a set of features. max_logprobs: top logprobs that a graph
    computes."""

    def __init__(
        self,
        decode_lanes: Sequence[int],
        token_buckets: Sequence[int],
        stage_of: Callable[[Iterable[str]], str],
        max_logprobs: int,
    ) -> None:
        most = decode_lanes[-1]
        self._decode = tuple(decode_lanes)
        self._few = (*(lanes for lanes in FEW_LANES if lanes < most), most)
        self._tokens = tuple(tokens for tokens in token_buckets if tokens < token_buckets[-1])
        self._tokens += (token_buckets[-1],)
        self._stage_of = stage_of
        self._max_logprobs = max_logprobs

    def find(
        self, lanes: int, tokens: int, *, decode: bool, features: Iterable[str], num_logprobs: int
    ) -> Shape:
        """The least shape that holds the step."""
        stage, scored = self._stage_of(features), num_logprobs >= 0
        count = max(num_logprobs, self._max_logprobs) if scored else -1
        stage = FULL if scored else stage
        if decode:
            lanes = _least(self._few if stage == FULL else self._decode, lanes)
            return Shape(lanes, lanes, True, stage, count)
        few = self._few[-1:] if stage == FULL else self._few
        lanes = _least(few, lanes)
        tokens = _least(self._tokens, max(tokens, lanes))
        return Shape(lanes, tokens, False, SAMPLED if stage == GREEDY else stage, count)

    def all(self) -> list[Shape]:
        """Every shape that find() gives for up to max_logprobs, the largest first."""
        most, top = self._decode[-1], self._max_logprobs
        found = [Shape(n, n, True, stage, -1) for n in self._decode for stage in (GREEDY, SAMPLED)]
        found += [Shape(n, n, True, FULL, count) for n in self._few for count in (-1, top)]
        for tokens in self._tokens:
            found += [Shape(n, tokens, False, SAMPLED, -1) for n in self._few if n <= tokens]
            found += [Shape(most, tokens, False, FULL, count) for count in (-1, top) if most <= tokens]
        return sorted(found, key=lambda shape: (shape.tokens, shape.lanes), reverse=True)


def _least(buckets: Sequence[int], count: int) -> int:
    return buckets[bisect_left(buckets, count)]
