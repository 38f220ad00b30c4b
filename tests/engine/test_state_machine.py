"""Hypothesis drives the real scheduler, row table and CPU runner through every order of events that it can
think of: arrivals, steps in flight, late results, aborts (at the last token, too), preemptions in a pool that
is too small.

It holds: one row a request for life; no row or block in two hands, leaked or freed twice; all free after the
drain; and every finished request has the tokens that it has when served alone.
"""

import tempfile
from collections import deque
from pathlib import Path

import numpy as np
from harness import Collected, collect, make_core, make_request, run
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tiny_models import make_tiny_model

from slipstream.contracts.sampling_params import SamplingParams
from slipstream.contracts.step import Finish

BLOCKS, ROWS, BLOCK = 9, 3, 4
MAX_IN_FLIGHT = 3
MODEL = make_tiny_model(Path(tempfile.mkdtemp()), "llama", vocab_size=32)
ALONE: dict[tuple, tuple] = {}


def core_for(**args):
    return make_core(
        MODEL,
        max_num_seqs=ROWS,
        num_gpu_blocks_override=BLOCKS,
        block_size=BLOCK,
        max_model_len=28,
        max_num_batched_tokens=8,
        **args,
    )


REFERENCE = core_for(async_scheduling=False, enable_prefix_caching=False)


def params_of(kind: int, max_tokens: int) -> SamplingParams:
    ends = dict(stop_token_ids=[1, 4, 9, 13, 21]) if kind == 1 else {}
    return SamplingParams(
        max_tokens=max_tokens, ignore_eos=True, temperature=1.0 if kind == 2 else 0.0, **ends
    )


def alone(prompt: tuple[int, ...], kind: int, max_tokens: int) -> tuple:
    ask = (prompt, kind, max_tokens)
    if ask not in ALONE:
        request = make_request(REFERENCE, len(ALONE), prompt, params_of(kind, max_tokens), seed=77)
        got = run(REFERENCE, [request])[request.key]
        ALONE[ask] = (got.tokens, got.finish)
    return ALONE[ask]


class Engine(RuleBasedStateMachine):
    """The engine's loop taken apart: submit and read are rules of their own, so results come arbitrarily
    late."""

    def __init__(self):
        super().__init__()
        self.core = core_for()
        self.scheduler, self.runner = self.core.scheduler, self.core._executor.runner
        self.flight: deque = deque()
        self.out: dict[int, Collected] = {}
        self.asked: dict[int, tuple] = {}
        self.aborted: set[int] = set()
        self.owner: dict[int, tuple[int, int]] = {}  # row -> (key, generation)
        self.generations: dict[int, int] = {}

    @rule(
        prefix=st.sampled_from([0, 4, 8]),
        tail=st.lists(st.integers(3, 31), min_size=1, max_size=7),
        kind=st.integers(0, 2),
        max_tokens=st.integers(1, 10),
    )
    def arrive(self, prefix, tail, kind, max_tokens):
        prompt = tuple([5, 6, 7, 8, 9, 10, 11, 12][:prefix] + tail)
        key = len(self.asked)
        self.asked[key] = (prompt, kind, max_tokens)
        self.out[key] = Collected()
        self.core.add([make_request(self.core, key, prompt, params_of(kind, max_tokens), seed=77)])

    @precondition(lambda self: len(self.flight) < MAX_IN_FLIGHT)
    @rule()
    def submit(self):
        plan = self.scheduler.schedule()
        if plan is None:
            return
        for row in plan.released.tolist():
            assert self.owner.pop(row, None) is not None, "released a row that nobody had"
        for admission in plan.admissions:
            assert admission.row not in self.owner, "two owners for one row"
            assert admission.generation > self.generations.get(admission.row, -1)
            assert 0 <= admission.row < ROWS and 0 not in admission.blocks
            self.generations[admission.row] = admission.generation
            self.owner[admission.row] = (admission.request.key, admission.generation)
        keys = [key for key, _ in self.owner.values()]
        assert len(keys) == len(set(keys)), "two rows for one request"
        for row, generation in zip(plan.lane_row.tolist(), plan.lane_generation.tolist(), strict=True):
            assert self.owner[row][1] == generation, "a lane of a row whose owner left"
        self.flight.append(self.runner.step(plan))

    @precondition(lambda self: self.flight)
    @rule()
    def read(self):
        collect(self.scheduler.apply(self.flight.popleft().wait()), self.out)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort(self, data):
        self._abort(data.draw(st.sampled_from(sorted(self.asked))))

    @precondition(lambda self: self.asked)
    @rule()
    def abort_at_the_last_token(self):
        for key, (_, _, max_tokens) in self.asked.items():
            if len(self.out[key].tokens) == max_tokens - 1:
                self._abort(key)
                return

    def _abort(self, key):
        if self.out[key].finish is Finish.NONE:
            self.aborted.add(key)
            self.core.abort([key])

    @invariant()
    def nothing_is_shared_leaked_or_freed_twice(self):
        self.scheduler.check_invariants()

    @invariant()
    def finished_requests_have_the_tokens_that_they_have_alone(self):
        for key, got in self.out.items():
            tokens, finish = alone(*self.asked[key])
            assert got.tokens == tokens[: len(got.tokens)]
            if got.finish is not Finish.NONE:
                assert key not in self.aborted
                assert (got.tokens, got.finish) == (tokens, finish)

    def teardown(self):
        while self.flight or self.scheduler.has_work:
            if len(self.flight) < 2:
                self.submit()
            if self.flight:
                self.read()
            self.nothing_is_shared_leaked_or_freed_twice()
        self.finished_requests_have_the_tokens_that_they_have_alone()
        for key, got in self.out.items():
            assert got.finish is not Finish.NONE or key in self.aborted
        stats = self.scheduler.stats()
        assert stats.num_running == stats.num_waiting == 0
        assert stats.free_blocks == BLOCKS - 1, "every block but the null block is free after the drain"
        self.core.close()


Engine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestEngine = Engine.TestCase


def test_the_padding_row_and_the_null_block_are_written_by_dead_lanes_only():
    """After a busy run no live row's columns show in the padding row, and it never came alive."""
    core = core_for()
    rng = np.random.default_rng(0)
    requests = [make_request(core, key, rng.integers(3, 31, 9).tolist(), params_of(0, 8)) for key in range(9)]
    run(core, requests)
    table = core._executor.runner.table
    assert int(table.columns["alive"][table.padding_row]) == 0
    assert int(table.columns["length"][table.padding_row]) == 0
    assert table.columns["blocks"][table.padding_row].eq(0).all()
    core.close()
