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
        self.least_tokens = least_tokens

    def clear(self, blocks: Tensor) -> None:
        """FlashAttention 3 reads whole blocks, and a masked NaN that the last owner left is still a NaN."""
        for pool in self.pools:
            pool.keys.index_fill_(0, blocks, 0)
            pool.values.index_fill_(0, blocks, 0)

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
