"""Paged attention in Triton: the backend of CUDA. All its metadata is on the device, so a graph may hold it.

Pools are head-major, [blocks, G, block_size, D]. Steps of decode lanes alone take one kernel a layer, from
the fused projection to attention's output. Other steps take three: prepare and store, lanes with one token
(or a few, where drafts are verified), lanes with more. Which of the two is a host fact of the step
(num_decode_lanes, decode_tokens), hence fixed in a graph.

Legend: T tokens, L lanes, H query heads, G KV heads, X = H + 2 G, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slipstream.attention.protocol import AttentionBatch, HeadPrep, LayerAttention
from slipstream.kernels.decode_attention import decode_attention, decode_from_qkv
from slipstream.kernels.decode_config import DecodeConfig, DecodeScratch, choose_decode
from slipstream.kernels.lane_order import order_lanes
from slipstream.kernels.paged import PagedLanes, PagedPool, store_kv
from slipstream.kernels.qkv_write import write_qkv
from slipstream.kernels.varlen_attention import QueryTiles, choose_varlen, list_tiles, varlen_attention
from slipstream.kernels.verify_attention import VerifyScratch, choose_verify, verify_attention

Tensor = torch.Tensor


class PagedTritonAttention:
    """dtype: of q; kv_dtype: of the pool, the same or float8_e4m3fn; kv_scales: (k_scale, v_scale) of each
    layer. batch_invariant: a token's result is the same, bit for bit, alone and in any batch: every lane goes
    through one kernel with one choice of tiles."""

    name = "triton"
    reads_whole_blocks = False

    def __init__(
        self,
        layers: Sequence[LayerAttention],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_lanes: int,
        kv_dtype: torch.dtype | None = None,
        kv_scales: Sequence[tuple[float, float]] = (),
        batch_invariant: bool = False,
    ) -> None:
        self.layers = tuple(layers)
        self.block_size = block_size
        self.dtype = dtype
        self.kv_dtype = kv_dtype or dtype
        self.device = device
        self.batch_invariant = batch_invariant
        self.varlen = [choose_varlen(layer, dtype, batch_invariant) for layer in self.layers]
        self._scales = tuple(kv_scales) or ((1.0, 1.0),) * len(self.layers)
        if len(self._scales) != len(self.layers):
            raise ValueError(f"kv_scales has {len(self._scales)} entries for {len(self.layers)} layers")
        self.pools: list[PagedPool] = []
        scratches: dict[tuple[int, int, int], DecodeScratch] = {}
        for layer in self.layers:
            key = (layer.num_heads, layer.num_kv_heads, layer.head_dim)
            if key not in scratches:
                scratches[key] = self._make_scratch(layer, max_lanes)
        self.scratch = [scratches[a.num_heads, a.num_kv_heads, a.head_dim] for a in self.layers]
        self._verify_scratch: dict[tuple[int, int], VerifyScratch] = {}

    def _make_scratch(self, layer: LayerAttention, max_lanes: int) -> DecodeScratch:
        """Room for any count of lanes: fewer lanes are split more often."""
        pieces = max(
            lanes * choose_decode(lanes, layer, self.dtype).splits for lanes in range(1, max_lanes + 1)
        )
        return DecodeScratch(max_lanes, layer, pieces, self.device)

    def verify_scratch(self, layer: int) -> VerifyScratch:
        """Made at first use, in a trial: without drafts nobody needs it."""
        shape = self.layers[layer]
        key = shape.group, shape.head_dim
        if key not in self._verify_scratch:
            self._verify_scratch[key] = VerifyScratch(shape, self.device)
        return self._verify_scratch[key]

    def bytes_per_block(self) -> int:
        """Bytes of K and V of one block over all layers."""
        words = sum(2 * a.num_kv_heads * a.head_dim for a in self.layers)
        return words * self.block_size * self.kv_dtype.itemsize

    def allocate(self, num_blocks: int) -> None:
        self.pools.clear()
        for a, (k_scale, v_scale) in zip(self.layers, self._scales, strict=True):
            size = (num_blocks, a.num_kv_heads, self.block_size, a.head_dim)
            keys, values = (torch.zeros(size, dtype=self.kv_dtype, device=self.device) for _ in range(2))
            self.pools.append(PagedPool(keys, values, k_scale, v_scale))

    def clear(self, blocks: Tensor) -> None:
        """Nothing to do: no kernel loads a key beyond its lane's length."""

    def bind(self, batch: AttentionBatch) -> PagedTritonStep:
        return PagedTritonStep(self, batch)


