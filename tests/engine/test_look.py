"""Looking at a running engine: rows, steps and totals are what really happened; looking changes nothing."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
from harness import Collected, collect, make_core, make_request, run
from scripted_engine import ScriptedClient

from slipstream.contracts.outputs import STEP_COLUMNS, EngineSnapshot
from slipstream.contracts.sampling_params import SamplingParams
from slipstream.engine import wire
from slipstream.engine.async_llm import AsyncLLM
from slipstream.engine.core import EngineCore
from slipstream.errors import EngineDeadError

FREE, PREFILL, DECODE = 0, 1, 2
PROMPTS = {key: list(range(5, 5 + 7 * key)) for key in (1, 2, 3)}


@pytest.fixture(scope="module")
def core(tiny_model):
    core = make_core(tiny_model("llama"), max_num_seqs=4, max_num_batched_tokens=8)
    yield core
    core.close()


def requests(core: EngineCore, tokens: int = 9):
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return [make_request(core, key, prompt, params) for key, prompt in PROMPTS.items()]


def snapshot(core: EngineCore) -> EngineSnapshot:
    """What travels to the front end, read there."""
    seen = wire.decoder(type(core.look()))(wire.encode(core.look())).snapshot
    assert seen is not None
    return seen


def test_every_row_is_shown_as_it_is_and_looking_changes_no_token(core):
    plain = run(core, requests(core))
    out = {key: Collected() for key in PROMPTS}
    core.add(requests(core))
    phases = set()
    while core.has_work:
        collect(core.step(), out)
        seen = snapshot(core)
        phases |= set(seen.phase.tolist())
        for row in np.flatnonzero(seen.phase):
            key = int(seen.key[row])
            prompt, known = len(PROMPTS[key]), int(seen.length[row])
            assert known == prompt + len(out[key].tokens)
            assert seen.max_len[row] == prompt + 9
            # Every token known but the last has keys and values; a prompt may be on its way.
            decoding = seen.phase[row] == DECODE
            assert seen.computed[row] == known - 1 if decoding else seen.computed[row] <= prompt
            assert int(seen.num_blocks[row]) * 16 >= seen.computed[row]
    assert phases == {FREE, PREFILL, DECODE}
    assert {key: got.tokens for key, got in out.items()} == {key: got.tokens for key, got in plain.items()}


def test_steps_are_in_order_and_the_totals_are_their_sums(core):
    before = core.look().stats
    produced = run(core, requests(core, tokens=20))
    after = core.look().stats
    assert after.num_rows == 4
    assert after.generation_tokens - before.generation_tokens == sum(len(g.tokens) for g in produced.values())
    steps = dict(zip(STEP_COLUMNS, snapshot(core).steps.T, strict=True))
    count = after.steps - before.steps
    assert np.diff(steps["step"]).tolist() == [1.0] * (len(steps["step"]) - 1)
    for first, later in (
        ("plan_begin", "launch_begin"), ("launch_begin", "launch_end"), ("device_begin", "device_end"),
        ("device_end", "apply_begin"), ("apply_begin", "apply_end"),
    ):  # fmt: skip
        assert (steps[first] <= steps[later]).all(), (first, later)
    assert (steps["device_begin"][1:] >= steps["device_end"][:-1]).all(), "the device does one step at a time"
    assert (steps["apply_end"] <= 0).all()
    # In flight together: most steps were launched before their predecessor had ended.
    assert (steps["launch_begin"][1:] < steps["device_end"][:-1]).mean() > 0.5
    busy = (steps["device_end"] - steps["device_begin"])[-count:].sum()
    assert after.device_busy_seconds - before.device_busy_seconds == pytest.approx(busy, rel=1e-6)
    assert after.computed_tokens - before.computed_tokens == steps["tokens"][-count:].sum()
    assert after.host_seconds > before.host_seconds


def test_time_without_requests_is_not_idle_time_and_starves_nobody(core):
    begin = time.monotonic()
    run(core, requests(core))
    before = core.look().stats
    time.sleep(3 * (time.monotonic() - begin))
    begin = time.monotonic()
    run(core, requests(core))
    after = core.look().stats
    assert after.device_idle_seconds - before.device_idle_seconds < time.monotonic() - begin
    assert after.steps_starved - before.steps_starved < after.steps - before.steps


def test_without_async_scheduling_every_step_after_the_first_finds_the_device_idle(tiny_model):
    core = make_core(tiny_model("llama"), async_scheduling=False, max_num_seqs=4, max_num_batched_tokens=8)
    run(core, requests(core))
    stats = core.look().stats
    core.close()
    assert stats.steps_starved == stats.steps - 1
    assert stats.device_idle_seconds > 0


class Looked(ScriptedClient):
    """Answers a look with the snapshot of one row when it is told to."""

    looks = 0

    def look(self) -> None:
        self.looks += 1


def test_those_who_wait_for_a_snapshot_share_it_and_hear_of_the_engines_end():
    client = Looked(lambda request: [3])
    llm = AsyncLLM(client, None)

    async def look_twice() -> list[object]:
        looks = [asyncio.create_task(llm.look()) for _ in range(2)]
        await asyncio.sleep(0.01)
        assert client.looks == 1
        llm.shutdown()
        return await asyncio.gather(*looks, return_exceptions=True)

    first, second = asyncio.run(look_twice())
    assert isinstance(first, EngineDeadError) and isinstance(second, EngineDeadError)
