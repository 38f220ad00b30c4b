"""The scheduler against an exact model of the device (tests/scheduler_device.py)."""

from __future__ import annotations

import numpy as np
import pytest
from scheduler_device import END, Harness, expected_output, make_request, token_at

from slipstream.contracts.step import Finish
from slipstream.scheduler import SchedulerConfig


def key_without_end(length: int, more: int) -> int:
    """A key whose tokens at positions length .. length + more - 1 hold no end token."""
    return next(k for k in range(1000) if all(token_at(k, length + i) != END for i in range(more)))


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("tokens_per_step", [1, 3])
@pytest.mark.parametrize("num_blocks", [12, 20, 65])
def test_every_request_gets_its_own_tokens(
    lag: int, caching: bool, tokens_per_step: int, num_blocks: int
) -> None:
    harness = Harness(
        lag, num_blocks=num_blocks, enable_prefix_caching=caching, tokens_per_step=tokens_per_step,
        max_num_batched_tokens=16,
    )
    harness.add(*(make_request(key, 1 + key * 7 % 23, key * 5 % 20) for key in range(30)))
    harness.finish_all()
    assert len(harness.finish) == 30


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_a_small_pool_preempts_and_the_text_does_not_change(lag: int) -> None:
    harness = Harness(lag, num_blocks=13, max_num_seqs=6)
    harness.add(*(make_request(key, 5, 30, ignore_eos=True) for key in range(40)))
    harness.finish_all()
    assert harness.scheduler.stats().preemptions >= 20


def test_the_oldest_request_is_never_preempted() -> None:
    harness = Harness(num_blocks=11, max_num_seqs=6)
    harness.add(*(make_request(key, 4, 32, ignore_eos=True) for key in range(12)))
    harness.finish_all()
    assert harness.scheduler.stats().preemptions > 0
    admitted = [a.request.key for plan in harness.plans for a in plan.admissions]
    assert admitted.count(0) == 1


def test_a_steady_decode_step_repeats_the_arrays_of_the_last() -> None:
    harness = Harness(max_model_len=200, num_blocks=500, block_size=16)
    harness.add(*(make_request(key, 3 + key, 150, ignore_eos=True) for key in range(4)))
    for _ in range(100):
        harness.step()
    steady = harness.plans[10:]
    assert not any(plan.lanes_changed for plan in steady)
    assert all(plan.lane_row is steady[0].lane_row for plan in steady)
    assert all(len(plan.released) == 0 and not plan.admissions for plan in steady)
    # Four rows cross a block boundary every 16 steps; their grants come together.
    granting = [plan for plan in steady if len(plan.grant_row)]
    assert 1 <= len(granting) <= len(steady) // 12


def test_one_row_leaving_changes_the_lanes_once() -> None:
    harness = Harness(lag=2, max_num_seqs=3, num_blocks=100, max_model_len=100)
    harness.add(make_request(1, 4, 12, ignore_eos=True), make_request(2, 4, 60, ignore_eos=True))
    harness.finish_all()
    # The first plan (both prompts), the first decode, then the short one's end, and nothing else.
    assert [plan.step for plan in harness.plans if plan.lanes_changed] == [0, 1, 12]
    assert [plan.step for plan in harness.plans if len(plan.released)] == [14]


def test_a_finished_row_is_not_scheduled_past_its_length_limit() -> None:
    harness = Harness(lag=3, num_blocks=100)
    harness.add(make_request(1, 4, 10, ignore_eos=True))
    harness.finish_all()
    assert len(harness.plans) == 10


def test_prompts_are_computed_in_chunks_under_the_budget_while_decodes_go_on() -> None:
    harness = Harness(max_num_seqs=4, max_num_batched_tokens=8, max_model_len=128, num_blocks=200)
    harness.add(*(make_request(key, 2, 60, ignore_eos=True) for key in (1, 2)))
    for _ in range(3):
        harness.step()
    first = len(harness.plans)
    harness.add(make_request(3, 60, 4, ignore_eos=True), make_request(4, 5, 4, ignore_eos=True))
    for _ in range(20):
        harness.step()
    during = harness.plans[first : first + 10]
    assert all(plan.num_decode_lanes == 2 for plan in during)
    assert [plan.lane_query_len.tolist() for plan in during[:9]] == [[1, 1, 6]] * 9
    assert [plan.lane_samples.tolist()[2:] for plan in during[:10]] == [[False]] * 9 + [[True]]
    harness.finish_all()


def test_the_budget_that_a_prompt_leaves_goes_to_the_next_in_line() -> None:
    harness = Harness(max_num_batched_tokens=16, num_blocks=100)
    harness.add(*(make_request(key, 10, 3) for key in range(3)))
    harness.schedule()
    assert harness.plans[0].lane_query_len.tolist() == [10, 6]
    assert harness.plans[0].lane_samples.tolist() == [True, False]
    harness.finish_all()


