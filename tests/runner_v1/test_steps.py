"""The old runner step by step: results like the new one's, bad numbers that stay where they are, a trace
without overlap."""

import json
import os
import signal

import numpy as np
import pytest
import torch
from harness import Collected, collect, make_core, make_request, run

from slipstream.contracts.sampling_params import SamplingParams
from slipstream.contracts.step import Finish
from slipstream.observe.trace import steps_ahead

POISON = 200  # a token whose embedding is NaN
TIGHT = dict(num_gpu_blocks_override=24, max_num_seqs=6, block_size=8, max_num_batched_tokens=32)


class Twins:
    """Gives every plan to two runners, compares what comes back, and returns the first one's."""

    def __init__(self, first, second):
        self.first, self.second, self.steps = first, second, 0

    def step(self, plan):
        handles = self.first.step(plan), self.second.step(plan)
        self.compare(*(handle.wait() for handle in handles))
        self.steps += 1
        return handles[0]

    def compare(self, mine, theirs):
        for name in ("step", "lane_row", "lane_generation", "num_tokens", "tokens", "finish"):
            one, other = getattr(mine, name), getattr(theirs, name)
            np.testing.assert_array_equal(one, other, name)
            assert getattr(one, "dtype", None) == getattr(other, "dtype", None), name
        assert (mine.logprobs is None) == (theirs.logprobs is None)
        pairs = [(mine.logprobs, theirs.logprobs)] if mine.logprobs is not None else []
        pairs += list(zip(mine.prompt_logprobs, theirs.prompt_logprobs, strict=True))
        for one, other in pairs:
            for name in ("row", "generation", "start"):
                assert getattr(one, name, None) == getattr(other, name, None)
            np.testing.assert_array_equal(one.ids, other.ids)
            np.testing.assert_array_equal(one.rank, other.rank)
            np.testing.assert_allclose(one.values, other.values, atol=1e-4)
            assert (one.ids.dtype, one.rank.dtype, one.values.dtype) == (np.int32, np.int32, np.float32)

    def close(self):
        self.first.close()
        self.second.close()


def test_every_result_is_that_of_the_new_runner_for_the_same_plan(tiny_model):
    core = make_core(tiny_model("qwen3"), model_runner="v1", **TIGHT)
    other = make_core(tiny_model("qwen3"), model_runner="v2", async_scheduling=False, **TIGHT)
    core._executor.runner = twins = Twins(core._executor.runner, other._executor.runner)
    rng = np.random.default_rng(4)
    kinds = (
        dict(temperature=0.0, logprobs=2),
        dict(temperature=1.0, top_k=12, prompt_logprobs=3),
        dict(temperature=1.2, stop_token_ids=list(range(3, 23))),
        dict(temperature=0.8, logprobs=5, repetition_penalty=1.5),
    )
    requests = [
        make_request(
            core, key, rng.integers(3, 250, rng.integers(1, 60)).tolist(),
            SamplingParams(max_tokens=int(rng.integers(1, 40)), **kinds[key % len(kinds)]), key,
        )
        for key in range(40)
    ]  # fmt: skip
    run(core, requests[8:], {r.key: r.key for r in requests}, {11: 15, 20: 30, 33: 40})
    assert twins.steps > 100
    assert core.scheduler.stats().preemptions > 0
    core.close()


def test_a_row_of_bad_numbers_fails_alone_and_its_blocks_harm_nobody(tiny_model):
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0, logit_bias={POISON: -100.0})
    rng = np.random.default_rng(8)
    prompts = [rng.integers(3, 190, rng.integers(3, 40)).tolist() for _ in range(12)]
    args = dict(model_runner="v1", num_gpu_blocks_override=13, max_num_seqs=4)
    clean, core = (make_core(tiny_model("llama"), **args) for _ in range(2))
    with torch.inference_mode():
        built = core._executor.runner
        runner = getattr(built, "runner", built)  # a CPU has it behind a thread
        runner._model.embed.weight_VH[POISON] = float("nan")
    expected = run(clean, [make_request(clean, key, prompt, params) for key, prompt in enumerate(prompts)])
    requests = []
    for key, prompt in enumerate(prompts):
        requests.append(make_request(core, key, prompt, params))
        requests.append(make_request(core, 1000 + key, [*prompt[:17], POISON, *prompt[:9]], params))
    got = run(core, requests)
    assert core.scheduler.stats().free_blocks == 12
    for key in range(len(prompts)):
        assert (got[key].tokens, got[key].finish) == (expected[key].tokens, Finish.LENGTH)
        assert (got[1000 + key].tokens, got[1000 + key].finish) == ([], Finish.ERROR)
    clean.close()
    core.close()


def test_its_trace_shows_one_step_at_a_time_each_waited_for_by_the_host(tiny_model, tmp_path):
    path = tmp_path / "trace.json"
    core = make_core(tiny_model("llama"), model_runner="v1", trace=str(path))
    params = SamplingParams(max_tokens=50, ignore_eos=True, temperature=0.0)
    run(core, [make_request(core, key, [5, 6, 7 + key], params) for key in range(4)])
    core.close()
    events = json.loads(path.read_text())["traceEvents"]
    ahead, steady = steps_ahead(events)
    assert (ahead, steady >= 40) == (0, True)
    submits = {e["args"]["step"]: e for e in events if e["name"] == "submit"}
    devices = {e["args"]["step"]: e for e in events if e["name"] == "step"}
    assert submits.keys() == devices.keys()
    for step, device in devices.items():
        submit = submits[step]
        assert submit["ts"] < device["ts"]
        assert device["ts"] + device["dur"] < submit["ts"] + submit["dur"]


def test_it_is_synchronous_and_sizes_its_pool_like_the_new_one(tiny_model):
    model, sized = tiny_model("llama"), dict(num_gpu_blocks_override=None)
    cores = [make_core(model, model_runner=runner, **sized) for runner in ("v1", "v2")]
    for core in cores:
        core.close()
    # All 64 rows at 256 tokens, in blocks of 16, and the null block: a tiny model's pool is limited by use.
    assert [core.memory.num_blocks for core in cores] == [64 * 16 + 1] * 2
    assert [core._depth for core in cores] == [1, 2]


def test_a_pool_without_room_for_one_request_is_refused_at_start(tiny_model):
    with pytest.raises(ValueError, match="--kv-cache-memory-bytes=100"):
        make_core(
            tiny_model("llama"), model_runner="v1", num_gpu_blocks_override=None, kv_cache_memory_bytes=100
        )


def test_it_computes_in_a_worker_too_and_requests_outlive_that(tiny_model):
    params = SamplingParams(temperature=0.9, max_tokens=30, ignore_eos=True)
    found = []
    for backend in ("uni", "mp"):
        args = {"model_runner": "v1", "distributed_executor_backend": backend, **TIGHT}
        core = make_core(tiny_model("llama"), **args)
        asked = [make_request(core, key, [5, 6, 7 + key], params, seed=key) for key in range(8)]
        if backend == "mp":
            core.add(asked[:4])
            asked, early = asked[4:], {request.key: Collected() for request in asked[:4]}
            for _ in range(10):
                collect(core.step(), early)
            os.kill(core._executor.pid, signal.SIGKILL)
            while core.scheduler.num_running or core.scheduler.num_waiting:
                collect(core.step(), early)
            assert core._executor.restarts == 1
            found.append({key: one.tokens for key, one in early.items()})
        found.append({key: one.tokens for key, one in run(core, asked).items()})
        core.close()
    alone, early, late = found
    assert early | late == alone
