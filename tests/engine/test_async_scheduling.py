"""Async scheduling shows in the engine's own trace: step N+1 is submitted before the result of step N is
read."""

import itertools
import json
import threading

import numpy as np
import pytest
from harness import make_core, make_request, run

from slipstream.contracts.sampling_params import SamplingParams
from slipstream.observe.trace import steps_ahead


def trace_of(folder, path, **args):
    core = make_core(folder, trace=str(path), **args)
    rng = np.random.default_rng(3)
    params = SamplingParams(max_tokens=150, ignore_eos=True, temperature=0.0)
    run(core, [make_request(core, key, rng.integers(3, 250, 20).tolist(), params) for key in range(16)])
    core.close()
    return json.loads(path.read_text())["traceEvents"]


@pytest.mark.parametrize("backend", ["uni", "mp"])
def test_the_next_step_is_submitted_before_a_result_is_read_in_99_percent_of_steady_steps(
    backend, tiny_model, tmp_path
):
    executor = {"distributed_executor_backend": backend}
    ahead, steady = steps_ahead(trace_of(tiny_model("llama"), tmp_path / "async.json", **executor))
    assert steady >= 140
    assert ahead >= 0.99 * steady


def test_without_async_scheduling_no_step_is_submitted_ahead(tiny_model, tmp_path):
    ahead, steady = steps_ahead(trace_of(tiny_model("llama"), tmp_path / "sync.json", async_scheduling=False))
    assert steady >= 140
    assert ahead == 0


def test_the_trace_has_every_lane_and_no_step_overlaps_another_on_the_device(tiny_model, tmp_path):
    events = trace_of(tiny_model("llama"), tmp_path / "trace.json")
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {"scheduler", "runner", "device", "output"}
    device = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == "step")
    assert len(device) >= 150
    assert all(end <= begin + 1e-3 for (_, end), (begin, _) in itertools.pairwise(device))


def test_a_trace_that_cannot_be_written_is_an_error_at_start(tiny_model, tmp_path):
    with pytest.raises(ValueError, match=r"--trace=.*No such file"):
        make_core(tiny_model("llama"), trace=str(tmp_path / "no such folder" / "trace.json"))


def test_the_host_never_waits_inside_a_step(tiny_model):
    """runner.step() returns while the device is held back: nothing in it reads a result. On a CPU, whose
    stream runs what it is given in a thread; tests/gpu/cases_no_waiting.py is about GPUs."""
    core = make_core(tiny_model("llama"), device="cpu")
    runner, gate = core._executor.runner, threading.Event()
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    core.add([make_request(core, 0, [5, 6, 7], params)])
    runner.stream.submit(gate.wait)
    handles = [runner.step(core.scheduler.schedule()) for _ in range(2)]
    assert not any(handle.done() for handle in handles)
    gate.set()
    for handle in handles:
        assert core.scheduler.apply(handle.wait()).num_tokens.tolist() == [1]
    while core.has_work:
        core.step()
    core.close()
