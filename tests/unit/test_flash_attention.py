"""`--attention-backend flash`: what is refused and why, and what FlashAttention 3 is given. Its operator is a
stand-in that computes from exactly what it gets, by the meaning that FlashAttention 3's source gives it."""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases import AttentionCase, attention_case

from slipstream.attention import paged_flash
from slipstream.attention.paged_flash import PagedFlashAttention
from slipstream.attention.protocol import AttentionBatch
from slipstream.config.args import EngineArgs
from slipstream.config.device import ASSUMED_CUDA, DeviceFacts
from slipstream.config.model import ModelSpec, RopeSpec
from slipstream.config.plan import EnginePlan
from slipstream.config.resolve import resolve
from slipstream.kernels import flash_attention as kernel
from slipstream.kernels.attention_common import LayerAttention
from slipstream.runner.bucket_tick import BucketTick

H200 = dataclasses.replace(ASSUMED_CUDA, assumed=False)
WITHOUT = dataclasses.replace(H200, flash_lacks=None)
WHOLE_BUILD = dataclasses.replace(H200, flash_lacks=frozenset())
B200 = dataclasses.replace(H200, name="NVIDIA B200", capability=(10, 0))
CPU = DeviceFacts(kind="cpu", name="no CUDA device", memory_bytes=8 << 30)
BARE = dataclasses.replace(H200, has_triton=False)
SHAPES = [
    LayerAttention(4, 2, 64, 0.09),
    LayerAttention(6, 2, 32, 0.125, window=21),
    LayerAttention(3, 3, 16, 0.1, soft_cap=5.0),
]
MIXED = [(40, 1), (0, 1), (0, 19), (33, 5), (3, 2), (5, 1)]


def plan(
    facts: DeviceFacts = H200, window: int | None = None, head_dim: int = 128, **flags: Any
) -> EnginePlan:
    spec = ModelSpec(
        architecture="MistralForCausalLM", vocab_size=1000, hidden_size=64, intermediate_size=128,
        num_layers=2, num_heads=4, num_kv_heads=2, head_dim=head_dim, rms_norm_eps=1e-5,
        rope=RopeSpec(theta=1e4, rotary_dim=head_dim), max_model_len=4096, windows=(None, window),
    )  # fmt: skip
    usual = {"attention_backend": "flash", "block_size": 128}
    return resolve(EngineArgs(model="m", **usual | flags), spec, facts)


def test_flash_is_planned_with_graphs_on_a_hopper_gpu() -> None:
    made = plan()
    assert made.attention_backend == "flash" and made.graph_sizes and made.token_buckets
    assert made.choices["attention_backend"].value == "flash"
    assert plan(window=4096).attention_backend == "flash", "no lane is longer than the window"
    assert plan(WHOLE_BUILD, window=100, block_size=16, dtype="float16").attention_backend == "flash"


@pytest.mark.parametrize(("facts", "said"), [(H200, True), (WITHOUT, True), (B200, False)])
def test_auto_stays_with_triton_and_says_that_flash_may_be_asked_for(
    facts: DeviceFacts, said: bool
) -> None:
    made = plan(facts, attention_backend="auto")
    assert made.attention_backend == "triton"
    assert ("`flash`" in made.choices["attention_backend"].reason) == said


