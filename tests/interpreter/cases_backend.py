"""The Triton attention backend in Triton's interpreter: whole steps against float64 formulas."""

from dataclasses import replace

import pytest
import torch
from kernel_cases import attention_case

from slipstream.attention import paged_triton
from slipstream.attention.paged_triton import PagedTritonAttention
from slipstream.attention.protocol import AttentionBatch, LayerAttention
from slipstream.kernels.decode_config import DecodeConfig
from slipstream.kernels.paged import PagedLanes, PagedPool

SHAPE = LayerAttention(6, 2, 64, 0.125)
STEPS = {
    "decode": [(0, 1), (31, 1), (64, 1), (7, 1)],
    "mixed": [(50, 1), (3, 1), (0, 21), (30, 9), (12, 1)],
    "prefill": [(0, 33)],
}


def run(case, num_decode_lanes, fused, **options):
    backend = PagedTritonAttention([SHAPE], 16, torch.float32, torch.device("cpu"), max_lanes=8, **options)
    backend.allocate(1)
    backend.pools[0] = PagedPool(case.pool.keys.clone(), case.pool.values.clone())
    step = backend.bind(
        AttentionBatch(
            query_start_L1=case.lanes.query_start_L1,
            length_L=case.lanes.length_L,
            position_T=case.position_T,
            slot_T=case.slot_T,
            row_L=case.lanes.row_L,
            blocks_RB=case.lanes.blocks_RB,
            query_len_L=case.lanes.query_start_L1.diff().numpy(),
            length_bound_L=case.lanes.length_L.numpy(),
            num_decode_lanes=num_decode_lanes,
        )
    )
    if fused:
        return step.from_qkv(0, case.qkv_TXD, case.prep)
    k, v = case.k_all[case.lane_T, case.position_T], case.v_all[case.lane_T, case.position_T]
    return step(0, case.q_prepared.float(), k.float(), v.float())


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("batch_invariant", [True, False])
def test_a_step_equals_dense_attention(kind, fused, batch_invariant):
    case = attention_case(SHAPE, STEPS[kind], mixed=True)
    decodes = {"decode": 4, "mixed": 2, "prefill": 0}[kind]
    out = run(case, decodes, fused, batch_invariant=batch_invariant)
    torch.testing.assert_close(out.double(), case.expected(), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["decode", "mixed"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_step_with_the_longest_lanes_first_equals_dense_attention(kind, fused, monkeypatch):
    monkeypatch.setattr(paged_triton, "choose_decode", lambda *_: DecodeConfig(2, 16, 1, 2, ordered=True))
    case = attention_case(SHAPE, STEPS[kind], mixed=True)
    out = run(case, {"decode": 4, "mixed": 2}[kind], fused)
    torch.testing.assert_close(out.double(), case.expected(), atol=2e-5, rtol=1e-5)


def test_a_batch_invariant_lane_is_the_same_alone_to_the_bit():
    """Lane 3 of the mixed step, nine tokens after thirty, in a step of its own."""
    case = attention_case(SHAPE, STEPS["mixed"], mixed=True)
    batched = run(case, 2, True, batch_invariant=True)[case.lane_T == 3]
    lanes = case.lanes
    alone = replace(
        case,
        **{name: getattr(case, name)[case.lane_T == 3] for name in ("qkv_TXD", "position_T", "slot_T")},
        lanes=PagedLanes(
            lanes.row_L[3:4], lanes.length_L[3:4], lanes.blocks_RB, torch.tensor([0, 9], dtype=torch.int32)
        ),
    )
    assert torch.equal(run(alone, 0, True, batch_invariant=True), batched)