def test_first_come_is_first_served() -> None:
    harness = Harness(max_num_seqs=2, policy="fcfs")
    harness.add(*(make_request(key, 4, 6, priority=-key) for key in range(9)))
    harness.finish_all()
    assert harness.order == list(range(9))


def test_lower_priority_numbers_are_served_first_and_equals_by_arrival() -> None:
    harness = Harness(max_num_seqs=1, policy="priority")
    for key, priority in ((1, 5), (2, 0), (3, 5), (4, -1), (5, 0)):
        harness.add(make_request(key, 4, 3, priority=priority))
    harness.finish_all()
    assert harness.order == [4, 2, 5, 1, 3]


def test_the_request_of_the_highest_priority_number_is_preempted_first() -> None:
    harness = Harness(max_num_seqs=3, policy="priority", num_blocks=13)
    for key, priority in ((1, 3), (2, 1), (3, 2)):
        harness.add(make_request(key, 8, 30, priority=priority, ignore_eos=True))
    harness.finish_all()
    admitted = [a.request.key for plan in harness.plans for a in plan.admissions]
    assert admitted.count(2) == 1 and admitted.count(1) > 1


def test_a_preempted_request_comes_back_before_later_ones() -> None:
    harness = Harness(max_num_seqs=2, num_blocks=9, max_model_len=32)
    harness.add(*(make_request(key, 8, 16, ignore_eos=True) for key in range(3)))
    harness.finish_all()
    admitted = [a.request.key for plan in harness.plans for a in plan.admissions]
    assert admitted[:4] == [0, 1, 1, 2]
    again = next(a for plan in harness.plans[1:] for a in plan.admissions if a.request.key == 1)
    # It brings its prompt and what was delivered, and goes on from there.
    delivered = len(again.tokens) - 8
    assert delivered > 0 and again.tokens[8:].tolist() == harness.tokens[1][:delivered]


def test_released_names_a_row_that_is_given_away_in_the_same_plan() -> None:
    harness = Harness(lag=1, max_num_seqs=1)
    harness.add(make_request(1, 4, 3, ignore_eos=True), make_request(2, 4, 3, ignore_eos=True))
    harness.finish_all()
    second = next(plan for plan in harness.plans if plan.admissions and plan.admissions[0].request.key == 2)
    assert second.released.tolist() == [0] and second.admissions[0].row == 0
    assert second.admissions[0].generation == harness.plans[0].admissions[0].generation + 1


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_late_results_of_a_reused_row_are_dropped(lag: int) -> None:
    harness = Harness(lag, max_num_seqs=1)
    harness.add(make_request(1, 6, 40, ignore_eos=True))
    for _ in range(4):
        harness.step()
    harness.schedule()
    harness.abort(1)
    harness.add(make_request(2, 5, 12, ignore_eos=True))
    harness.finish_all()
    assert harness.tokens[2] == expected_output(harness.requests[2])[0]


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("before", range(8))
def test_an_abort_at_any_step_frees_everything_and_says_nothing_more(lag: int, before: int) -> None:
    harness = Harness(lag)
    harness.add(make_request(1, 10, 4, ignore_eos=True), make_request(2, 10, 9, ignore_eos=True))
    for _ in range(before):
        harness.step()
    harness.abort(1, 99)
    harness.finish_all()
    assert 2 in harness.finish


def test_an_abort_while_the_final_token_is_in_flight_ends_the_request_silently() -> None:
    harness = Harness(lag=1)
    harness.add(make_request(1, 4, 5, ignore_eos=True))
    while len(harness.tokens[1]) < 4:
        harness.step()
    assert len(harness.late) == 1  # the fifth and last token is computed, its result not yet read
    harness.abort(1)
    harness.finish_all()
    assert len(harness.tokens[1]) == 4 and 1 not in harness.finish


def test_aborting_what_waits_leaves_the_queue_in_order() -> None:
    harness = Harness(max_num_seqs=1)
    harness.add(*(make_request(key, 4, 4) for key in range(200)))
    harness.schedule()
    harness.abort(*(key for key in range(1, 200) if key % 50))
    harness.finish_all()
    assert harness.order == [0, 50, 100, 150]


def test_the_order_of_priorities_survives_many_aborts() -> None:
    harness = Harness(max_num_seqs=1, policy="priority")
    priority = dict(enumerate(np.random.default_rng(0).permutation(300).tolist()))
    harness.add(*(make_request(key, 4, 2, priority=priority[key]) for key in range(300)))
    stay = [key for key in range(300) if key % 6 == 0]
    for key in range(300):
        if key not in stay:
            harness.abort(key)
    harness.finish_all()
    assert harness.order == sorted(stay, key=priority.__getitem__)


