"""A worker process and its faults: what it leaves, and what requests see of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import faulty_worker
import numpy as np
import psutil
import pytest
from harness import Collected, collect, make_core, make_request, run
from waiting import wait_for

from slipstream.contracts.errors import CrashLoopError
from slipstream.contracts.request import EngineRequest
from slipstream.contracts.sampling_params import SamplingParams
from slipstream.contracts.step import Admission, Finish, StepPlan
from slipstream.engine import worker
from slipstream.engine.core import EngineCore
from slipstream.engine.worker_wire import PlanReader, PlanWriter

ROOT = Path(worker.__file__).parents[2]
PARAMS = SamplingParams(temperature=0.9, max_tokens=24, ignore_eos=True)
SMALL = {"max_num_seqs": 6, "max_num_batched_tokens": 96}
PROMPTS = {key: np.random.default_rng(key).integers(100, 250, 20).tolist() for key in range(8)}


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Gives every worker from now on a fault."""

    def give(name: str) -> None:
        monkeypatch.setattr(worker, "MODULE", faulty_worker.__name__)
        monkeypatch.setenv("FAULT", name)

    return give


def requests(core: EngineCore, keys: Iterator[int] | range) -> list[EngineRequest]:
    return [make_request(core, key, PROMPTS[key], PARAMS, seed=key) for key in keys]


def undisturbed(model: Path, **args: str) -> dict[int, list[int]]:
    core = make_core(model, **SMALL, **args)
    found = run(core, requests(core, range(8)))
    core.close()
    return {key: one.tokens for key, one in found.items()}


@pytest.fixture(scope="module")
def expected(tiny_model: Callable[..., Path]) -> dict[int, list[int]]:
    return undisturbed(tiny_model("llama"))


def poisoned(core: EngineCore, key: int) -> EngineRequest:
    return make_request(core, key, [faulty_worker.POISON, 5, 6], PARAMS)


def test_a_worker_takes_the_next_plan_while_a_step_is_not_done(
    fault: Callable[[str], None], tiny_model: Callable[..., Path]
) -> None:
    """On a CPU, whose stream can be held."""
    model = tiny_model("llama")
    expected = undisturbed(model, device="cpu")
    fault("hold")
    core = make_core(
        model, **SMALL, distributed_executor_backend="mp", spare_processes=False,
        engine_progress_timeout=10.0, device="cpu",
    )  # fmt: skip
    found = run(core, requests(core, range(8)))
    assert core._executor.restarts == 0
    core.close()
    assert {key: one.tokens for key, one in found.items()} == expected



def tokens(found: dict[int, Collected], keys: range) -> dict[int, list[int]]:
    return {key: found[key].tokens for key in keys}


@pytest.mark.parametrize("key", [100, -5])
def test_the_request_that_ends_workers_fails_alone(key, fault, tiny_model, expected) -> None:
    """Whether it is the last or the first to be tried."""
    fault("poison")
    core = make_core(tiny_model("llama"), distributed_executor_backend="mp", **SMALL)
    everyone = requests(core, range(8))
    found = run(core, [*everyone[:3], poisoned(core, key), *everyone[3:]])
    assert found[key].finish == Finish.ERROR and "again and again" in found[key].errors[0]
    assert tokens(found, range(8)) == expected
    assert core._executor.restarts == 3, "two losses and a trial"
    core.scheduler.check_invariants()
    core.close()


@pytest.mark.parametrize("backend", ["mp", "uni"])
def test_steps_without_memory_shrink_until_they_fit_and_who_never_fits_fails_alone(
    backend, fault, tiny_model, expected
) -> None:
    fault("hungry")
    core = make_core(tiny_model("llama"), distributed_executor_backend=backend, **SMALL)
    if backend == "uni":
        faulty_worker.watch(core._executor.runner, faulty_worker.hungry)
    found = run(core, requests(core, range(8)))
    assert tokens(found, range(8)) == expected
    assert core.scheduler.config.max_num_batched_tokens == faulty_worker.FITS
    found = run(core, [poisoned(core, 100)])
    assert found[100].finish == Finish.ERROR and "too little memory" in found[100].errors[0]
    assert core.scheduler.config.max_num_batched_tokens == 2 * SMALL["max_num_seqs"]
    assert tokens(run(core, requests(core, range(2))), range(2)) == {0: expected[0], 1: expected[1]}
    assert core._executor.restarts == 0
    core.scheduler.check_invariants()
    core.close()


def test_a_suspect_that_fails_by_itself_lets_the_others_go_on(fault, tiny_model, expected) -> None:
    fault("hungry")
    core = make_core(tiny_model("llama"), distributed_executor_backend="mp", **SMALL)
    everyone = [poisoned(core, -5), *requests(core, range(4))]
    found = {request.key: Collected() for request in everyone}
    core.add(everyone)
    for _ in range(2):  # losses from outside, which say nothing of the poison
        while not core._executor.up:
            collect(core.step(), found)
        os.kill(core._executor.pid, signal.SIGSTOP)
        core._submit()
        os.kill(core._executor.pid, signal.SIGKILL)
        collect(core.step(), found)
    while core.has_work:
        collect(core.step(), found)
    assert found[-5].finish == Finish.ERROR and "too little memory" in found[-5].errors[0]
    assert tokens(found, range(4)) == {key: expected[key] for key in range(4)}
    core.close()


