"""A state machine drives the scheduler at random and holds it against an exact model of the device.

Checked at every step by the model (tests/scheduler_device.py): no row has two owners or two lanes, every KV
slot that a lane reads was written for its own tokens and salt, no plan passes the budget. Checked at the end:
every request got exactly its tokens, and all rows and blocks are free. """

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_device import Harness, make_request

PREFIX = [11, 12, 13, 14, 15, 16, 17, 18]


class SchedulerMachine(RuleBasedStateMachine):
    """Results are up to three steps late; the pool is so small that rows are preempted."""

    @initialize(
        lag=st.integers(0, 3), rows=st.integers(1, 5), num_blocks=st.integers(7, 16),
        budget=st.integers(0, 12), tokens_per_step=st.sampled_from((1, 1, 2, 4)), caching=st.booleans(),
        policy=st.sampled_from(("fcfs", "priority")), ahead=st.integers(0, 2),
        lookahead=st.sampled_from((0, 0, 3, 6)), uneven=st.booleans(),
    )
    def start(
        self, lag: int, rows: int, num_blocks: int, budget: int, tokens_per_step: int, caching: bool,
        policy: str, ahead: int, lookahead: int, uneven: bool,
    ) -> None:
        self.harness = Harness(
            lag, max_num_seqs=rows, max_num_batched_tokens=rows * tokens_per_step + budget, max_model_len=40,
            block_size=4, num_blocks=num_blocks, policy=policy, enable_prefix_caching=caching,
            tokens_per_step=tokens_per_step, grant_ahead=ahead, lookahead=lookahead,
            uneven_drafts=uneven,
        )
        self.next_key = 0

    @rule(
        shared=st.integers(0, 8), own=st.integers(0, 12), output=st.integers(0, 20),
        priority=st.integers(0, 2), salt=st.sampled_from((None, None, "a")), ignore_eos=st.booleans(),
        scored=st.booleans(), broken=st.integers(0, 9),
    )
    def add(
        self, shared: int, own: int, output: int, priority: int, salt: str | None, ignore_eos: bool,
        scored: bool, broken: int,
    ) -> None:
        key = self.next_key
        self.next_key += 1
        prompt = PREFIX[:shared] + [(key + i) % 50 for i in range(own)] or [1]
        if broken == 0:
            self.harness.device.broken_keys.add(key)
        self.harness.add(make_request(
            key, prompt, output, priority=priority, salt=salt, ignore_eos=ignore_eos,
            prompt_logprobs=0 if scored else None,
        ))

    @rule()
    def schedule(self) -> None:
        if len(self.harness.late) <= 3:
            self.harness.schedule()

    @rule()
    def apply(self) -> None:
        self.harness.apply()

    @rule(count=st.integers(1, 8))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.harness.step()

    @precondition(lambda self: self.next_key > 0)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Any key: waiting, running, finished, aborted before."""
        self.harness.abort(data.draw(st.integers(0, self.next_key - 1)))

    @precondition(lambda self: self.next_key > 0)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        self.harness.scheduler.fail([data.draw(st.integers(0, self.next_key - 1))], "failed from outside")

    @invariant()
    def nobody_is_lost(self) -> None:
        if hasattr(self, "harness"):
            self.harness.scheduler.check_invariants()

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        harness = self.harness
        harness.finish_all()
        for key, positions in harness.scored.items():
            assert positions == list(range(1, len(positions) + 1))
            if key not in harness.aborted and key not in harness.errors:
                assert len(positions) == len(harness.requests[key].prompt_token_ids) - 1


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