class PagedTritonStep:
    """Attend for one step. Lanes are ordered once for all layers, and tiles of queries listed once for those
    that cut them alike."""

    # Whether lanes that verify drafts beside prompts have a kernel of their own.
    verifies_in_mixed_steps = True

    def __init__(self, backend: PagedTritonAttention, batch: AttentionBatch) -> None:
        self._backend = backend
        self._position_T, self._slot_T = batch.position_T, batch.slot_T
        all_decode = batch.num_decode_lanes == batch.row_L.shape[0]
        few, invariant = batch.decode_tokens, backend.batch_invariant
        verifies = few > 1 and not invariant and (all_decode or self.verifies_in_mixed_steps)
        self._decode_only = all_decode and few == 1 and not invariant
        # Lanes with more tokens than this take the kernel for longer ones.
        self._few = 0 if invariant else few if verifies else 1
        self._has_longer = not (self._decode_only or (all_decode and verifies))
        start_L1 = None if self._decode_only else batch.query_start_L1
        self._lanes = PagedLanes(batch.row_L, batch.length_L, batch.blocks_RB, start_L1)
        self._tiles: dict[int, QueryTiles] = {}
        # Both are made at the step's beginning: attention reads them before its predecessor has ended.
        configs = map(self._decode_config, backend.layers) if self._few == 1 else ()
        self._order_L = order_lanes(batch.length_L) if any(c.ordered for c in configs) else None
        if self._has_longer:
            self._begin_longer(len(self._position_T))

    def __call__(self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        store_kv(k_TGD, v_TGD, self._slot_T, self._backend.pools[layer])
        return self._attend(layer, q_THD)

    def from_qkv(self, layer: int, qkv_TXD: Tensor, prep: HeadPrep) -> Tensor:
        """See AttendQkv."""
        backend, shape, pool = self._backend, self._backend.layers[layer], self._backend.pools[layer]
        if self._decode_only:
            return decode_from_qkv(
                qkv_TXD, self._slot_T, prep, self._lanes, pool, shape, self._decode_config(shape),
                backend.scratch[layer], self._order_L,
            )
        q_THD = write_qkv(qkv_TXD, self._position_T, self._slot_T, shape.num_kv_heads, prep, pool)
        return self._attend(layer, q_THD)

    def _attend(self, layer: int, q_THD: Tensor) -> Tensor:
        backend, shape, pool = self._backend, self._backend.layers[layer], self._backend.pools[layer]
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        if self._few == 1:
            config, scratch = self._decode_config(shape), backend.scratch[layer]
            decode_attention(q_THD, self._lanes, pool, shape, config, scratch, out_THD, self._order_L)
        elif self._few:
            verify = choose_verify(self._lanes.row_L.shape[0], self._few, shape, backend.dtype)
            partial = backend.verify_scratch(layer)
            verify_attention(q_THD, self._lanes, pool, shape, verify, partial, out_THD)
        if self._has_longer:
            self._attend_longer(layer, q_THD, out_THD)
        return out_THD

    def _begin_longer(self, num_tokens: int) -> None:
        """What longer lanes need for all layers."""
        for shape, varlen in zip(self._backend.layers, self._backend.varlen, strict=True):
            self._list_tiles(varlen.queries(shape), num_tokens)

    def _attend_longer(self, layer: int, q_THD: Tensor, out_THD: Tensor) -> None:
        """Lanes with more than one token (or few); all lanes where results may not depend on the batch."""
        backend, shape, pool = self._backend, self._backend.layers[layer], self._backend.pools[layer]
        varlen = backend.varlen[layer]
        tiles = self._list_tiles(varlen.queries(shape), len(q_THD))
        varlen_attention(q_THD, tiles, self._lanes, pool, shape, varlen, out_THD)

    def _decode_config(self, shape: LayerAttention) -> DecodeConfig:
        lanes = self._lanes.row_L.shape[0]
        return choose_decode(lanes, shape, self._backend.dtype)

    def _list_tiles(self, queries: int, num_tokens: int) -> QueryTiles:
        if queries not in self._tiles:
            self._tiles[queries] = list_tiles(self._lanes, num_tokens, queries, self._few + 1)
        return self._tiles[queries]
