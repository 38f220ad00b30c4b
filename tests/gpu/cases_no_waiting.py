"""On a CUDA device: steps under torch's sync debug mode "error", and addresses of captured graphs.

    PYTHONPATH=tests:tests/engine SLIPSTREAM_TEST_DEVICE=cuda python -m pytest tests/gpu/cases_no_waiting.py
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from harness import Collected, collect, make_core, make_request, run
from tiny_models import make_tiny_model

from slipstream.contracts.sampling_params import SamplingParams

KINDS = {
    "greedy": dict(temperature=0.0),
    "sampled": dict(temperature=0.9, top_k=20, top_p=0.9, min_p=0.01),
    "penalties": dict(temperature=0.8, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2),
    "logprobs": dict(temperature=0.7, logprobs=5),
    "edited": dict(temperature=1.0, logit_bias={5: 4.0}, min_tokens=119, stop_token_ids=[7]),
    "prompt logprobs": dict(temperature=0.0, prompt_logprobs=3),
}
LOADS = {
    "decode": dict(),
    "mixed prefill": dict(max_num_batched_tokens=32),
    "preemption": dict(num_gpu_blocks_override=60, block_size=4),
    "eager": dict(enforce_eager=True),
    "fp8": dict(kv_cache_dtype="fp8", dtype="bfloat16"),
    "batch invariant": dict(batch_invariant=True, dtype="bfloat16"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("gpu"), "qwen3")


def requests_of(core, kind, count=24, tokens=120):
    rng = np.random.default_rng(9)
    shared = rng.integers(3, 250, 40).tolist()
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, **kind)
    prompts = [shared[: 20 * (key % 3)] + rng.integers(3, 250, 9 + key).tolist() for key in range(count)]
    return [make_request(core, key, prompt, params, key) for key, prompt in enumerate(prompts)]


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("kind", KINDS)
def test_no_step_waits_for_the_device(model, kind, load):
    """Prefix hits come from the shared beginnings; requests arrive over 100 steps."""
    core = make_core(model, max_num_seqs=16, **LOADS[load])
    requests = requests_of(core, KINDS[kind])
    run(core, requests[:1])  # what is compiled at first use
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = run(core, requests[1:], {r.key: 4 * r.key for r in requests[1:]})
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stats = core.scheduler.stats()
    core.close()
    assert stats.steps >= 200
    assert all(len(c.tokens) == 120 and not c.errors for c in got.values())
    assert load != "preemption" or stats.preemptions > 0


def test_what_graphs_read_and_write_never_moves(model):
    core = make_core(model, max_num_seqs=16)
    runner = core._executor.runner

    def addresses():
        tick = runner._tick
        tensors = [runner.table.arena, *runner.table.columns.values(), *runner.table.lanes.values()]
        tensors += [each for pool in tick._attention.pools for each in (pool.keys, pool.values)]
        tensors += [tick._ring.memory_S3L, tick._ring.turn_2, tick._hidden_TH]
        graphs = {shape: id(graph) for shape, graph in tick.graphs._graphs.items()}
        return [each.data_ptr() for each in tensors], graphs

    before = addresses()
    for kind in KINDS.values():
        run(core, requests_of(core, kind, tokens=30))
    assert addresses() == before
    core.close()


def test_a_steady_step_launches_one_graph_and_nothing_else(model):
    core = make_core(model, max_num_seqs=16)
    params = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0.0)
    requests = [make_request(core, key, [5, 6, 7 + key], params) for key in range(16)]
    out = {r.key: Collected() for r in requests}
    core.add(requests)
    for _ in range(20):
        collect(core.step(), out)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(8):  # no block is granted in this stretch: rows were topped up
            collect(core.step(), out)
        torch.cuda.synchronize()
    launches = [e.key for e in profile.key_averages() for _ in range(e.count) if e.key.startswith("cuda")]
    core.close()
    assert launches.count("cudaGraphLaunch") >= 7
    allowed = {"cudaGraphLaunch", "cudaEventRecord", "cudaEventRecordWithFlags", "cudaEventSynchronize",
               "cudaEventQuery", "cudaDeviceSynchronize", "cudaStreamIsCapturing"}
    assert set(launches) <= allowed
