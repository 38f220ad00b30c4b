"""An engine or worker that dies or hangs is replaced, and nobody who waits for tokens can tell."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest
from harness import DEVICE
from text_model import make_text_model

from slipstream import (
    AsyncLLM,
    EngineArgs,
    EngineDeadError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from slipstream.contracts.errors import CrashLoopError
from slipstream.contracts.structured_outputs import StructuredOutputsParams
from slipstream.engine.faults import Losses, Watchdog
from slipstream.engine.spare import SPARE_SECONDS, Spare
from slipstream.engine.steady_client import SteadyClient

SMALL = {
    "device": DEVICE, "dtype": "float32", "max_model_len": 256, "max_num_seqs": 6,
    "max_num_batched_tokens": 48, "num_gpu_blocks_override": 257, "engine_progress_timeout": 1.0,
    "spare_processes": False,
}  # fmt: skip
PLAIN = SamplingParams(
    temperature=0, max_tokens=150, ignore_eos=True, output_kind=RequestOutputKind.DELTA, seed=5
)
REQUESTS = {
    "greedy": PLAIN,
    "seeded": PLAIN.clone(temperature=1.0, top_p=0.9),
    "samples and logprobs": PLAIN.clone(temperature=0.8, n=2, logprobs=3),
    "read at the end": PLAIN.clone(temperature=1.0, output_kind=RequestOutputKind.FINAL_ONLY),
    "whole so far": PLAIN.clone(temperature=0.7, output_kind=RequestOutputKind.CUMULATIVE, min_tokens=20),
    "penalties": PLAIN.clone(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4),
    "scored prompt": PLAIN.clone(prompt_logprobs=2, max_tokens=100),
    "regex": PLAIN.clone(structured_outputs=StructuredOutputsParams(regex="([a-f]{3}-){30}[0-9]{9}!")),
}
SCORED = ("samples and logprobs", "scored prompt")
PROMPTS = {name: f"the request of {name}: " * (1 + 2 * (name == "scored prompt")) for name in REQUESTS}


@pytest.fixture(scope="module")
def llm(tiny_model: Any) -> Iterator[AsyncLLM]:
    llm = AsyncLLM.from_engine_args(EngineArgs(model=str(make_text_model(tiny_model)), **SMALL))
    yield llm
    llm.shutdown()


async def collect(outputs: AsyncGenerator[RequestOutput, None]) -> list[RequestOutput]:
    return [output async for output in outputs]


def told(outputs: list[RequestOutput]) -> tuple[dict[int, Any], list[dict[int, float]]]:
    """By sample: text, tokens and why it ended; and all logprobs, the prompt's last. Of outputs that tell the
    whole so far the last one is looked at."""
    samples: dict[int, Any] = {}
    scores: list[Any] = []
    for output in outputs:
        for piece in output.outputs:
            text, ids, _ = samples.get(piece.index, ("", [], None))
            samples[piece.index] = text + piece.text, ids + list(piece.token_ids), piece.finish_reason
    for index in samples:
        pieces = [piece for output in outputs for piece in output.outputs if piece.index == index]
        scores += [row for piece in pieces for row in piece.logprobs or []]
    scores += [row for output in outputs for row in output.prompt_logprobs or [] if row]
    return samples, [{token: score.logprob for token, score in row.items()} for row in scores]


def restarts(llm: AsyncLLM) -> tuple[int, int]:
    return llm.health.restarts, llm.health.worker_restarts


async def run_all(llm: AsyncLLM, signals: list[tuple[str, int]]) -> dict[str, Any]:
    """Every request's outcome; the engine or its worker gets a signal after each 150 further tokens."""

    async def disturb() -> None:
        for name, number in signals:
            before, floor = restarts(llm), llm.stats.generation_tokens + 150
            while llm.stats.generation_tokens < floor:
                await asyncio.sleep(0.001)
            os.kill(llm.engine_pid if name == "engine" else llm.stats.worker_pid, number)
            while llm.health.ready:
                await asyncio.sleep(0.001)
            while not llm.health.ready:
                await asyncio.sleep(0.01)
            engines, workers = before
            assert restarts(llm) == ((engines + 1, 0) if name == "engine" else (engines, workers + 1))

    runs = [collect(llm.generate(PROMPTS[name], params, name)) for name, params in REQUESTS.items()]
    *outputs, _ = await asyncio.wait_for(asyncio.gather(*runs, disturb()), 120)
    while llm.stats.num_running:
        await asyncio.sleep(0.01)
    by_name = dict(zip(REQUESTS, outputs, strict=True))
    by_name["whole so far"] = by_name["whole so far"][-1:]
    return {name: told(found) for name, found in by_name.items()}


def test_what_was_streamed_goes_on_as_if_nothing_had_happened(llm: AsyncLLM) -> None:
    undisturbed = asyncio.run(run_all(llm, []))
    assert [len(undisturbed[name][1]) for name in SCORED] == [300, len(PROMPTS["scored prompt"]) - 1]
    kill, stop = signal.SIGKILL, signal.SIGSTOP
    signals = [("worker", kill), ("engine", kill), ("worker", stop), ("engine", stop)]
    disturbed = asyncio.run(run_all(llm, signals))
    assert llm.health.restarts == 2 and llm.health.ready
    for name, expected in undisturbed.items():
        assert disturbed[name][0] == expected[0], name
        assert len(disturbed[name][1]) == len(expected[1]), name
        for found, scores in zip(disturbed[name][1], expected[1], strict=True):
            assert found == pytest.approx(scores, abs=1e-4), name
    assert llm.stats.free_blocks == llm.stats.num_blocks