def test_a_prompt_that_can_never_fit_is_refused_with_both_numbers_and_harms_nobody() -> None:
    harness = Harness(block_size=16, num_blocks=21, max_model_len=2048, max_num_batched_tokens=64)
    harness.add(make_request(1, 600, 4), make_request(2, 20, 4))
    harness.finish_all()
    assert "needs 38 KV blocks of 16 tokens" in harness.errors[1] and "20 exist" in harness.errors[1]
    assert harness.finish[1] == Finish.ERROR and harness.tokens[1] == []
    assert harness.finish[2] in (Finish.STOP, Finish.LENGTH)


def test_a_refused_request_that_is_aborted_at_once_is_not_spoken_of() -> None:
    harness = Harness(num_blocks=3)
    harness.add(make_request(1, 40, 4), make_request(2, 40, 4))
    harness.abort(1)
    harness.finish_all()
    assert set(harness.errors) == {2}


def test_a_refusal_is_told_without_any_step() -> None:
    harness = Harness(num_blocks=3)
    harness.add(make_request(1, 40, 4))
    assert harness.scheduler.has_work and not harness.schedule()
    outputs = harness.apply()
    assert outputs is not None and outputs.keys.tolist() == [1] and outputs.finish.tolist() == [Finish.ERROR]
    assert not harness.scheduler.has_work and harness.scheduler.drain() is None


def test_a_request_that_needs_the_whole_pool_is_served() -> None:
    harness = Harness(num_blocks=9)
    harness.add(*(make_request(key, 20, 12, ignore_eos=True) for key in range(3)))
    harness.finish_all()
    assert len(harness.finish) == 3


def test_without_max_tokens_a_request_may_grow_to_the_size_of_the_pool() -> None:
    key = key_without_end(10, 60)
    harness = Harness(num_blocks=9)  # 32 tokens
    harness.add(make_request(key, 10, None, max_len=64))
    for _ in range(60):
        harness.step()
    assert harness.finish == {key: Finish.LENGTH} and len(harness.tokens[key]) == 22


def test_a_row_that_fails_on_the_device_ends_alone_and_its_blocks_are_not_reused_as_a_prefix() -> None:
    harness = Harness()
    prompt = list(range(20, 32))
    harness.device.broken_keys.add(1)
    harness.add(make_request(1, prompt, 4), make_request(2, 5, 4))
    harness.finish_all()
    assert harness.finish[1] == Finish.ERROR and "not finite" in harness.errors[1]
    assert harness.tokens[2] == expected_output(harness.requests[2])[0]
    harness.add(make_request(3, prompt, 4))
    harness.finish_all()
    assert harness.cached[3] == 0


def test_requests_can_be_failed_from_outside_while_they_run_and_while_they_wait() -> None:
    harness = Harness(max_num_seqs=2)
    harness.add(*(make_request(key, 5, 20, ignore_eos=True) for key in range(4)))
    for _ in range(4):
        harness.step()
    harness.scheduler.fail([0, 3, 77], "the mask could not be made")
    harness.finish_all()
    assert harness.errors == {0: "the mask could not be made", 3: "the mask could not be made"}
    assert harness.finish[0] == harness.finish[3] == Finish.ERROR
    assert len(harness.tokens[0]) > 0 and len(harness.tokens[1]) == len(harness.tokens[2]) == 20


def test_no_tokens_asked_gives_none_and_an_end() -> None:
    harness = Harness()
    harness.add(make_request(1, 6, 0))
    harness.finish_all()
    assert harness.tokens[1] == [] and harness.finish[1] == Finish.LENGTH and len(harness.plans) == 1


def test_resumed_tokens_are_computed_but_not_delivered_again() -> None:
    whole = make_request(5, 6, 12, ignore_eos=True)
    tokens, _ = expected_output(whole)
    harness = Harness()
    harness.add(make_request(5, 6, 12, max_len=18, ignore_eos=True, resumed=tokens[:7]))
    harness.finish_all()
    assert harness.tokens[5] == tokens[7:]
    assert harness.plans[0].admissions[0].tokens[6:].tolist() == tokens[:7]


def test_a_live_key_cannot_be_added_twice() -> None:
    harness = Harness()
    harness.add(make_request(1, 6, 4))
    with pytest.raises(ValueError, match="key=1"):
        harness.scheduler.add(make_request(1, 6, 4))


