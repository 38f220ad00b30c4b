"""Paged attention with FlashAttention 3 for long steps, on request (`--attention-backend flash`).

Triton's kernels prepare and store, and attend where a step is short: lanes with one token everywhere, and
all lanes of a step of few tokens, which FlashAttention 3 would cut into tiles that are mostly empty. What a
step takes follows from its shape alone, so that graphs hold it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from slipstream.attention.paged_triton import PagedTritonAttention, PagedTritonStep
from slipstream.attention.protocol import AttentionBatch, LayerAttention
from slipstream.kernels.flash_attention import flash_attention, flash_lanes
from slipstream.kernels.paged import PagedPool, clear_blocks

Tensor = torch.Tensor

LEAST_TOKENS = 512


class PagedFlashAttention(PagedTritonAttention):
    """max_len: most positions of a lane; a window that is no shorter is none. least_tokens: of a step that
    takes FlashAttention 3. What the installed build can do is the plan's to check (config/flash.py)."""

    name = "flash"
    reads_whole_blocks = True

    def __init__(
        self,
        layers: Sequence[LayerAttention],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_lanes: int,
        max_len: int,
        least_tokens: int = LEAST_TOKENS,
    ) -> None:
        layers = [
            replace(each, window=None) if each.window is not None and each.window >= max_len else each
            for each in layers
        ]
        super().__init__(layers, block_size, dtype, device, max_lanes=max_lanes)
        if len({(each.num_kv_heads, each.head_dim) for each in self.layers}) > 1:
            raise ValueError("FlashAttention 3 needs layers with the same key heads")
        self.least_tokens = least_tokens

    def allocate(self, num_blocks: int) -> None:
        """All layers' pages lie in one piece, for clear()."""
        self.pools.clear()
        shape = self.layers[0]
        size = (len(self.layers), 2, num_blocks, shape.num_kv_heads, self.block_size, shape.head_dim)
        self._pages = torch.zeros(size, dtype=self.kv_dtype, device=self.device)
        self.pools += [PagedPool(keys, values) for keys, values in self._pages]
        # A step must not compile the kernel.
        self.clear(torch.zeros(1, dtype=torch.int64, device=self.device))

    def clear(self, blocks: Tensor) -> None:
        """FlashAttention 3 reads whole blocks, and a masked NaN that the last owner left is still a NaN."""
        clear_blocks(self._pages.flatten(0, 1), blocks)

    def bind(self, batch: AttentionBatch) -> PagedTritonStep:
        long = batch.position_T.shape[0] >= self.least_tokens
        return PagedFlashStep(self, batch) if long else PagedTritonStep(self, batch)


class PagedFlashStep(PagedTritonStep):
    """Attend for one step of many tokens."""

    verifies_in_mixed_steps = False

    def _begin_longer(self, num_tokens: int) -> None:
        self._own = flash_lanes(self._lanes)

    def _attend_longer(self, layer: int, q_THD: Tensor, out_THD: Tensor) -> None:
        shape, pool = self._backend.layers[layer], self._backend.pools[layer]
        flash_attention(q_THD, self._own, self._lanes, pool, shape, out_THD)