@pytest.mark.parametrize(
    ("facts", "flags", "message"),
    [
        (CPU, {}, "Hopper GPU.*a CPU"),
        (H200, {"device": "cpu"}, "Hopper GPU.*a CPU"),
        (B200, {}, "Hopper GPU.*NVIDIA B200 with 10.0"),
        (WITHOUT, {}, "not installed.*fa3-fwd"),
        (BARE, {}, "needs Triton"),
        (H200, {"batch_invariant": True}, "--batch-invariant"),
        (H200, {"kv_cache_dtype": "fp8"}, "--kv-cache-dtype=fp8"),
        (H200, {"dtype": "float16"}, "computes in bfloat16, and --dtype is float16"),
        (WHOLE_BUILD, {"dtype": "float32"}, "bfloat16 or float16, and --dtype is float32"),
        (H200, {"head_dim": 320}, "no kernel for heads of 320"),
        (H200, {"head_dim": 100}, "no kernel for heads of 100"),
        (H200, {"window": 1000}, "no sliding windows.*1000 positions"),
        (H200, {"window": 1000, "max_model_len": 1001}, "no sliding windows"),
        (H200, {"block_size": 16}, "--block-size=16.*heads of 128.*multiples of 128"),
        (H200, {"block_size": 64, "head_dim": 64}, "multiples of 128"),
        (H200, {"head_dim": 256}, "--block-size=128.*heads of 256.*multiples of 80"),
    ],
)
def test_what_flash_cannot_do_is_refused_with_its_name(
    facts: DeviceFacts, flags: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^--attention-backend=flash: .*{message}"):
        plan(facts, **flags)


def test_the_builds_own_list_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fa3_fwd_config", None)
    assert kernel.installed_build() is None
    flags = {"FLASHATTENTION_DISABLE_LOCAL": True, "FLASHATTENTION_DISABLE_SPLIT": False}
    monkeypatch.setitem(sys.modules, "fa3_fwd_config", SimpleNamespace(CONFIG={"build_flags": flags}))
    assert kernel.installed_build() == {"LOCAL"}


class Operator:
    """fa3_fwd_cuda.fwd: dense float64 attention of what page_table, lengths and offsets say."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def fwd(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> None:
        self.calls.append(given)
        assert given["is_causal"] and given["num_splits"] == 1
        for name in ("cu_seqlens_q", "seqused_q", "seqused_k", "page_table", "kv_batch_idx"):
            assert given[name].dtype == torch.int32 and given[name].stride(-1) == 1, name
        starts, used, lengths = (given[name].tolist() for name in ("cu_seqlens_q", "seqused_q", "seqused_k"))
        group, left = q.shape[1] // k.shape[2], given["window_size_left"]
        for lane, (count, length) in enumerate(zip(used, lengths, strict=True)):
            pages = given["page_table"][given["kv_batch_idx"][lane], : -(-length // k.shape[1])].long()
            keys, values = (
                pool[pages].flatten(0, 1)[:length].double().repeat_interleave(group, 1) for pool in (k, v)
            )
            for query in range(count):
                end = length - count + query + 1
                first = 0 if left < 0 else max(0, end - 1 - left)
                token = starts[lane] + query
                score = torch.einsum("hd,shd->hs", q[token].double(), keys[first:end])
                score *= given["softmax_scale"]
                if given["softcap"]:
                    score = torch.tanh(score / given["softcap"]) * given["softcap"]
                out = torch.einsum("hs,shd->hd", score.softmax(-1), values[first:end])
                given["out"][token] = out.to(q.dtype)


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> Operator:
    made = Operator()
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", SimpleNamespace(fa3_fwd_cuda=made))
    monkeypatch.setattr(kernel, "use_flash", lambda tensor: True)
    kernel._operator.cache_clear()
    yield made
    kernel._operator.cache_clear()


def step_of(case: AttentionCase, least_tokens: int, max_len: int = 10**6) -> torch.Tensor:
    """One layer's attention of a mixed step, through the backend, from the raw projection."""
    shape, pool, lanes = case.shape, case.pool, case.lanes
    backend = PagedFlashAttention(
        [shape], pool.block_size, torch.float32, torch.device("cpu"),
        max_lanes=len(lanes.row_L), max_len=max_len, least_tokens=least_tokens,
    )  # fmt: skip
    backend.pools.append(pool)
    assert lanes.query_start_L1 is not None
    batch = AttentionBatch(
        lanes.query_start_L1, lanes.length_L, case.position_T, case.slot_T, lanes.row_L, lanes.blocks_RB,
        np.zeros(0, np.int32), np.zeros(0, np.int32), 2,
    )  # fmt: skip
    return backend.bind(batch).from_qkv(0, case.qkv_TXD, case.prep)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("real", [True, False], ids=["operator", "reference"])
def test_a_long_step_attends_by_flash_but_for_single_tokens(
    shape: LayerAttention, real: bool, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not real:
        monkeypatch.undo()
    case = attention_case(shape, MIXED, seed=1, mixed=True, block_size=32)
    got = step_of(case, least_tokens=20)
    torch.testing.assert_close(got.double(), case.expected(), atol=2e-5, rtol=1e-5)
    assert len(operator.calls) == real
    if real:
        assert operator.calls[0]["seqused_q"].tolist() == [0, 0, 19, 5, 2, 0]
        assert operator.calls[0]["window_size_left"] == (-1 if shape.window is None else shape.window - 1)
        assert operator.calls[0]["max_seqlen_q"] == 256, "a bound by which pages come by TMA"


def test_short_steps_and_windows_that_hide_nothing_do_not_reach_flash(operator: Operator) -> None:
    case = attention_case(SHAPES[1], MIXED, seed=2, mixed=True, block_size=32)
    expected = case.expected()
    torch.testing.assert_close(step_of(case, least_tokens=200).double(), expected, atol=2e-5, rtol=1e-5)
    assert not operator.calls and paged_flash.LEAST_TOKENS >= 256
    step_of(case, least_tokens=1, max_len=21)
    assert operator.calls[0]["window_size_left"] == -1


def test_nothing_foreign_runs_while_launches_are_listed(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "is_listing", lambda: True)
    case = attention_case(SHAPES[0], MIXED, mixed=True, block_size=32)
    step_of(case, least_tokens=1)
    assert not operator.calls


def test_blocks_of_a_new_owner_hold_nothing_of_the_last() -> None:
    backend = PagedFlashAttention(SHAPES[:1], 16, torch.float32, torch.device("cpu"), max_lanes=1, max_len=64)
    backend.allocate(4)
    for each in (backend.pools[0].keys, backend.pools[0].values):
        each.fill_(float("nan"))
    work = SimpleNamespace(
        writes=SimpleNamespace(apply=lambda arena: None),
        fresh_blocks=np.array([1, 3], np.int32),
        prompt_scores=(),
    )
    tick: Any = object.__new__(BucketTick)  # no more of it than a step without a graph takes
    tick._attention, tick.launch = backend, lambda shape: None
    tick._table = SimpleNamespace(arena=None, device=torch.device("cpu"))
    tick._run(work, SimpleNamespace(shape=None))
    for each in (backend.pools[0].keys, backend.pools[0].values):
        assert each.flatten(1).isnan().all(1).tolist() == [True, False, True, False]
        assert not each[[1, 3]].any()


def test_tensors_that_do_not_fit_are_refused() -> None:
    case = attention_case(SHAPES[0], MIXED, mixed=True, block_size=32)
    own, q = kernel.flash_lanes(case.lanes), case.q_prepared.float()
    with pytest.raises(ValueError, match=r"\[T, H, D\]"):
        kernel.flash_attention(q[:, 1:], own, case.lanes, case.pool, case.shape, q)
    with pytest.raises(ValueError, match="one type"):
        kernel.flash_attention(q.bfloat16(), own, case.lanes, case.pool, case.shape, q)
    with pytest.raises(ValueError, match="query_start"):
        kernel.flash_lanes(dataclasses.replace(case.lanes, query_start_L1=None))
