"""The prefix cache, seen from outside: what is reused, what never is."""

from __future__ import annotations

import pytest
from scheduler_device import Harness, expected_output, make_request

PROMPT = list(range(10, 22))  # three blocks of four


def serve(harness: Harness, key: int, prompt: list[int], **options: object) -> int:
    """Run one request alone; how many of its tokens came from the cache."""
    harness.add(make_request(key, prompt, 6, ignore_eos=True, **options))  # type: ignore[arg-type]
    harness.finish_all()
    return harness.cached[key]


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_a_prompt_of_whole_blocks_computes_its_last_block_again(lag: int) -> None:
    harness = Harness(lag)
    assert serve(harness, 1, PROMPT) == 0
    assert serve(harness, 2, PROMPT) == 8
    assert harness.tokens[2] == expected_output(harness.requests[2])[0]


def test_one_token_past_whole_blocks_reuses_all_of_them() -> None:
    harness = Harness()
    serve(harness, 1, PROMPT)
    assert serve(harness, 2, [*PROMPT, 3]) == 12


@pytest.mark.parametrize("same", [0, 3, 4, 7, 8, 11])
def test_only_the_full_blocks_of_the_common_prefix_are_reused(same: int) -> None:
    harness = Harness()
    serve(harness, 1, PROMPT)
    other = [*PROMPT[:same], *(token + 20 for token in PROMPT[same:]), 1]
    assert serve(harness, 2, other) == same // 4 * 4


def test_equal_blocks_behind_different_beginnings_are_not_shared() -> None:
    harness = Harness()
    serve(harness, 1, PROMPT)
    assert serve(harness, 2, [*PROMPT[4:], *PROMPT[4:]]) == 0


def test_generated_tokens_are_reused_by_the_next_turn_of_a_conversation() -> None:
    harness = Harness()
    serve(harness, 1, PROMPT)
    turn = [*PROMPT, *harness.tokens[1], 5, 6, 7]
    # 18 tokens, of which the last was never computed: four full blocks.
    assert serve(harness, 2, turn) == 16


def test_a_salt_separates_and_joins() -> None:
    harness = Harness()
    serve(harness, 1, PROMPT, salt="a")
    assert serve(harness, 2, PROMPT) == 0
    assert serve(harness, 3, PROMPT, salt="b") == 0
    assert serve(harness, 4, PROMPT, salt="") == 0
    assert serve(harness, 5, PROMPT, salt="a") == 8


def test_a_request_with_prompt_logprobs_computes_every_position_and_leaves_them_to_others() -> None:
    harness = Harness()
    serve(harness, 1, PROMPT)
    assert serve(harness, 2, PROMPT, prompt_logprobs=0) == 0
    assert harness.scored[2] == list(range(1, 12))
    assert serve(harness, 3, PROMPT) == 8


def test_nothing_is_reused_when_caching_is_off() -> None:
    harness = Harness(enable_prefix_caching=False)
    serve(harness, 1, PROMPT)
    assert serve(harness, 2, PROMPT) == 0
    assert harness.device.computed_tokens == 2 * (12 + 5)


def test_a_prefix_is_shared_while_its_first_owner_still_runs() -> None:
    harness = Harness(lag=1)
    harness.add(make_request(1, PROMPT, 40, ignore_eos=True))
    for _ in range(4):
        harness.step()
    harness.add(make_request(2, [*PROMPT, 1, 2], 4), make_request(3, [*PROMPT, 2, 2], 4))
    harness.finish_all()
    assert harness.cached == {1: 0, 2: 12, 3: 12}


def test_a_prefix_outlives_an_abort_as_far_as_it_was_computed() -> None:
    harness = Harness(lag=0, max_num_batched_tokens=5)
    harness.add(make_request(1, PROMPT, 4))
    harness.step()
    harness.step()  # ten of twelve tokens
    harness.abort(1)
    assert serve(harness, 2, PROMPT) == 8
    assert serve(harness, 3, [*PROMPT, 1]) == 12


def test_the_end_of_the_longest_unused_prefix_is_evicted_first() -> None:
    harness = Harness(num_blocks=13, grant_ahead=0)  # twelve blocks: four of each prompt below
    first, second = PROMPT, [token + 20 for token in PROMPT]
    serve(harness, 1, first)
    serve(harness, 2, second)
    serve(harness, 1001, first)  # now used later than the second
    serve(harness, 3, [1] * 16)  # takes what is free, then evicts
    assert serve(harness, 1002, [*first, 1]) >= 8
    assert serve(harness, 4, [*second, 1]) < 12


def test_a_preempted_request_takes_its_own_blocks_up_again() -> None:
    harness = Harness(lag=0, num_blocks=11, max_num_seqs=2, grant_ahead=0)
    harness.add(make_request(1, 12, 20, ignore_eos=True), make_request(2, 12, 20, ignore_eos=True))
    harness.finish_all()
    assert harness.scheduler.stats().preemptions > 0
    again = [a for plan in harness.plans for a in plan.admissions if a.request.key == 2][1:]
    assert any(a.num_cached > 0 for a in again)
    assert harness.cached[2] == 0  # reported once, for the first admission


def test_hits_and_queries_are_counted_in_tokens() -> None:
    harness = Harness()
    serve(harness, 1, PROMPT)
    serve(harness, 2, PROMPT)
    stats = harness.scheduler.stats()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (24, 8)
