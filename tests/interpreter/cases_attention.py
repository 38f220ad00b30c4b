"""Attention kernels and their torch references against float64 formulas, in Triton's interpreter."""

import itertools

import pytest
import torch
from kernel_cases import attention_case, with_float8_pool

from slipstream.kernels.attention_common import LayerAttention
from slipstream.kernels.decode_attention import (
    decode_attention,
    decode_attention_reference,
    decode_from_qkv,
    decode_from_qkv_reference,
)
from slipstream.kernels.decode_config import DecodeConfig, DecodeScratch
from slipstream.kernels.lane_order import order_lanes, order_lanes_reference
from slipstream.kernels.paged import PagedLanes, clear_blocks
from slipstream.kernels.qkv_write import write_qkv, write_qkv_reference
from slipstream.kernels.varlen_attention import (
    VarlenConfig,
    list_tiles,
    list_tiles_reference,
    varlen_attention,
    varlen_attention_reference,
)

CPU = torch.device("cpu")
SHAPES = [
    LayerAttention(4, 2, 128, 0.09),
    LayerAttention(6, 2, 64, 0.125, window=21),
    LayerAttention(3, 3, 96, 0.1, soft_cap=5.0),
    LayerAttention(8, 1, 256, 0.07, window=1, soft_cap=3.0),
]
DECODES = [(0, 1), (1, 1), (15, 1), (16, 1), (70, 1), (37, 1)]
MIXED = [(40, 1), (0, 1), (0, 19), (33, 5), (3, 2), (5, 1)]
CONFIGS = [
    DecodeConfig(1, 32, 1, 2),
    DecodeConfig(4, 16, 1, 2),
    DecodeConfig(8, 16, 1, 2, min_tiles=2),
    DecodeConfig(4, 16, 1, 2, ordered=True),
    DecodeConfig(8, 16, 1, 2, programs=12),
]


def poisoned_scratch(lanes, shape, config):
    scratch = DecodeScratch(lanes, shape, lanes * config.splits, CPU)
    scratch.acc.fill_(float("nan"))
    scratch.lse.fill_(float("nan"))
    return scratch


def close(got, expected, atol=2e-5):
    torch.testing.assert_close(got.double(), expected, atol=atol, rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_decode_from_qkv_attends_and_stores_the_new_key(shape, config):
    case = attention_case(shape, DECODES, seed=shape.head_dim, normed=shape.head_dim != 64)
    scratch = poisoned_scratch(len(DECODES), shape, config)
    expected = case.expected()
    got = decode_from_qkv(case.qkv_TXD, case.slot_T, case.prep, case.lanes, case.pool, shape, config, scratch)
    close(got, expected)
    close(case.stored(case.pool.keys), case.k_all[case.lane_T, case.position_T])
    close(case.stored(case.pool.values), case.v_all[case.lane_T, case.position_T])
    assert not scratch.counter.any()
    plain = decode_from_qkv_reference(case.qkv_TXD, case.slot_T, case.prep, case.lanes, case.pool, shape)
    close(plain, expected)


def test_a_dead_lane_on_the_null_block_sees_itself_alone():
    shape = SHAPES[0]
    case = attention_case(shape, [(20, 1), (0, 1)], seed=3)
    case.slot_T[1] = 0
    case.lanes.blocks_RB[case.lanes.row_L[1]] = 0
    got = decode_from_qkv(
        case.qkv_TXD, case.slot_T, case.prep, case.lanes, case.pool, shape, CONFIGS[1],
        poisoned_scratch(2, shape, CONFIGS[1]),
    )
    close(got, case.expected())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[1], CONFIGS[3]], ids=str)
def test_decode_leaves_lanes_with_more_tokens_alone(shape, config):
    case = attention_case(shape, MIXED, seed=1, mixed=True).with_step_stored()
    q = case.q_prepared.float().transpose(0, 1).contiguous().transpose(0, 1)
    single = torch.bincount(case.lane_T)[case.lane_T] == 1
    for run in ("kernel", "reference"):
        out = torch.full(q.shape, float("nan"))
        if run == "kernel":
            scratch = poisoned_scratch(len(MIXED), shape, config)
            decode_attention(q, case.lanes, case.pool, shape, config, scratch, out)
        else:
            decode_attention_reference(q, case.lanes, case.pool, shape, out)
        close(out[single], case.expected()[single])
        assert out[~single].isnan().all()


@pytest.mark.parametrize("lanes", [1, 16, 46, 300])
def test_ordered_lanes_come_once_each_and_the_longest_first(lanes):
    length_L = torch.randint(1, 400, (lanes,), generator=torch.Generator().manual_seed(lanes)).int()
    length_L[::3] = 7
    lengths = length_L.tolist()
    expected = sorted(range(lanes), key=lambda lane: (-lengths[lane], lane))
    for order in (order_lanes, order_lanes_reference):
        assert order(length_L).dtype == torch.int32
        assert order(length_L).tolist() == expected


