"""Requests that must have a row by some time: the scheduler alone says whose wait is over."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from scheduler_device import Harness, make_request

from slipstream.contracts.errors import OVERDUE
from slipstream.contracts.step import Finish


@dataclass
class Clock:
    """Seconds as the test wants them."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def harness_at(clock: Clock, lag: int = 1, **numbers: object) -> Harness:
    harness = Harness(lag, **numbers)
    harness.scheduler.waiting.clock = clock
    return harness


def test_whoever_waits_too_long_is_refused_and_never_gets_a_row() -> None:
    clock = Clock()
    harness = harness_at(clock, max_num_seqs=1)
    harness.add(make_request(1, 4, 30, ignore_eos=True, admit_by=104.0))
    harness.add(make_request(2, 4, 3, admit_by=104.0), make_request(3, 4, 3, admit_by=200.0))
    for _ in range(4):
        harness.step()
    clock.now = 104.0
    harness.step()
    harness.step()
    assert harness.errors == {2: OVERDUE} and harness.finish == {2: Finish.ERROR}
    harness.finish_all()
    assert harness.order == [1, 3], "one that has a row keeps it, one that may wait gets the next"


def test_the_last_moment_is_in_time() -> None:
    clock = Clock()
    harness = harness_at(clock)
    harness.add(make_request(1, 4, 3, admit_by=104.0), make_request(2, 4, 3, admit_by=103.9))
    clock.now = 103.95
    harness.finish_all()
    assert harness.order == [1] and harness.errors == {2: OVERDUE}


def test_news_of_refusals_needs_no_step() -> None:
    """As while a worker starts: nothing is planned then."""
    clock = Clock()
    harness = harness_at(clock)
    harness.add(make_request(1, 4, 3, admit_by=101.0))
    assert harness.scheduler.drain() is None
    clock.now = 102.0
    harness.apply()
    assert harness.errors == {1: OVERDUE} and not harness.scheduler.has_work


def test_whoever_has_had_a_row_is_never_overdue() -> None:
    clock = Clock()
    harness = harness_at(clock, num_blocks=19, max_num_seqs=6)
    harness.add(*(make_request(key, 5, 30, ignore_eos=True, admit_by=104.0) for key in range(6)))
    harness.step()
    assert len(harness.order) == 6
    clock.now = 105.0
    harness.finish_all()
    assert harness.scheduler.stats().preemptions > 0 and not harness.errors


@pytest.mark.parametrize("rows", [1, 4])
def test_samples_of_one_request_are_let_in_or_refused_together(rows: int) -> None:
    clock = Clock()
    harness = harness_at(clock, max_num_seqs=rows)
    harness.add(make_request(0, 4, 20, ignore_eos=True))
    samples = [make_request(key, 4, 20, ignore_eos=True, admit_by=104.0, first=1) for key in range(1, 6)]
    harness.add(*samples)
    harness.step()
    clock.now = 105.0
    harness.finish_all()
    assert set(harness.errors) == (set(range(1, 6)) if rows == 1 else set())


def test_refused_requests_are_refused_while_workers_are_lost_in_a_row() -> None:
    """Nobody is let in while one request at a time is tried."""
    clock = Clock()
    harness = harness_at(clock, max_num_seqs=1)
    harness.add(make_request(1, 4, 3, admit_by=104.0), make_request(2, 4, 3, admit_by=104.0))
    harness.scheduler.waiting.hold()
    harness.add(make_request(3, 4, 3, admit_by=104.0))
    assert harness.scheduler.waiting.let_in(2)
    clock.now = 104.0
    harness.apply()
    assert set(harness.errors) == {1, 2, 3}
    harness.scheduler.waiting.release()
    harness.add(make_request(4, 4, 3))
    harness.finish_all()
    assert harness.order == [4]


def test_four_times_too_many_requests_keep_every_row_busy() -> None:
    """Steps of a second, 4 rows of 8 steps: 30 requests a minute; 120 come, which may wait 10 seconds."""
    clock = Clock(0.0)
    harness = harness_at(clock, num_blocks=400)
    numbers = random.Random(0)
    arrivals = sorted(numbers.uniform(0, 240) for _ in range(480))
    for key, at in enumerate(arrivals):
        while clock.now < at:
            clock.now += 1.0
            harness.step()
        harness.add(make_request(key, 4, 8, ignore_eos=True, admit_by=at + 10.0))
        harness.abort(*(other for other in range(max(0, key - 200), key) if other in harness.errors))
    while harness.scheduler.has_work or harness.late:
        clock.now += 1.0
        harness.step()
    harness.check_end()
    served = 480 - len(harness.errors)
    assert served == len(harness.order), "whoever had a row was served to the end"
    assert 0.95 * 120 <= served <= 1.05 * 125
    assert len(harness.scheduler.waiting._deadlines) <= 64
