"""The memory plan in numbers, and the measure that a CPU takes. What a GPU reports is checked there
(tests/gpu/check_memory.py)."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys
from typing import Any

import pytest

from slipstream.config.args import EngineArgs
from slipstream.config.device import DeviceFacts
from slipstream.config.model import ModelSpec, RopeSpec
from slipstream.config.plan import EnginePlan
from slipstream.config.resolve import resolve
from slipstream.runner import memory_eager
from slipstream.runner.memory import GRAPH_MARGIN, Measured, estimate_graphs, settle, size_kv_pool
from slipstream.runner.memory_cpu import measured_cpu, total_memory

GIB, MIB = 2**30, 2**20
H200 = DeviceFacts(kind="cuda", name="H200", memory_bytes=140 * GIB, has_triton=True, capability=(9, 0))
MODEL = ModelSpec(
    architecture="LlamaForCausalLM", vocab_size=1000, hidden_size=64, intermediate_size=128, num_layers=2,
    num_heads=4, num_kv_heads=2, head_dim=16, rms_norm_eps=1e-5, rope=RopeSpec(theta=1e4, rotary_dim=16),
    max_model_len=4096, windows=(None, None),
)
TAKEN = Measured(
    weights=16 * GIB, activations=2 * GIB, graphs=1 * GIB, other=3 * GIB, spare=GIB // 2,
    allowed=100 * GIB, capacity=140 * GIB,
)


def plan(**flags: Any) -> EnginePlan:
    return resolve(EngineArgs(model="m", **flags), MODEL, H200)


def test_the_pool_takes_what_everything_else_leaves() -> None:
    made = size_kv_pool(plan(), TAKEN, 3 * MIB)
    left = (100 - 16 - 2 - 1 - 3) * GIB - GIB // 2
    assert made.num_blocks == left // (3 * MIB)
    assert left - 3 * MIB < made.kv <= left
    assert made.total == made.kv + 22 * GIB and made.total <= made.allowed


def test_the_pool_is_no_larger_than_all_rows_at_full_length() -> None:
    made = size_kv_pool(plan(max_num_seqs=3, max_model_len=100), TAKEN, 16)
    assert made.num_blocks == 3 * 7 + 1  # 100 tokens are 7 blocks of 16, and there is the null block
    assert made.total < made.allowed


def test_a_limit_of_the_device_holds_only_for_a_pool_nobody_asked_for() -> None:
    limited = dataclasses.replace(TAKEN, most_kv=GIB)
    assert size_kv_pool(plan(), limited, MIB).num_blocks == 1024
    assert size_kv_pool(plan(kv_cache_memory_bytes=2 * GIB), limited, MIB).num_blocks == 2048
    assert size_kv_pool(plan(num_gpu_blocks_override=5), limited, MIB).kv == 5 * MIB


@pytest.mark.parametrize(
    ("flags", "changes", "words"),
    [
        ({"gpu_memory_utilization": 0.1}, {"allowed": 14 * GIB}, "--gpu-memory-utilization=0.1: no room"),
        ({"gpu_memory_utilization": 0.1}, {"allowed": 22 * GIB + GIB // 2 + MIB}, "weights 16,384"),
        ({"kv_cache_memory_bytes": 100}, {}, "--kv-cache-memory-bytes=100: no room"),
        ({"kv_cache_memory_bytes": 119 * GIB}, {}, "--kv-cache-memory-bytes=.*more than the 143,360 MiB"),
        ({"num_gpu_blocks_override": 200_000}, {}, "--num-gpu-blocks-override=200000: .*more than"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_flag_and_the_figures(
    flags: dict[str, Any], changes: dict[str, int], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        size_kv_pool(plan(**flags), dataclasses.replace(TAKEN, **changes), MIB)


def test_a_pool_too_small_for_the_longest_request_is_told(caplog: pytest.LogCaptureFixture) -> None:
    size_kv_pool(plan(num_gpu_blocks_override=257), TAKEN, MIB)
    assert not caplog.records
    size_kv_pool(plan(num_gpu_blocks_override=256), TAKEN, MIB)
    assert "4080 tokens" in caplog.text and "--max-model-len=4096" in caplog.text


@pytest.mark.parametrize(
    ("tried", "count", "expected"),
    [([], 30, 0), ([1000, 10], 0, 0), ([1000], 1, 1000), ([1000, 10, 20], 51, 2000), ([0, 0], 9, 0)],
)
def test_graphs_cost_the_first_ones_pool_and_a_share_each(
    tried: list[int], count: int, expected: int
) -> None:
    assert abs(estimate_graphs(tried, count) - expected * GRAPH_MARGIN) <= 1


def test_the_plan_is_held_against_the_driver(caplog: pytest.LogCaptureFixture) -> None:
    """Row 57 of the reported faults; tests/gpu/check_memory.py compares with a real driver at 0.95."""
    made = size_kv_pool(plan(), TAKEN, 3 * MIB)
    with caplog.at_level(logging.INFO, "slipstream.memory"):
        final = settle(made, 900 * MIB, made.total)
    assert final.graphs == 900 * MIB and final.num_blocks == made.num_blocks
    assert final.error(made.total) == pytest.approx(-(124 * MIB) / made.total)
    assert "the plan says -0.1" in caplog.text and "more than was kept" not in caplog.text
    with caplog.at_level(logging.INFO, "slipstream.memory"):
        settle(made, 1124 * MIB, made.total)
    assert "CUDA graphs took 1124 MiB, 100 MiB more than was kept" in caplog.text


def test_every_part_is_printed_in_mebibytes_and_blocks() -> None:
    text = size_kv_pool(plan(num_gpu_blocks_override=300), TAKEN, MIB).describe()
    assert text == (
        "weights 16,384 MiB, activations 2,048 MiB, graphs 1,024 MiB, kv 300 MiB, other 3,072 MiB, "
        "total 22,828 MiB (300 blocks), of 102,400 MiB allowed"
    )


PEAK = """
import torch
from slipstream.runner.memory_cpu import measure_peak

def work():
    for _ in range(2):
        torch.ones(64 << 20, dtype=torch.uint8)

print(measure_peak(work) / (64 << 20))
"""


def test_a_cpus_peak_is_what_the_work_held_at_once() -> None:
    """In a process of its own: one that has run other tests may have the memory already."""
    command = [sys.executable, "-c", PEAK]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert 0.9 < float(done.stdout) < 1.3


def test_a_cpus_plan_stays_within_the_machine() -> None:
    made = measured_cpu(plan(device="cpu", gpu_memory_utilization=0.5), 7 * MIB, 3 * MIB)
    assert made.capacity == total_memory() > made.allowed - made.weights > 0
    assert (made.weights, made.activations, made.graphs, made.other) == (7 * MIB, 3 * MIB, 0, 0)


@pytest.mark.parametrize(("rows", "drafts", "positions"), [(8, 0, 8), (8, 4, 40), (256, 8, 1024)])
def test_a_cpus_plan_holds_the_logits_of_every_position_that_a_step_samples(
    rows: int, drafts: int, positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more than 1,024 with drafts (slipstream/runner/shapes.py)."""
    monkeypatch.setattr(memory_eager, "measure_peak", lambda work: 3 * memory_eager.PROFILE_TOKENS)
    config = {"method": "ngram", "num_speculative_tokens": drafts} if drafts else None
    made = plan(device="cpu", max_num_seqs=rows, speculative_config=config)
    found = memory_eager.plan_eager_memory(made, 0, 4096, lambda blocks: None, lambda tokens: None)
    logits = positions * MODEL.vocab_size * 4
    assert found.activations == logits + 3 * made.max_num_batched_tokens
