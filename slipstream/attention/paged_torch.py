"""Paged attention in torch operations: the CPU backend, and the reference of every other one.

Eager: it sizes its gathers by the host's length bounds and masks by the device's exact lengths.

Legend: T tokens, L lanes, H query heads, G KV heads, Q tokens of a decode lane, M heads of a KV head's group,
D head size, S key positions, B blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from slipstream.attention.protocol import AttentionBatch, LayerAttention

Tensor = torch.Tensor


@dataclass(slots=True)
class DecodeGroup:
    """Decode lanes of similar length, attended together. token_X: int64, the group's tokens among the step's,
    or None for all decode lanes where each has one token. several: None where each of the group has one and
    lanes are tokens, else [L, Q] tokens by lane (filled up with the lane's last) and each token's place in
    that, flat. block_LB: int64; position_LQ1: int64; key_S: int64 0 .. S-1."""

    token_X: Tensor | None
    several: tuple[Tensor, Tensor] | None
    block_LB: Tensor
    position_LQ1: Tensor
    key_S: Tensor


@dataclass(slots=True)
class PrefillLane:
    """One prefill lane's tokens and keys. whole: nothing was computed before this chunk."""

    tokens: slice
    block_B: Tensor
    position_T1: Tensor
    key_S: Tensor
    whole: bool


class PagedTorchAttention:
    """Paged K and V of every layer, [blocks, block_size, G, D] each."""

    name = "torch"
    reads_whole_blocks = True

    def __init__(
        self, layers: Sequence[LayerAttention], block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layers = tuple(layers)
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        # Gathers go into memory that is kept: fresh pages for every layer cost more than the copy itself.
        self._scratch = [torch.empty(0, dtype=dtype, device=device) for _ in range(2)]

    def bytes_per_block(self) -> int:
        """Bytes of K and V of one block over all layers."""
        words = sum(2 * a.num_kv_heads * a.head_dim for a in self.layers)
        return words * self.block_size * self.dtype.itemsize

    def allocate(self, num_blocks: int) -> None:
        for pool in (self.keys, self.values):
            pool.clear()
            places = num_blocks, self.block_size
            pool += [
                _lazy_zeros((*places, a.num_kv_heads, a.head_dim), self.dtype, self.device)
                for a in self.layers
            ]

    def clear(self, blocks: Tensor) -> None:
        """Gathers read whole blocks, and a masked NaN that the last owner left would still be a NaN."""
        for pool in (*self.keys, *self.values):
            pool.index_fill_(0, blocks, 0)

    def gather(self, layer: int, block_LB: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """K and V of the lanes' blocks, [L, G, S, D] each; valid until the next call."""
        found = []
        for number, pool in enumerate((self.keys[layer], self.values[layer])):
            words = block_LB.numel() * pool[0].numel()
            if self._scratch[number].numel() < words:
                self._scratch[number] = torch.empty(words, dtype=pool.dtype, device=pool.device)
            pages = self._scratch[number][:words].view(block_LB.numel(), *pool.shape[1:])
            torch.index_select(pool, 0, block_LB.flatten(), out=pages)
            found.append(pages.to(dtype).view(block_LB.shape[0], -1, *pool.shape[2:]).transpose(1, 2))
        return found[0], found[1]

    def bind(self, batch: AttentionBatch) -> PagedTorchStep:
        return PagedTorchStep(self, batch)


class PagedTorchStep:
    """Attend for one step. Masks depend on the window only, so they are made once for all layers that share
    it."""

    def __init__(self, backend: PagedTorchAttention, batch: AttentionBatch) -> None:
        self._backend = backend
        self._slot_T = batch.slot_T
        self._decodes = _decode_groups(batch, backend.block_size)
        self._prefills = _prefill_lanes(batch, backend.block_size)
        self._masks: dict[tuple[int, int | None], Tensor] = {}

    def __call__(self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        backend, shape = self._backend, self._backend.layers[layer]
        for pool, new_TGD in ((backend.keys[layer], k_TGD), (backend.values[layer], v_TGD)):
            pool.flatten(0, 1).index_copy_(0, self._slot_T, new_TGD.to(backend.dtype))
        if len(self._decodes) == 1 and not self._prefills:
            return self._decode(layer, 0, self._decodes[0], q_THD)
        out_THD = torch.empty_like(q_THD)
        for number, group in enumerate(self._decodes):
            out_XHD = self._decode(layer, number, group, q_THD)
            if group.token_X is None:
                out_THD[: len(out_XHD)] = out_XHD
            else:
                out_THD.index_copy_(0, group.token_X, out_XHD)
        for number, lane in enumerate(self._prefills):
            k_1GSD, v_1GSD = backend.gather(layer, lane.block_B[None], q_THD.dtype)
            size = len(lane.key_S)
            q_HTD = q_THD[lane.tokens].transpose(0, 1)
            causal = lane.whole and (shape.window is None or size <= shape.window)
            mask = (
                None
                if causal
                else self._mask(-1 - number, shape.window, lane.position_T1, lane.key_S, q_THD.dtype)
            )
            out_HTD = _attend(q_HTD[None], k_1GSD[:, :, :size], v_1GSD[:, :, :size], mask, causal, shape)
            out_THD[lane.tokens] = out_HTD[0].transpose(0, 1)
        return out_THD

    def _decode(self, layer: int, number: int, group: DecodeGroup, q_THD: Tensor) -> Tensor:
        """[X, H, D] of the group's tokens."""
        shape, width = self._backend.layers[layer], q_THD.shape[2]
        lanes, queries = group.position_LQ1.shape[:2]
        k_LGSD, v_LGSD = self._backend.gather(layer, group.block_LB, q_THD.dtype)
        mask_LQS = self._mask(number, shape.window, group.position_LQ1, group.key_S, q_THD.dtype)
        # The heads of a KV head's group stand in for a query axis: no copy of K and V for each head.
        if group.several is None:
            q_XHD = q_THD[:lanes] if group.token_X is None else q_THD.index_select(0, group.token_X)
            q_LGMD = q_XHD.view(lanes, shape.num_kv_heads, -1, width)
            return _attend(q_LGMD, k_LGSD, v_LGSD, mask_LQS[:, None], False, shape).flatten(1, 2)
        token_LQ, place_X = group.several
        q_LQGMD = q_THD[token_LQ].view(lanes, queries, shape.num_kv_heads, -1, width)
        q_LGYD = q_LQGMD.transpose(1, 2).flatten(2, 3)
        mask_LYS = mask_LQS.repeat_interleave(shape.group, 1)
        out_LGYD = _attend(q_LGYD, k_LGSD, v_LGSD, mask_LYS[:, None], False, shape)
        out_LQGMD = out_LGYD.view(lanes, shape.num_kv_heads, queries, -1, width).transpose(1, 2)
        return out_LQGMD.reshape(-1, shape.num_heads, width).index_select(0, place_X)

    def _mask(
        self, number: int, window: int | None, position_X1: Tensor, key_S: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """dtype [..., S], 0 where the query at position sees the key, else -inf."""
        mask = self._masks.get((number, window))
        if mask is None:
            mask = key_S <= position_X1
            if window is not None:
                mask = mask & (key_S > position_X1 - window)
            # What is added to the scores: torch would make it of a bool mask again in every layer.
            mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)
            self._masks[number, window] = mask
        return mask


def _decode_groups(batch: AttentionBatch, block_size: int) -> list[DecodeGroup]:
    """Lanes of one group pad their keys to the longest of them, so lengths within a group differ by a third
    at most (a group costs about 40 us a layer, a padded key position about 0.1 us)."""
    count = batch.num_decode_lanes
    if count == 0:
        return []
    blocks_L = -(-batch.length_bound_L[:count] // block_size)
    bucket_L = np.ceil(np.log2(np.maximum(blocks_L, 8)) * 2).astype(np.int64)
    device = batch.slot_T.device
    if device.type != "cpu":
        bucket_L[:] = 0  # places are host numbers: only a CPU can pick lanes by them without a copy
    buckets = np.unique(bucket_L)
    groups = []
    for bucket in buckets:
        lane_L = np.flatnonzero(bucket_L == bucket)
        pick = slice(0, count) if len(buckets) == 1 else torch.from_numpy(lane_L)
        width = int(blocks_L[lane_L].max())
        length_L1 = batch.length_L[pick].unsqueeze(1)
        block_LB = batch.blocks_RB[batch.row_L[pick], :width].long()
        # Past its length a lane gathers its own first block again, and no other's numbers: a masked key still
        # counts where it is not finite.
        own_LB = torch.arange(width, device=device) * block_size < length_L1
        block_LB = torch.where(own_LB, block_LB, block_LB[:, :1])
        key_S = torch.arange(width * block_size, device=device)
        groups.append(_decode_group(batch, lane_L, pick, block_LB, key_S))
    return groups


def _decode_group(
    batch: AttentionBatch, lane_L: np.ndarray, pick: Tensor | slice, block_LB: Tensor, key_S: Tensor
) -> DecodeGroup:
    """lane_L, pick: the group's lanes, on the host and on the device."""
    if int(batch.query_len_L[: batch.num_decode_lanes].max()) == 1:
        token_X = pick if isinstance(pick, Tensor) else None
        return DecodeGroup(token_X, None, block_LB, batch.position_T[pick].view(-1, 1, 1), key_S)
    count_L = batch.query_len_L[lane_L]
    start_L, query_Q = (np.cumsum(batch.query_len_L) - batch.query_len_L)[lane_L], np.arange(count_L.max())
    token_LQ = torch.from_numpy(start_L[:, None] + np.minimum(query_Q, count_L[:, None] - 1))
    place_X = torch.from_numpy(np.flatnonzero(query_Q < count_L[:, None]))
    position_LQ1 = batch.position_T[token_LQ].unsqueeze(2)
    return DecodeGroup(token_LQ.view(-1)[place_X], (token_LQ, place_X), block_LB, position_LQ1, key_S)


def _prefill_lanes(batch: AttentionBatch, block_size: int) -> list[PrefillLane]:
    lanes = []
    start = int(batch.query_len_L[: batch.num_decode_lanes].sum())
    for lane in range(batch.num_decode_lanes, len(batch.query_len_L)):
        tokens = slice(start, start := start + int(batch.query_len_L[lane]))
        length = int(batch.length_bound_L[lane])
        blocks = -(-length // block_size)
        lanes.append(
            PrefillLane(
                tokens,
                batch.blocks_RB.index_select(0, batch.row_L[lane : lane + 1])[0, :blocks].long(),
                batch.position_T[tokens].unsqueeze(1),
                torch.arange(length, device=batch.slot_T.device),
                length == int(batch.query_len_L[lane]),
            )
        )
    return lanes


def _attend(
    q_XHTD: Tensor, k_XGSD: Tensor, v_XGSD: Tensor, mask: Tensor | None, causal: bool, shape: LayerAttention
) -> Tensor:
    gqa = q_XHTD.shape[1] != k_XGSD.shape[1]
    if shape.soft_cap is None:
        return scaled_dot_product_attention(
            q_XHTD, k_XGSD, v_XGSD, attn_mask=mask, is_causal=causal, scale=shape.scale, enable_gqa=gqa
        )
    if gqa:
        groups = q_XHTD.shape[1] // k_XGSD.shape[1]
        k_XGSD, v_XGSD = k_XGSD.repeat_interleave(groups, 1), v_XGSD.repeat_interleave(groups, 1)
    score = torch.matmul(q_XHTD.float(), k_XGSD.float().transpose(-1, -2)).mul_(shape.scale)
    score = torch.tanh(score / shape.soft_cap) * shape.soft_cap
    if causal:
        mask = torch.full(score.shape[-2:], -math.inf, device=score.device).triu_(1)
    if mask is not None:
        score = score + mask
    return torch.matmul(score.softmax(-1), v_XGSD.float()).to(q_XHTD.dtype)


def _lazy_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros whose pages a CPU takes only as they are written: a large pool costs nothing at start."""
    if device.type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    memory = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(memory).view(dtype).view(*shape)
