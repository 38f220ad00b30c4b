"""On a CUDA device: steps under torch's sync debug mode "error", plain and with each method of speculation;
what a steady step launches; and addresses of captured graphs.

    PYTHONPATH=.:tests:tests/engine SLIPSTREAM_TEST_DEVICE=cuda \\
        python -m pytest -n 4 tests/gpu/cases_no_waiting.py
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from drafter_reference import make_drafters
from drafters import FixedDrafting
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
DRAFTS = 3
METHODS = {
    "ngram": dict(prompt_lookup_min=1, prompt_lookup_max=3),
    "suffix": dict(suffix_decoding_max_cached_requests=5),
    "custom_class": dict(model="drafters.LastAgain"),
    **{method: {} for method in ("draft_model", "eagle", "eagle3", "medusa", "mlp_speculator")},
}
# What a host may call in steps that are one graph each: the graph, and its end.
STEADY_CALLS = {
    "cudaGraphLaunch", "cudaEventRecord", "cudaEventRecordWithFlags", "cudaEventSynchronize",
    "cudaEventQuery", "cudaDeviceSynchronize", "cudaStreamIsCapturing",
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
        staged = [buffers[0] for buffers in runner.table.door._ring.items]
        tensors += [buffer._packed for buffer in staged]
        graphs = {shape: id(graph) for shape, graph in tick.graphs.items()}
        return [each.data_ptr() for each in tensors], graphs, [id(buffer.replay) for buffer in staged]

    before = addresses()
    for kind in KINDS.values():
        run(core, requests_of(core, kind))
    assert addresses() == before
    core.close()


@pytest.fixture(scope="module")
def drafting(tmp_path_factory):
    """A model and, by method, the arguments of an engine that drafts for it."""
    folder = tmp_path_factory.mktemp("drafting")
    target = make_tiny_model(folder / "target", "llama", num_hidden_layers=4, rms_norm_eps=1e-5)
    folders = {**make_drafters(folder, DRAFTS), "draft_model": target}
    config = {name: {"model": str(at)} for name, at in folders.items()}
    args = dict(max_num_seqs=8, max_num_batched_tokens=64, cuda_graph_sizes=[8])
    return target, {
        method: args | {"speculative_config": fields | config.get(method, {}) | {
            "method": method, "num_speculative_tokens": DRAFTS}}
        for method, fields in METHODS.items()
    }


@pytest.mark.parametrize("method", METHODS)
def test_no_step_that_drafts_waits_for_the_device(drafting, method):
    """Greedy requests, then sampled ones, in one engine; the policy chooses how many drafts a step has."""
    target, args = drafting
    core = make_core(target, **args[method])
    run(core, requests_of(core, KINDS["greedy"], 1))  # what is compiled at first use
    for kind in ("greedy", "sampled"):
        requests, before = requests_of(core, KINDS[kind]), core.scheduler.stats()
        torch.cuda.set_sync_debug_mode("error")
        try:
            got = run(core, requests, {r.key: 9 * r.key for r in requests})
        finally:
            torch.cuda.set_sync_debug_mode("default")
        stats = core.scheduler.stats()
        assert stats.steps - before.steps >= 200 and stats.draft_tokens > before.draft_tokens
        assert all(len(c.tokens) == 120 and not c.errors for c in got.values())
    core.close()


@pytest.mark.parametrize("method", METHODS)
def test_a_steady_step_that_drafts_is_one_graph(drafting, method):
    target, args = drafting
    core = make_core(target, **args[method], block_size=128, num_gpu_blocks_override=20)  # blocks last long
    core.scheduler._drafting = FixedDrafting(DRAFTS)
    assert_steady_steps_are_graphs(core, 8)
    stats = core.scheduler.stats()
    core.close()
    assert stats.draft_tokens > 0


def test_a_steady_step_launches_one_graph_and_nothing_else(model):
    core = make_core(model, max_num_seqs=16)
    assert_steady_steps_are_graphs(core, 16)
    core.close()


def assert_steady_steps_are_graphs(core, rows):
    params = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0.0)
    requests = [make_request(core, key, [5, 6, 7 + key], params) for key in range(rows)]
    out = {r.key: Collected() for r in requests}
    core.add(requests)
    for _ in range(16):
        collect(core.step(), out)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(8):  # no block is granted in this stretch: rows were topped up
            collect(core.step(), out)
        torch.cuda.synchronize()
    # The runtime's functions and the driver's, by which Triton launches: cudaX and cuX.
    counts = {e.key: e.count for e in profile.key_averages() if re.match(r"cu(da)?[A-Z]", e.key)}
    assert counts.get("cudaGraphLaunch", 0) >= 7
    assert counts.keys() <= STEADY_CALLS
