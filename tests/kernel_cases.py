"""Random inputs and float64 formulas for kernels, on any device: for the interpreter's cases and the GPU
check.

Whatever a kernel must not read is NaN: unused places of the pool, the null block, outputs, scratch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from slipstream.kernels.attention_common import LayerAttention
from slipstream.kernels.paged import PagedLanes, PagedPool
from slipstream.kernels.qkv_write import HeadPrep
from slipstream.rows.doors import PackedWrites

Tensor = torch.Tensor


@dataclass(frozen=True)
class AttentionCase:
    """One step's lanes. qkv is raw; k_all, v_all: float64 [L, S, G, D], what each lane's keys and values are
    once prepared, this step's included; pool holds those before this step."""

    shape: LayerAttention
    lanes: PagedLanes
    pool: PagedPool
    prep: HeadPrep
    qkv_TXD: Tensor
    position_T: Tensor
    slot_T: Tensor
    lane_T: Tensor
    k_all: Tensor
    v_all: Tensor
    q_prepared: Tensor

    def expected(self) -> Tensor:
        """Attention of every token, float64 [T, H, D]."""
        out = torch.zeros_like(self.q_prepared)
        for token in range(len(out)):
            lane, end = int(self.lane_T[token]), int(self.position_T[token]) + 1
            first = 0 if self.shape.window is None else max(0, end - self.shape.window)
            k, v = (
                each[lane, first:end].repeat_interleave(self.shape.group, 1)
                for each in (self.k_all, self.v_all)
            )
            score = torch.einsum("hd,shd->hs", self.q_prepared[token], k) * self.shape.scale
            if self.shape.soft_cap is not None:
                score = torch.tanh(score / self.shape.soft_cap) * self.shape.soft_cap
            out[token] = torch.einsum("hs,shd->hd", score.softmax(-1), v)
        return out

    def stored(self, pool: Tensor) -> Tensor:
        """What a pool holds at this step's slots, [T, G, D]."""
        size = self.pool.block_size
        return pool[self.slot_T // size, :, self.slot_T % size]

    def with_step_stored(self) -> AttentionCase:
        """The same, with this step's keys and values in the pool."""
        size, dtype = self.pool.block_size, self.pool.keys.dtype
        for pool, source in ((self.pool.keys, self.k_all), (self.pool.values, self.v_all)):
            new = source[self.lane_T, self.position_T].to(dtype)
            pool[self.slot_T // size, :, self.slot_T % size] = new
        return self


def rope_table(positions: int, head_dim: int, device: torch.device | str) -> Tensor:
    """float32 [P, 2, D] as layers/rotary.py lays it out."""
    inverse = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * inverse
    cos, sin = angle.cos(), angle.sin()
    table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
    return table.float().to(device)


def prepared64(x: Tensor, weight: Tensor | None, eps: float, rope: Tensor) -> Tensor:
    """Norm and rotation of [T, Y, D] in float64; rope: [T, 2, D]."""
    x = x.double()
    if weight is not None:
        x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    low, high = x.chunk(2, -1)
    cos, sin = rope[:, None, 0].double(), rope[:, None, 1].double()
    return x * cos + torch.cat((high, low), -1) * sin


def block_table(blocks: list[int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows of lanes with so many blocks each, and the blocks of all rows (int32), both in random order."""
    count = len(blocks)
    ids = torch.randperm(sum(blocks), generator=generator) + 1
    row_L = torch.randperm(count + 3, generator=generator)[:count]
    table = torch.full((count + 3, max(blocks) + 5), 2**30, dtype=torch.int32)
    start = 0
    for lane, size in enumerate(blocks):
        table[row_L[lane], :size] = ids[start : start + size].int()
        start += size
    return row_L, table


def attention_case(
    shape: LayerAttention,
    done_and_new: list[tuple[int, int]],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    block_size: int = 16,
    normed: bool = True,
    mixed: bool = False,
    seed: int = 0,
) -> AttentionCase:
    """Lanes that have `done` keys and get `new` tokens. Rows and blocks lie in random order; qkv and the
    block table are views with gaps."""
    generator = torch.Generator().manual_seed(seed)
    # Keys of long lanes are gigabytes, which a CPU would take minutes to draw for another device.
    own = generator if str(device) == "cpu" else torch.Generator(device).manual_seed(seed)

    def normal(*size: int, by: torch.Generator = generator) -> Tensor:
        return torch.randn(*size, generator=by, dtype=torch.float64, device=by.device)

    kv_heads, head_dim, count = shape.num_kv_heads, shape.head_dim, len(done_and_new)
    heads = shape.num_heads + 2 * kv_heads
    end = [done + new for done, new in done_and_new]
    new = torch.tensor([n for _, n in done_and_new])
    lane_T = torch.repeat_interleave(torch.arange(count), new)
    position_T = torch.cat([torch.arange(done, done + n) for done, n in done_and_new])
    blocks = [-(-e // block_size) for e in end]
    row_L, table = block_table(blocks, generator)
    table = table.to(device)[:, : max(blocks) + 2]
    qkv = normal(len(lane_T), heads + 1, head_dim + 8).to(dtype).to(device)[:, :heads, :head_dim]
    norm = (1 + 0.3 * normal(shape.num_heads + kv_heads, head_dim)).float().to(device) if normed else None
    rope = rope_table(max(end), head_dim, device)
    lane_T, position_T, row_L = lane_T.to(device), position_T.to(device), row_L.to(device)
    turned = prepared64(qkv[:, :-kv_heads], norm, 1e-6, rope[position_T])
    keys, values = (
        torch.full((sum(blocks) + 1, kv_heads, block_size, head_dim), float("nan"), dtype=dtype).to(device)
        for _ in range(2)
    )
    size = (count, max(end), kv_heads, head_dim)
    k_all, v_all = (normal(*size, by=own).to(dtype).double() for _ in range(2))
    for lane, (done, _) in enumerate(done_and_new):
        place = torch.arange(done, device=device)
        block = table[row_L[lane], place // block_size].long()
        keys[block, :, place % block_size] = k_all[lane, :done].to(dtype)
        values[block, :, place % block_size] = v_all[lane, :done].to(dtype)
    k_all[lane_T, position_T] = turned[:, shape.num_heads :]
    v_all[lane_T, position_T] = qkv[:, -kv_heads:].double()
    slot_T = table[row_L[lane_T], position_T // block_size].long() * block_size + position_T % block_size
    query_start = torch.cat((torch.zeros(1, dtype=torch.int64), new.cumsum(0))).int().to(device)
    lanes = PagedLanes(
        row_L, torch.tensor(end, dtype=torch.int32, device=device), table, query_start if mixed else None
    )
    return AttentionCase(
        shape, lanes, PagedPool(keys, values), HeadPrep(rope, norm, 1e-6), qkv, position_T, slot_T, lane_T,
        k_all, v_all, turned[:, : shape.num_heads],
    )


def with_float8_pool(case: AttentionCase, k_scale: float, v_scale: float) -> AttentionCase:
    """The same step over a pool of float8_e4m3fn; k_all and v_all become what it holds (and will hold)."""
    stored = []
    for name, scale in (("keys", k_scale), ("values", v_scale)):
        pool = getattr(case.pool, name)
        stored.append((pool.float() / scale).to(torch.float8_e4m3fn))
    k_all, v_all = (
        (each.float() / scale).to(torch.float8_e4m3fn).double() * scale
        for each, scale in ((case.k_all, k_scale), (case.v_all, v_scale))
    )
    return replace(case, pool=PagedPool(*stored, k_scale, v_scale), k_all=k_all, v_all=v_all)


def fill_writes(
    writes: PackedWrites, draw: np.random.Generator, size: int, count: int, spans: Sequence[int]
) -> None:
    """Anew: spans of these lengths, one after the other with gaps between, and `count` single words beyond
    them, below `size`."""
    writes.clear()
    end = 0
    for length in spans:
        assert writes.add_span(end, draw.integers(0, 1 << 30, length, dtype=np.int32))
        end += length + 3
    places = (end + draw.permutation(size - end)[:count]).astype(np.int32)
    assert writes.add_cells(places, draw.integers(0, 1 << 30, count, dtype=np.int32))
    writes.seal()
