"""The prefix cache: full blocks are known by a chain of digests, so equal prefixes share blocks.

A block's digest covers its parent's digest and its own tokens; the chain starts at a root made of the
request's cache_salt. 128 bits of BLAKE2b: nobody can be served another's text by a collision.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Protocol

import numpy as np

from slipstream.scheduler.blocks import BlockPool
from slipstream.scheduler.queue import Entry

Array = np.ndarray

DIGEST_BYTES = 16
NO_SALT = bytes(DIGEST_BYTES)


def root_digest(salt: str | None) -> bytes:
    """Where the chain of a request starts; requests with different salts never share a block."""
    if salt is None:
        return NO_SALT
    return blake2b(salt.encode(), digest_size=DIGEST_BYTES, person=b"salt").digest()


def extend_chain(chain: list[bytes], tokens: Array, block_size: int, count: int) -> None:
    """Append digests until the chain covers `count` blocks. chain[0] is the root; tokens: int32, from the
    start."""
    begin = len(chain) - 1
    if begin >= count:
        return
    data = tokens[begin * block_size : count * block_size].tobytes()
    width = 4 * block_size
    parent = chain[-1]
    for offset in range(0, len(data), width):
        parent = blake2b(parent + data[offset : offset + width], digest_size=DIGEST_BYTES).digest()
        chain.append(parent)


class Prefixes(Protocol):
    """What the scheduler asks of a cache."""

    def lookup(self, entry: Entry) -> list[int]:
        """The blocks that hold the longest known prefix of entry.tokens, always short of its last token,
        which must be computed to sample from."""
        ...

    def register(self, entry: Entry, tokens: Array, blocks: Array, first: int, last: int) -> None:
        """Blocks first .. last-1 of the entry's row are full and computed. tokens: int32, from the start."""
        ...


class PrefixCache:
    """Finds and keeps full blocks by their digests."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size

    def lookup(self, entry: Entry) -> list[int]:
        found: list[int] = []
        if entry.request.params.prompt_logprobs is not None:
            return found  # every prompt position must be computed to be scored
        for index in range((len(entry.tokens) - 1) // self._block_size):
            self._extend(entry, entry.tokens, index + 1)
            block = self._pool.find(entry.chain[index + 1])
            if block is None:
                break
            found.append(block)
        return found

    def register(self, entry: Entry, tokens: Array, blocks: Array, first: int, last: int) -> None:
        if first < last:
            self._extend(entry, tokens, last)
            self._pool.register(blocks[first:last], entry.chain[first + 1 : last + 1])

    def _extend(self, entry: Entry, tokens: Array, count: int) -> None:
        if not entry.chain:
            entry.chain.append(root_digest(entry.request.cache_salt))
        extend_chain(entry.chain, tokens, self._block_size, count)


class NoPrefixCache:
    """Prefix caching is off."""

    def lookup(self, entry: Entry) -> list[int]:
        return []

    def register(self, entry: Entry, tokens: Array, blocks: Array, first: int, last: int) -> None:
        pass