def test_an_order_of_fewer_lanes_is_refused():
    shape, config = SHAPES[0], CONFIGS[-1]
    case = attention_case(shape, DECODES, seed=4)
    scratch = poisoned_scratch(len(DECODES), shape, config)
    with pytest.raises(ValueError, match=r"order must be int32 \[6\]"):
        decode_from_qkv(
            case.qkv_TXD, case.slot_T, case.prep, case.lanes, case.pool, shape, config, scratch,
            order_lanes(case.lanes.length_L)[1:],
        )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("config", [VarlenConfig(16, 16, 4, 2), VarlenConfig(32, 32, 4, 2)], ids=str)
@pytest.mark.parametrize("least", [1, 2])
def test_varlen_attends_each_query_to_the_keys_before_it(shape, config, least):
    case = attention_case(shape, MIXED, seed=2, mixed=True).with_step_stored()
    q = case.q_prepared.float()
    tiles = list_tiles(case.lanes, len(q), config.queries(shape), least)
    listed = torch.bincount(case.lane_T)[case.lane_T] >= least
    for run in (varlen_attention, varlen_attention_reference):
        out = torch.full(q.shape, float("nan"))
        run(q, tiles, case.lanes, case.pool, shape, config, out)
        close(out[listed], case.expected()[listed])
        assert out[~listed].isnan().all()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("least", [1, 2])
def test_tiles_cover_every_query_of_the_listed_lanes_once_and_the_longest_come_first(seed, least):
    generator = torch.Generator().manual_seed(seed)
    count_L = torch.randint(0 if least == 2 else 1, 12, (13,), generator=generator)
    start = torch.cat((torch.zeros(1, dtype=torch.int64), count_L.cumsum(0))).int()
    done_L = torch.randint(0, [1, 5, 90, 3000][seed], (13,), generator=generator)
    lanes = PagedLanes(torch.arange(13), (count_L + done_L).int(), torch.zeros(13, 1).int(), start)
    tokens = int(count_L.sum()) + seed
    lists = [f(lanes, tokens, 3, least) for f in (list_tiles, list_tiles_reference)]
    assert torch.equal(lists[0].lane_X, lists[1].lane_X)
    assert torch.equal(lists[0].first_X, lists[1].first_X)
    assert len(lists[0].lane_X) == tokens // 3 + 13
    tiles = list(zip(lists[0].lane_X.tolist(), lists[0].first_X.tolist(), strict=True))
    seen = sorted(
        (lane, query)
        for lane, first in tiles
        for query in range(first, first + 3)
        if lane >= 0 and query < count_L[lane]
    )
    assert seen == [(lane, q) for lane, n in enumerate(count_L.tolist()) if n >= least for q in range(n)]
    keys = [int(done_L[lane]) + first + 3 for lane, first in tiles if lane >= 0]
    assert all(later <= 1.13 * max(earlier, 1) for earlier, later in itertools.pairwise(keys))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_write_qkv_prepares_q_and_stores_k_and_v(shape):
    case = attention_case(shape, MIXED, seed=5, normed=shape.head_dim != 96)
    kv_heads = shape.num_kv_heads
    for run in (write_qkv, write_qkv_reference):
        before = case.pool.keys.clone()
        case.pool.keys.fill_(float("nan"))
        q = run(case.qkv_TXD, case.position_T, case.slot_T, kv_heads, case.prep, case.pool)
        close(q, case.q_prepared)
        close(case.stored(case.pool.keys), case.k_all[case.lane_T, case.position_T])
        close(case.stored(case.pool.values), case.v_all[case.lane_T, case.position_T])
        assert int((~case.pool.keys.isnan()).sum()) == len(q) * kv_heads * shape.head_dim
        case.pool.keys.copy_(before)


def test_a_float8_pool_is_scaled_both_ways():
    """The interpreter's own rounding to float8 is wrong, so attention is compared with what the pool then
    holds; the GPU check compares the stored keys too."""
    shape, config = SHAPES[0], CONFIGS[1]
    case = with_float8_pool(attention_case(shape, DECODES, seed=7), 0.03, 0.02)
    got = decode_from_qkv(
        case.qkv_TXD, case.slot_T, case.prep, case.lanes, case.pool, shape, config,
        poisoned_scratch(len(DECODES), shape, config),
    )
    for pool, scale, everything in ((case.pool.keys, 0.03, case.k_all), (case.pool.values, 0.02, case.v_all)):
        everything[case.lane_T, case.position_T] = case.stored(pool).double() * scale
    close(got, case.expected(), atol=1e-4)


@pytest.mark.parametrize(("size", "dtype"), [((2, 16, 24), torch.float32), ((5, 16, 64), torch.bfloat16)])
def test_cleared_blocks_are_zero_in_every_pool_and_no_others_are_touched(size, dtype):
    pages = torch.full((3, 9, *size), float("nan"), dtype=dtype)
    blocks = torch.tensor([8, 0, 3])
    clear_blocks(pages, blocks)
    others = [block for block in range(9) if block not in blocks.tolist()]
    assert not pages[:, blocks].any()
    assert pages[:, others].isnan().all()
    clear_blocks(pages, blocks[:0])
    with pytest.raises(ValueError, match="contiguous"):
        clear_blocks(pages.transpose(0, 1), blocks)
