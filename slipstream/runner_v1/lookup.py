"""Drafts looked up on the host: n-gram in the request's own tokens; suffix in these and in past outputs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from slipstream.config.speculation import SpeculativeConfig
from slipstream.contracts.request import EngineRequest
from slipstream.runner_v1.drafts import Computed, Proposer
from slipstream.runner_v1.request import LiveRequest
from slipstream.speculation.host_lookup import Node, SuffixTree, ngram_drafts


def look_up(step: Computed, find: Callable[[int, LiveRequest, int], list[int]]) -> None:
    """find(row, request, most) for one request after the other."""
    for lane, appended in zip(step.lanes, step.appended, strict=True):
        most = min(step.most, lane.request.room)
        lane.request.drafts = find(lane.row, lane.request, most) if appended and most else []


class NgramProposer(Proposer):
    """The text of a request is all there is."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._low, self._high = config.prompt_lookup_min, config.prompt_lookup_max

    def propose(self, step: Computed) -> None:
        look_up(step, self._drafts)

    def _drafts(self, row: int, live: LiveRequest, most: int) -> list[int]:
        return ngram_drafts(live.tokens, self._low, self._high, most)


class SuffixProposer(Proposer):
    """A tree a request, of prompt and output, and one of the outputs of the last requests."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._depth = config.suffix_decoding_max_tree_depth
        self._cached = config.suffix_decoding_max_cached_requests
        self._limits = config.suffix_decoding_max_spec_factor, config.suffix_decoding_min_token_prob
        self._past, self._outputs = SuffixTree(self._depth), deque[list[int]]()
        self._own: dict[int, tuple[SuffixTree, list[Node], int]] = {}

    def admit(self, row: int, live: LiveRequest, request: EngineRequest) -> None:
        self._own[row] = SuffixTree(self._depth), [], 0

    def release(self, row: int, live: LiveRequest) -> None:
        output = live.tokens[live.prompt_len :]
        if not self._cached or not output:
            return
        if len(self._outputs) == self._cached:
            self._past.add(self._outputs.popleft(), by=-1)
        self._outputs.append(output)
        self._past.add(output)

    def propose(self, step: Computed) -> None:
        look_up(step, self._drafts)

    def _drafts(self, row: int, live: LiveRequest, most: int) -> list[int]:
        tree, ends, known = self._own[row]
        self._own[row] = tree, tree.add(live.tokens[known:], ends), len(live.tokens)
        end = live.tokens[-self._depth :]
        found = [each.drafts(end, most, *self._limits) for each in (tree, self._past)]
        return max(found, key=lambda one: one[0])[1]
