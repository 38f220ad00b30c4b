"""Lookups on the host, in plain Python over lists of tokens: n-gram, and suffix trees (Oliaro et al.,
SuffixDecoding, 2024). The old runner drafts by them; they are what those on the device are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


def ngram_drafts(tokens: Sequence[int], low: int, high: int, most: int) -> list[int]:
    """What followed the most recent of the longest earlier matches of the end of tokens: low to high tokens
    of it."""
    last = len(tokens) - 1
    best, found = low - 1, -1
    for end in range(last - 1, -1, -1):
        length = 0
        while length < min(high, end + 1) and tokens[end - length] == tokens[last - length]:
            length += 1
        if length > best:
            best, found = length, end
            if best == high:
                break
    return list(tokens[found + 1 : found + 1 + most]) if found >= 0 else []


@dataclass(slots=True)
class Node:
    """A sequence of tokens from the root; count: how often it was seen."""

    count: int = 0
    children: dict[int, Node] = field(default_factory=dict)


class SuffixTree:
    """Every sequence of up to `depth` tokens in the texts that were added, counted."""

    def __init__(self, depth: int) -> None:
        self._root, self._depth = Node(), depth

    def add(self, tokens: Sequence[int], ends: Sequence[Node] = (), by: int = 1) -> list[Node]:
        """Go on with a text from what the last call gave; by: -1 takes a text out again."""
        nodes = list(ends)
        for token in tokens:
            grown = []
            for node in (*nodes, self._root):
                child = node.children.setdefault(token, Node())
                child.count += by
                grown.append(child)
                if child.count == 0:
                    del node.children[token]
            nodes = grown[1 - self._depth :]
        return nodes

    def drafts(
        self, tokens: Sequence[int], most: int, factor: float, least: float
    ) -> tuple[float, list[int]]:
        """The best path of likeliest children, over all matches of the end of tokens, and its score: the sum
        of its tokens' probabilities, each at least `least`. A match of n tokens gives factor * n at most."""
        best: tuple[float, list[int]] = (0.0, [])
        for length in range(1, min(len(tokens), self._depth) + 1):
            node: Node | None = self._root
            for token in tokens[-length:]:
                node = node.children.get(token) if node is not None else None
            if node is None:
                break  # a longer end is not there either
            path: list[int] = []
            score, chance = 0.0, 1.0
            while node.children and len(path) < min(most, int(factor * length)):
                token, child = max(node.children.items(), key=lambda item: item[1].count)
                chance *= child.count / node.count
                if chance < least:
                    break
                path.append(token)
                score, node = score + chance, child
            if score >= best[0]:
                best = score, path
        return best
