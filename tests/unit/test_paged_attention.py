"""Paged attention against a dense float64 formula, over random block tables."""

import numpy as np
import pytest
import torch

from slipstream.attention.paged_torch import PagedTorchAttention
from slipstream.attention.protocol import AttentionBatch, LayerAttention


def dense(q, k, v, position, shape):
    """float64: q [H, D] at position, k and v [S, G, D]."""
    group = shape.num_heads // shape.num_kv_heads
    out = np.zeros(q.shape)
    for head in range(shape.num_heads):
        score = k[:, head // group] @ q[head] * shape.scale
        if shape.soft_cap is not None:
            score = np.tanh(score / shape.soft_cap) * shape.soft_cap
        keys = np.arange(len(k))
        seen = keys <= position
        if shape.window is not None:
            seen &= keys > position - shape.window
        weight = np.where(seen, np.exp(score - score[seen].max()), 0)
        out[head] = weight @ v[:, head // group] / weight.sum()
    return out


@pytest.mark.parametrize(
    "heads,kv_heads,window,soft_cap",
    [
        (6, 2, None, None),
        (4, 4, None, None),
        (4, 1, 5, None),
        (6, 3, 9, 2.0),
        (2, 2, None, 3.0),
    ],
)
@pytest.mark.parametrize(
    "decodes,prefills",
    [
        ([9], []),
        ([1, 5, 33], []),
        ([], [(0, 7)]),
        ([17, 4], [(0, 12), (6, 5)]),
        ([70, 3, 200, 21], [(40, 3)]),
        # Decode lanes with drafts: (computed before, tokens of this step).
        ([(30, 4), (5, 1), (0, 3), (90, 2)], []),
        ([(64, 17), 9, (200, 2), (31, 5)], [(6, 5)]),
        ([7, (150, 3)], [(20, 2)]),
    ],
)
def test_a_step_equals_dense_attention(heads, kv_heads, window, soft_cap, decodes, prefills):
    rng = np.random.default_rng(len(decodes) * 10 + heads)
    size, block = 16, 8
    shape = LayerAttention(heads, kv_heads, size, 0.21, window, soft_cap)
    lanes = [n if isinstance(n, tuple) else (n - 1, 1) for n in decodes]
    lanes += prefills  # (computed before, query length)
    blocks = [-(-(a + b) // block) for a, b in lanes]
    ids = rng.permutation(sum(blocks)) + 1
    table = np.zeros((len(lanes), max(blocks)), np.int32)
    for lane, (count, end) in enumerate(zip(blocks, np.cumsum(blocks), strict=True)):
        table[lane, :count] = ids[end - count : end]
    backend = PagedTorchAttention([shape], block, torch.float32, torch.device("cpu"))
    backend.allocate(sum(blocks) + 1)
    keys, values = (
        rng.normal(size=(len(lanes), max(a + b for a, b in lanes), kv_heads, size)) for _ in range(2)
    )
    for lane, (done, _) in enumerate(lanes):
        for place in range(done):
            page, slot = table[lane, place // block], place % block
            backend.keys[0][page, slot] = torch.from_numpy(keys[lane, place])
            backend.values[0][page, slot] = torch.from_numpy(values[lane, place])
    position = np.concatenate([np.arange(a, a + b) for a, b in lanes])
    lane_of = np.repeat(np.arange(len(lanes)), [b for _, b in lanes])
    length = np.array([a + b for a, b in lanes], np.int32)
    query_len = np.array([b for _, b in lanes], np.int32)
    bound = length.copy()
    bound[: len(decodes)] += rng.integers(0, 3, len(decodes))  # the host may be ahead of the device
    bound = np.minimum(bound, [n * block for n in blocks]).astype(np.int32)
    q = rng.normal(size=(len(position), heads, size))
    step = backend.bind(
        AttentionBatch(
            query_start_L1=torch.from_numpy(np.concatenate(([0], np.cumsum(query_len))).astype(np.int32)),
            length_L=torch.from_numpy(length),
            position_T=torch.from_numpy(position),
            slot_T=torch.from_numpy(
                table[lane_of, position // block].astype(np.int64) * block + position % block
            ),
            row_L=torch.arange(len(lanes)),
            blocks_RB=torch.from_numpy(table),
            query_len_L=query_len,
            length_bound_L=bound,
            num_decode_lanes=len(decodes),
        )
    )
    new = [torch.from_numpy(a[lane_of, position]).float() for a in (keys, values)]
    out = step(0, torch.from_numpy(q).float(), *new)
    for token, (lane, place) in enumerate(zip(lane_of, position, strict=True)):
        expected = dense(q[token], keys[lane, : place + 1], values[lane, : place + 1], place, shape)
        np.testing.assert_allclose(out[token].numpy(), expected, atol=2e-5)
