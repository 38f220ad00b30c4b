"""The KV block pool: reference counts, free blocks, and which free blocks still hold a known prefix.

A block is free when nobody refers to it. Free blocks with a digest are kept for prefix hits and given out
last, the longest unused first. Block 0 is the null block and never leaves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

Array = np.ndarray


class BlockPool:
    """num_blocks counts the null block. Not thread-safe."""

    def __init__(self, num_blocks: int) -> None:
        self.ref = np.zeros(num_blocks, np.int32)
        self._plain = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)  # free, without a digest: a stack
        self._num_plain = num_blocks - 1
        self._idle: OrderedDict[int, None] = OrderedDict()  # free, with a digest: the oldest first
        self._has_digest = np.zeros(num_blocks, np.bool_)
        self._digest_of: list[bytes] = [b""] * num_blocks
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return self._num_plain + len(self._idle)

    def take(self, count: int) -> Array:
        """int32 [count] blocks, each with one reference. The caller checked num_free."""
        if count > self._num_plain:
            self._evict(count - self._num_plain)
        self._num_plain -= count
        blocks = self._plain[self._num_plain : self._num_plain + count].copy()
        self.ref[blocks] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """One more reference to each of the blocks that find() returned."""
        for block in blocks:
            if self.ref[block] == 0:
                del self._idle[block]
            self.ref[block] += 1

    def give_back(self, blocks: Array) -> None:
        """Drop one reference to each; blocks: int32, all different, in the row's order. The end of a prefix
        is evicted before its beginning, without which it is worth nothing."""
        self.ref[blocks] -= 1
        free = blocks[self.ref[blocks] == 0][::-1]
        known = self._has_digest[free]
        plain = free[~known]
        self._plain[self._num_plain : self._num_plain + len(plain)] = plain
        self._num_plain += len(plain)
        self._idle.update(dict.fromkeys(free[known].tolist()))

    def find(self, digest: bytes) -> int | None:
        """The block that holds this prefix."""
        return self._block_of.get(digest)

    def count_idle(self, blocks: Sequence[int]) -> int:
        """How many of the blocks are free now."""
        return sum(block in self._idle for block in blocks)

    def register(self, blocks: Array, digests: Sequence[bytes]) -> None:
        """Full, computed blocks that somebody holds. A prefix that another block holds stays there."""
        keep, digest_of, new = self._block_of.setdefault, self._digest_of, []
        for block, digest in zip(blocks.tolist(), digests, strict=True):
            if keep(digest, block) == block:
                digest_of[block] = digest
                new.append(block)
        self._has_digest[new] = True

    def forget(self, blocks: Array) -> None:
        """Blocks that somebody holds and nobody may find any more."""
        self._drop_digests(blocks[self._has_digest[blocks]].tolist())

    def forget_all(self) -> None:
        """Nobody holds a block, and none may be found any more."""
        self._evict(len(self._idle))

    def _drop_digests(self, blocks: list[int]) -> None:
        block_of, digest_of = self._block_of, self._digest_of
        for block in blocks:
            del block_of[digest_of[block]]
        self._has_digest[blocks] = False

    def _evict(self, count: int) -> None:
        oldest = self._idle.popitem
        blocks = [oldest(last=False)[0] for _ in range(count)]
        self._drop_digests(blocks)
        self._plain[self._num_plain : self._num_plain + count] = blocks
        self._num_plain += count

    def check(self, holders: Array) -> None:
        """holders: int32 [num_blocks], rows that list each block. Raises AssertionError."""
        plain = self._plain[: self._num_plain]
        idle = np.fromiter(self._idle, np.int32, len(self._idle))
        free = np.zeros(len(self.ref), np.int32)
        np.add.at(free, plain, 1)
        np.add.at(free, idle, 1)
        assert (self.ref == holders).all(), "a block's references are counted wrongly"
        assert holders[0] == 0 and free[0] == 0, "the null block was granted"
        assert free.max(initial=0) <= 1, "a block is free twice"
        assert ((free == 1) == (holders == 0))[1:].all(), "a block leaked"
        assert not self._has_digest[plain].any() and self._has_digest[idle].all()
        assert len(self._block_of) == int(self._has_digest.sum())
        assert all(self._digest_of[block] == digest for digest, block in self._block_of.items())