def test_logprobs_follow_the_lanes_with_news() -> None:
    harness = Harness(lag=2, num_blocks=14, max_num_seqs=6)
    harness.add(*(make_request(key, 5, 20, logprobs=0) for key in range(12)))
    harness.finish_all()
    assert harness.scheduler.stats().preemptions > 0
    for key, tokens in harness.tokens.items():
        assert harness.token_scores[key] == tokens  # the model's ids are the tokens


@pytest.mark.parametrize("lag", [0, 2])
def test_prompt_logprobs_come_once_for_each_position_whatever_happens(lag: int) -> None:
    harness = Harness(lag, num_blocks=17, max_num_seqs=6, max_num_batched_tokens=7)
    prompt = list(range(15))
    harness.add(*(make_request(key, prompt, 20, prompt_logprobs=0, ignore_eos=True) for key in range(8)))
    harness.finish_all()
    assert harness.scheduler.stats().preemptions > 0
    assert all(harness.scored[key] == list(range(1, 15)) for key in range(8))


def test_the_length_bound_covers_every_lane_and_is_tight_for_one_token_a_step() -> None:
    harness = Harness(num_blocks=100)
    harness.add(make_request(1, 9, 20, ignore_eos=True))
    harness.finish_all()
    assert [plan.len_bound for plan in harness.plans] == [9, *range(10, 29)]


def test_stats_count_rows_blocks_and_steps() -> None:
    harness = Harness(lag=1, max_num_seqs=2, num_blocks=20, grant_ahead=0)
    harness.add(*(make_request(key, 8, 20, ignore_eos=True) for key in range(5)))
    harness.step()
    stats = harness.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_blocks) == (2, 3, 19)
    # Two prompts of two blocks each, and a block each for the decode step in flight.
    assert stats.free_blocks == 19 - 6
    assert (stats.steps, stats.steps_in_flight, stats.preemptions) == (1, 1, 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_num_seqs", 0), ("num_blocks", 1), ("block_size", 0), ("max_num_batched_tokens", 3),
     ("policy", "lifo"), ("tokens_per_step", 0), ("grant_ahead", -1), ("max_model_len", 0)],
)
def test_a_number_out_of_range_is_named(field: str, value: object) -> None:
    numbers: dict[str, object] = {
        "max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 32, "block_size": 4,
        "num_blocks": 10,
    }
    with pytest.raises(ValueError, match=field):
        SchedulerConfig(**{**numbers, field: value})  # type: ignore[arg-type]


def test_outputs_are_plain_arrays_of_the_stated_types() -> None:
    harness = Harness(lag=0)
    harness.add(make_request(3, 6, 4, ignore_eos=True))
    harness.schedule()
    outputs = harness.apply()
    assert outputs is not None
    dtypes = (outputs.keys.dtype, outputs.num_tokens.dtype, outputs.tokens.dtype, outputs.finish.dtype)
    assert dtypes == (np.int64, np.int32, np.int32, np.int32)
    assert outputs.num_cached == [(3, 0)]


@pytest.mark.parametrize("lag", [0, 2])
def test_a_lane_leaves_in_the_first_plan_after_its_abort(lag: int) -> None:
    harness = Harness(lag, num_blocks=100, block_size=16)
    harness.add(*(make_request(key, 4, 40, ignore_eos=True) for key in (1, 2)))
    for _ in range(5):
        harness.step()
    harness.abort(1)
    harness.schedule()
    assert harness.plans[-1].lane_row.tolist() == [1] and harness.plans[-1].lanes_changed
    assert harness.plans[-1].released.tolist() == [0]
    harness.schedule()
    assert not harness.plans[-1].lanes_changed
    harness.finish_all()


def test_a_newcomer_waits_until_each_running_row_has_a_free_block_left() -> None:
    harness = Harness(num_blocks=11, grant_ahead=0, max_num_seqs=3)  # ten blocks of four tokens
    harness.add(*(make_request(key, 16, 4, ignore_eos=True) for key in (1, 2)))
    harness.add(make_request(3, 4, 4, ignore_eos=True))
    harness.schedule()
    # Two prompts take eight blocks. One more would fit, but then the next boundary would preempt it.
    assert [a.request.key for a in harness.plans[0].admissions] == [1, 2]
    harness.finish_all()
    assert harness.scheduler.stats().preemptions == 0


def test_drafts_of_steady_steps_stay_within_the_tokens_of_a_step() -> None:
    harness = Harness(tokens_per_step=5, max_num_batched_tokens=10, num_blocks=200, grant_ahead=8)
    harness.add(*(make_request(key, 4, 50, ignore_eos=True) for key in range(4)))
    harness.finish_all()
    tokens = [int(plan.lane_query_len.sum()) + plan.draft_room for plan in harness.plans]
    assert max(tokens) <= 10 and any(plan.draft_tokens for plan in harness.plans)