@pytest.mark.parametrize("backend", ["mp", "uni"])
def test_a_step_that_lacks_memory_on_the_device_is_made_again(backend, fault, tiny_model, expected) -> None:
    fault("starving")
    core = make_core(tiny_model("llama"), distributed_executor_backend=backend, **SMALL)
    if backend == "uni":
        faulty_worker.starving(core._executor.runner)
    found = run(core, requests(core, range(8)))
    assert tokens(found, range(8)) == expected
    assert core.scheduler.config.max_num_batched_tokens == SMALL["max_num_batched_tokens"] // 2
    assert core._executor.restarts == 0
    core.close()


def test_a_worker_that_was_idle_is_not_taken_for_stuck(fault, tiny_model, expected) -> None:
    fault("slow")
    core = make_core(
        tiny_model("llama"), distributed_executor_backend="mp", **SMALL, engine_progress_timeout=60.0
    )
    core._executor._watchdog.since -= 10_000.0
    core._executor._watchdog.moved -= 10_000.0
    assert tokens(run(core, requests(core, range(8))), range(8)) == expected
    assert core._executor.restarts == 0
    core.close()


@pytest.mark.parametrize(("name", "reason"), [("doomed", "signal 9"), ("broken", "the device fell off")])
def test_workers_lost_in_a_row_without_a_token_are_the_end_with_the_reason(
    name, reason, fault, tiny_model
) -> None:
    fault(name)
    core = make_core(
        tiny_model("llama"), distributed_executor_backend="mp", max_engine_restarts=1, **SMALL
    )
    core.add(requests(core, range(2)))
    with pytest.raises(CrashLoopError, match=f"(?s)2 workers in a row .*{reason}"):
        while True:
            core.step()
    core.close()


PARENT = """
    import sys, time
    from slipstream import EngineArgs
    from slipstream.engine.process_client import ProcessClient
    client = ProcessClient(EngineArgs(model=sys.argv[1], skip_tokenizer_init=True, dtype="float32",
                                      max_model_len=256, max_num_seqs=4, num_gpu_blocks_override=65))
    print(client.pid, client.info.worker_pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_a_worker_ends_with_its_engine_even_while_it_is_stopped(stopped, tiny_model) -> None:
    script = [sys.executable, "-c", textwrap.dedent(PARENT), str(tiny_model("llama"))]
    with subprocess.Popen(script, stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        engine, its_worker = map(int, parent.stdout.readline().split())
        assert psutil.Process(its_worker).ppid() == engine
        loaded = ["libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in (engine, its_worker)]
        assert loaded == [False, True], "only the worker may touch a device"
        if stopped:
            os.kill(its_worker, signal.SIGSTOP)
        os.kill(engine, signal.SIGKILL)
        assert wait_for(lambda: has_ended(its_worker))
        parent.kill()


def has_ended(pid: int) -> bool:
    """Nobody may collect an orphan in a container without an init."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_plan_that_changes_nothing_is_a_few_bytes_and_gives_the_same_lanes() -> None:
    writer, reader, lanes = PlanWriter(), PlanReader(), np.arange(256, dtype=np.int32)
    arrays = (lanes, lanes + 1, np.ones_like(lanes), np.ones(256, np.bool_))
    first = reader.read(writer.write(StepPlan(0, *arrays, 256, True, 40)))
    assert first.lane_generation.tolist() == arrays[1].tolist() and first.num_decode_lanes == 256
    steady = writer.write(StepPlan(1, *arrays, 256, False, 41))
    assert len(steady) < 32
    second = reader.read(steady)
    assert second.lane_row is first.lane_row and second.lane_samples is first.lane_samples
    assert (second.step, second.len_bound, second.num_decode_lanes) == (1, 41, 256)
    assert not second.lanes_changed


def test_every_field_of_a_plan_arrives_with_lanes_and_without() -> None:
    request = EngineRequest(7, np.array([5, 6], np.int32), PARAMS, -3, (1, 2), 30, ((3, 4),), grammar="x")
    admission = Admission(3, 9, request, np.array([5, 6, 8], np.int32), 0, np.array([4], np.int32))
    given: dict[str, object] = {"admissions": [admission], "lanes_changed": True}
    for number, name in enumerate(StepPlan.__dataclass_fields__):
        kind = StepPlan.__dataclass_fields__[name].type
        value = np.array([number, number + 1], np.int32) if kind == "Array" else number
        given.setdefault(name, value)
    writer, reader = PlanWriter(), PlanReader()
    for _ in range(2):
        there = reader.read(writer.write(StepPlan(**given)))
        for name, value in given.items():
            if name != "admissions":
                np.testing.assert_array_equal(getattr(there, name), value, name)
        (arrived,) = there.admissions
        assert (arrived.row, arrived.generation, arrived.tokens.tolist()) == (3, 9, [5, 6, 8])
        assert arrived.request.params == PARAMS and arrived.request.grammar == "x"