def test_requests_that_come_while_no_engine_is_up_wait_for_the_next(llm: AsyncLLM) -> None:
    async def main() -> list[RequestOutput]:
        llm.watch()
        before = llm.health.restarts
        os.kill(llm.engine_pid, signal.SIGKILL)
        while llm.health.ready:
            await asyncio.sleep(0.001)
        dropped = llm.generate("given up", PLAIN, "x")
        waiting = asyncio.create_task(anext(dropped))
        look = asyncio.create_task(llm.look())
        outputs = asyncio.create_task(collect(llm.generate("late", PLAIN, "r")))
        await asyncio.sleep(0.01)
        waiting.cancel()
        assert not llm.health.ready and not llm.errored
        with pytest.raises(TypeError):
            llm._client.add([object()])  # it would be the end of everybody when the next engine is up
        found = await asyncio.wait_for(outputs, 60)
        assert (await look).snapshot.phase.shape == (6,)
        assert llm.health.restarts == before + 1
        return found

    assert asyncio.run(main())[-1].finished


class Process:
    """A ProcessClient without a process: it dies when asked for news, as often as it is started."""

    def __init__(self, args: EngineArgs, wait: bool, spare: bool) -> None:
        self.ready, self.ended, self.progress, self.cpu_seconds, self.pid = True, False, 0, 0.0, 1
        self.info: Any = type("Info", (), {"plan": {"device": {"value": "cpu"}}, "worker_pid": 2})
        self.polls = 0 if wait else 1

    def begin(self, args: EngineArgs) -> None:
        self.args = args

    def receive(self, timeout: float | None) -> None:
        self.polls -= 1
        if self.polls < 0:
            raise EngineDeadError("the device is gone")

    def kill(self) -> None:
        self.ended = True

    def close(self) -> None:
        self.closed = True


def lose(client: SteadyClient) -> int:
    """Engines that took over until none did any more."""
    takeovers = 0
    for _ in range(100):
        client.receive(0)
        takeovers += client.tend(busy=True)
    return takeovers


def test_engines_lost_in_a_row_without_a_token_are_the_end_with_the_reason() -> None:
    make: Any = Process
    client = SteadyClient(EngineArgs(model="m", max_engine_restarts=3), make)
    with pytest.raises(EngineDeadError, match=r"4 engines in a row .* the device is gone"):
        lose(client)
    assert client.restarts == 3
    client.close()


def test_an_engine_that_says_that_its_workers_are_lost_for_good_is_not_replaced() -> None:
    class Hopeless(Process):
        def receive(self, timeout: float | None) -> None:
            raise CrashLoopError("4 workers in a row were lost")

    make: Any = Hopeless
    client = SteadyClient(EngineArgs(model="m", max_engine_restarts=3), make)
    with pytest.raises(EngineDeadError, match="4 workers in a row were lost"):
        lose(client)
    assert client.restarts == 0
    client.close()


def test_a_loss_that_is_explained_is_excused_as_often_as_others_are() -> None:
    losses = Losses("workers", 1)
    losses.lost("a request", False, explained=True)
    losses.lost("who knows", False)
    with pytest.raises(CrashLoopError, match="2 workers in a row"):
        losses.lost("another request", False, explained=True)
    losses.started()
    losses.fruitful = True
    losses.lost("who knows", False)
    losses.lost("a request", False, explained=True)


def test_only_what_stands_still_while_requests_are_live_is_stuck() -> None:
    dog = Watchdog(10.0)
    assert not dog.stuck(1, 0.0, True, 100.0)
    assert not dog.stuck(1, 0.0, True, 109.9)
    assert not dog.stuck(1, 0.0, False, 115.0), "nobody waits"
    assert not dog.stuck(1, 0.0, True, 124.9)
    assert not dog.stuck(2, 0.0, True, 125.1), "it moved"
    assert dog.stuck(2, 0.0, True, 135.2)
    assert not dog.stuck(2, 3.0, True, 135.3), "it computes"
    assert dog.stuck(2, 3.01, True, 145.4), "a single tick of the clock is no computing"
    assert not dog.stuck(2, 9.0, True, 325.0)
    assert dog.stuck(2, 18.0, True, 325.2), "it computes for ever"
    assert not Watchdog(0.0).stuck(2, 0.0, True, 1e9)


class Waiting:
    """A process that may be kept ready."""

    def __init__(self, quiet: bool) -> None:
        self.quiet, self.ended, self.closed = quiet, False, False

    def kill(self) -> None:
        self.ended = True

    def close(self) -> None:
        self.closed = True


def test_a_spare_comes_some_time_after_a_start_and_one_that_has_died_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spare, now = Spare(Waiting, wanted=True), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    spare.later()
    spare.tend()
    assert not spare.take().quiet, "none was due"
    spare.later()
    now[0] += SPARE_SECONDS
    spare.tend()
    first = spare.take()
    assert first.quiet and not first.ended
    spare.tend()
    assert not spare.take().quiet, "nobody computes who could do without the processor"
    spare.later()
    now[0] += SPARE_SECONDS
    spare.tend()
    spare._ready.ended = True
    assert not spare.take().quiet
    unwanted = Spare(Waiting, wanted=False)
    unwanted.later()
    now[0] += SPARE_SECONDS
    unwanted.tend()
    assert not unwanted.take().quiet
