"""Flags into a plan: what follows from the device, and what is refused with the flag's name. The machines
are made up: a plan follows from numbers alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from slipstream.config.args import EngineArgs
from slipstream.config.device import DeviceFacts, default_graph_sizes
from slipstream.config.model import ModelSpec, RopeSpec
from slipstream.config.plan import EnginePlan
from slipstream.config.resolve import resolve

H200 = DeviceFacts(kind="cuda", name="H200", memory_bytes=140 << 30, has_triton=True, capability=(9, 0))
BARE_CUDA = DeviceFacts(kind="cuda", name="H200", memory_bytes=140 << 30, capability=(9, 0))
A100 = DeviceFacts(kind="cuda", name="A100", memory_bytes=80 << 30, has_triton=True, capability=(8, 0))
CPU = DeviceFacts(kind="cpu", name="no CUDA device", memory_bytes=8 << 30)
INTERPRETER = DeviceFacts(kind="cpu", name="no CUDA device", memory_bytes=8 << 30, has_triton=True)
MODEL = ModelSpec(
    architecture="LlamaForCausalLM",
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope=RopeSpec(theta=1e4, rotary_dim=16),
    max_model_len=4096,
    windows=(None, None),
)
COMPILE = {"mode": "stock_torch_compile"}


def plan(facts: DeviceFacts = H200, **flags: Any) -> EnginePlan:
    return resolve(EngineArgs(model="m", **flags), MODEL, facts)


def test_a_gpu_with_triton_captures_its_steps() -> None:
    made = plan()
    assert (made.device, made.attention_backend, made.kv_cache_dtype) == ("cuda", "triton", "bfloat16")
    assert (made.batch_invariant, made.compile_mode) == (False, "none")
    assert made.max_num_batched_tokens == 8192
    assert made.graph_sizes[:9] == (1, 2, 4, 8, 16, 24, 32, 48, 64) and made.graph_sizes[-1] == 256
    assert made.token_buckets == (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    assert made.choices["cuda_graphs"].value == made.graph_sizes


@pytest.mark.parametrize(
    ("facts", "flags", "reason"),
    [
        (H200, {"enforce_eager": True}, "enforce-eager"),
        (H200, {"attention_backend": "torch"}, "torch operations"),
        (BARE_CUDA, {}, "torch operations"),
        (H200, {"device": "cpu"}, "a CPU"),
        (CPU, {}, "a CPU"),
    ],
)
def test_where_graphs_are_off_the_plan_says_why(
    facts: DeviceFacts, flags: dict[str, Any], reason: str
) -> None:
    made = plan(facts, **flags)
    assert made.graph_sizes == made.token_buckets == ()
    assert made.choices["cuda_graphs"].value == "off" and reason in made.choices["cuda_graphs"].reason
    with pytest.raises(ValueError, match="--cuda-graph-sizes"):
        plan(facts, cuda_graph_sizes=[1], **flags)


@pytest.mark.parametrize(
    ("facts", "device", "backend"),
    [(H200, "auto", "triton"), (H200, "cpu", "torch"), (BARE_CUDA, "auto", "torch"), (CPU, "auto", "torch")],
)
def test_attention_is_tritons_where_its_kernels_run(facts: DeviceFacts, device: str, backend: str) -> None:
    made = plan(facts, device=device)
    assert made.attention_backend == backend
    assert made.choices["attention_backend"].reason


def test_the_interpreter_runs_tritons_attention_only_when_asked() -> None:
    assert plan(INTERPRETER).attention_backend == "torch"
    assert plan(INTERPRETER, attention_backend="triton").attention_backend == "triton"
    assert plan(INTERPRETER, attention_backend="triton").graph_sizes == ()


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, 64, 65, 100, 256, 257, 300, 1024])
def test_default_sizes_rise_to_the_last_row_and_never_pad_by_more_than_half(rows: int) -> None:
    sizes = default_graph_sizes(rows)
    assert list(sizes) == sorted(set(sizes)) and sizes[-1] == rows and sizes[0] == 1
    for lanes in range(1, rows + 1):
        bucket = next(size for size in sizes if size >= lanes)
        assert bucket < 2 * lanes and (lanes <= 256 or bucket - lanes < 32)


def test_sizes_that_are_asked_for_are_taken_in_order_and_once() -> None:
    assert plan(cuda_graph_sizes=[8, 1, 8]).graph_sizes == (1, 8)
    assert plan(cuda_graph_sizes=(4,)).graph_sizes == (4,)


@pytest.mark.parametrize(
    ("tokens", "buckets"),
    [
        (20, (20,)),
        (32, (32,)),
        (33, (32, 33)),
        (1000, (32, 64, 128, 256, 512, 1000)),
        (20_000, (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)),
    ],
)
def test_token_buckets_double_up_to_the_largest_step(tokens: int, buckets: tuple[int, ...]) -> None:
    assert plan(max_num_batched_tokens=tokens, max_num_seqs=8).token_buckets == buckets


def test_numbers_may_be_numpys() -> None:
    args = {"seed": np.int64(3), "max_num_seqs": np.int32(8), "gpu_memory_utilization": np.float32(0.5)}
    assert plan(**args).max_num_seqs == 8


def test_objects_that_are_given_stay_as_they_are() -> None:
    given = {"backend": "guidance", "compile_timeout": 3}
    assert plan(structured_outputs_config=given) == plan(structured_outputs_config=given)
    assert given == {"backend": "guidance", "compile_timeout": 3}


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
def test_an_fp8_cache_has_one_name_in_the_plan(name: str) -> None:
    assert plan(kv_cache_dtype=name).kv_cache_dtype == "fp8"
    assert plan(dtype="float16").kv_cache_dtype == "float16"


@pytest.mark.parametrize("config", [COMPILE, '{"mode": "stock_torch_compile"}'])
def test_compilation_is_asked_for_as_json_or_as_a_mapping(config: Any) -> None:
    made = plan(compilation_config=config)
    assert made.compile_mode == "stock_torch_compile" and made.graph_sizes
    for nothing in ({}, "{}", {"mode": "none"}, None):
        assert plan(CPU, compilation_config=nothing).compile_mode == "none"


@pytest.mark.parametrize(
    ("facts", "flags", "message"),
    [
        (H200, {"cuda_graph_sizes": []}, "--cuda-graph-sizes=.*one or more integers"),
        (H200, {"cuda_graph_sizes": [0]}, "--cuda-graph-sizes=.*at least 1"),
        (H200, {"cuda_graph_sizes": [9], "max_num_seqs": 8}, "at most --max-num-seqs=8"),
        (H200, {"cuda_graph_sizes": [True]}, "--cuda-graph-sizes=.*integers"),
        (H200, {"cuda_graph_sizes": 8}, "--cuda-graph-sizes=8.*integers"),
        (CPU, {"attention_backend": "triton"}, "--attention-backend=triton.* a CPU"),
        (H200, {"attention_backend": "triton", "device": "cpu"}, "--attention-backend=triton.* a CPU"),
        (BARE_CUDA, {"attention_backend": "triton"}, "--attention-backend=triton.*not installed"),
        (H200, {"attention_backend": "xla"}, "--attention-backend='xla'.*auto, triton, flash, torch"),
        (CPU, {"kv_cache_dtype": "fp8"}, "--kv-cache-dtype=fp8"),
        (BARE_CUDA, {"kv_cache_dtype": "fp8"}, "--kv-cache-dtype=fp8"),
        (A100, {"kv_cache_dtype": "fp8"}, "A100 has 8.0"),
        (H200, {"kv_cache_dtype": "int8"}, "--kv-cache-dtype='int8'.*auto, fp8, fp8_e4m3"),
        (BARE_CUDA, {"batch_invariant": True}, "--batch-invariant"),
        (H200, {"batch_invariant": True, "compilation_config": COMPILE}, "--batch-invariant.*compil"),
        (CPU, {"compilation_config": COMPILE}, "--compilation-config"),
        (H200, {"compilation_config": "{"}, "--compilation-config='{'.*not valid JSON"),
        (H200, {"compilation_config": "3"}, "must be an object"),
        (H200, {"compilation_config": {"level": 3}}, "unknown field 'level'"),
        (H200, {"compilation_config": {"mode": "max"}}, "mode must be one of none, stock_torch_compile"),
        (H200, {"compilation_config": {"mode": ["none"]}}, "mode must be one of"),
        (CPU, {"max_model_len": 1}, "--max-model-len=1: must be at least 2"),
        (CPU, {"max_num_seqs": True}, "--max-num-seqs=True: must be an integer"),
        (CPU, {"max_logprobs": 2.5}, "--max-logprobs=2.5: must be an integer"),
        (CPU, {"seed": "x"}, "--seed='x': must be an integer"),
        (CPU, {"gpu_memory_utilization": "0.5"}, "--gpu-memory-utilization='0.5': must be a number"),
        (CPU, {"enforce_eager": 1}, "--enforce-eager=1: must be true or false"),
        (CPU, {"block_size": None}, "--block-size=None: must be an integer"),
        (H200, {"max_num_seqs": 600_000, "max_num_batched_tokens": 600_000}, "--max-num-seqs=600000.*words"),
        (CPU, {"skip_tokenizer_init": True, "structured_outputs_config": {"compile_timeout": 3}},
         "--structured-outputs-config: .*--skip-tokenizer-init"),
    ],
)
def test_what_cannot_be_honoured_is_refused(facts: DeviceFacts, flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(facts, **flags)
