"""How many drafts a step verifies, against devices whose acceptance and step times are known: the best limit
of each is worked out from its own numbers. And that guesses keep no row waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
from drafters import FixedDrafting
from scheduler_device import Harness, make_request

from slipstream.contracts.request import EngineRequest
from slipstream.scheduler.drafting import LAST_PROBE, PROBE_STEPS, DraftPolicy

LAG = 2  # steps in flight


class Device:
    """Takes draft i, where all before it were, with chance[i]; a step of `limit` drafts lasts seconds(limit).
    Drafts for a step are made by the one before it, no more than that one verified."""

    def __init__(self, lanes: int, chance: list[float], seconds: Callable[[int], float]) -> None:
        self.lanes, self.chance, self.seconds = lanes, np.array(chance), seconds
        self.policy = DraftPolicy(len(chance), max(1024, lanes))
        self.random = np.random.default_rng(0)
        self.late: deque[tuple[int, int]] = deque()
        self.before, self.most = 0, 1 << 20  # most: tokens of a step
        self.limits: list[int] = []
        self.tokens = self.time = 0.0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            limit = min(self.policy.choose(self.lanes, self.most), self.most // self.lanes - 1)
            self.late.append((limit, min(limit, self.before)))
            self.limits.append(limit)
            self.before = limit
            if len(self.late) > LAG:
                self._apply(*self.late.popleft())

    def _apply(self, limit: int, made: int) -> None:
        agrees = self.random.random((self.lanes, made)) < self.chance[:made]
        taken = np.cumprod(agrees, 1).sum(1).astype(np.int32)
        seconds = self.seconds(limit) * self.random.uniform(0.95, 1.05)
        self.tokens += self.lanes + int(taken.sum())
        self.time += seconds
        self.policy.learn(self.lanes, limit, np.full_like(taken, made), taken, seconds)

    def best(self) -> tuple[int, float]:
        """The limit of the most tokens a second, and those."""
        gained = np.cumsum(np.cumprod(self.chance))
        speeds = {0: self.lanes / self.seconds(0)}
        for limit in (1, 2, 4, 8, 16):
            if limit <= len(self.chance):
                speeds[limit] = self.lanes * (1 + gained[limit - 1]) / self.seconds(limit)
        return max(speeds.items(), key=lambda item: item[1])

    def share(self) -> float:
        """Tokens a second of a late stretch, as a share of the best."""
        self.tokens = self.time = 0.0
        self.run(4000)
        return self.tokens / self.time / self.best()[1]


class UnevenDevice(Device):
    """A lane has as many drafts as a draw from `wants` says. They fill lanes * limit places in turns: first
    drafts of all lanes, then second ones."""

    def __init__(
        self, lanes: int, wants: list[int], chance: list[float], seconds: Callable[[int], float]
    ) -> None:
        super().__init__(lanes, chance, seconds)
        self.policy, self.wants = DraftPolicy(len(chance), max(1024, lanes), uneven=True), wants

    def step(self, limit: int) -> tuple[np.ndarray, np.ndarray]:
        """Drafts verified and taken by each lane."""
        most = len(self.chance)
        wanted = self.random.choice(self.wants, self.lanes)
        asks = (np.arange(most)[:, None] < wanted).ravel()
        made = (asks & (np.cumsum(asks) <= self.lanes * limit)).reshape(most, -1).sum(0)
        agrees = self.random.random((self.lanes, most)) < self.chance
        return made, np.minimum(np.cumprod(agrees, 1).sum(1), made)

    def _apply(self, limit: int, made: int) -> None:
        drafted, taken = self.step(limit if made else 0)  # the step before made all or none
        seconds = self.seconds(limit) * self.random.uniform(0.95, 1.05)
        self.tokens += self.lanes + int(taken.sum())
        self.time += seconds
        self.policy.learn(self.lanes, limit, drafted, taken, seconds)

    def best(self) -> tuple[int, float]:
        speeds = {}
        for limit in (0, 1, 2, 4, 8, 16):
            if limit <= len(self.chance) and (not limit or self.lanes * (1 + limit) <= 1024):
                gained = np.mean([self.step(limit)[1].sum() for _ in range(200)])
                speeds[limit] = (self.lanes + gained) / self.seconds(limit)
        return max(speeds.items(), key=lambda item: item[1])


def linear(first: float, each: float) -> Callable[[int], float]:
    return lambda limit: first + each * limit


@pytest.mark.parametrize(
    ("lanes", "chance", "seconds"),
    [
        (1, [0.8] * 8, linear(1e-3, 1e-6)),  # drafts cost nothing: all of them
        (64, [0.7] * 8, linear(1e-3, 2e-4)),
        (64, [0.5] * 8, linear(1e-3, 3e-4)),
        (256, [0.3] * 3, linear(2e-3, 1e-3)),  # a loaded device: none pays
        (8, [0.05] * 8, linear(1e-3, 1e-4)),  # a drafter that is mostly wrong
        (2, [0.95] * 16, linear(1e-3, 5e-5)),
    ],
)
def test_it_comes_within_three_percent_of_the_best_limit(
    lanes: int, chance: list[float], seconds: Callable[[int], float]
) -> None:
    device = Device(lanes, chance, seconds)
    device.run(2500)
    assert device.share() > 0.97, (device.best(), device.limits[-400:])


@pytest.mark.parametrize(
    ("lanes", "wants", "chance", "seconds", "limit"),
    [
        (64, [0, 0, 0, 8], [0.9] * 8, linear(1e-3, 2e-4), 2),  # a quarter of the lanes: two a lane hold all
        (64, [0, 8], [0.9] * 8, linear(1e-3, 1e-4), 4),
        (256, [0, 0, 0, 0, 0, 0, 0, 8], [0.8] * 8, linear(2e-3, 5e-4), 1),
        (16, [8], [0.95] * 8, linear(1e-3, 2e-5), 8),
        (64, [0, 0, 8], [0.2] * 8, linear(1e-3, 1e-3), 0),
    ],
)
def test_lanes_without_drafts_leave_their_room_to_others(
    lanes: int, wants: list[int], chance: list[float], seconds: Callable[[int], float], limit: int
) -> None:
    device = UnevenDevice(lanes, wants, chance, seconds)
    assert device.best()[0] == limit, "the case is what it is meant to be"
    device.run(2500)
    assert device.share() > 0.96, (device.best(), device.limits[-400:])


def test_where_drafting_never_pays_the_loss_is_small_from_early_on() -> None:
    device = Device(64, [0.02] * 4, linear(1e-3, 5e-4))
    device.run(300)
    assert device.share() > 0.98


def test_fewer_lanes_begin_with_what_pays_for_more() -> None:
    """A batch that runs out would else spend its last steps on trials without drafts."""
    device = Device(16, [0.7] * 3, linear(5e-3, 1e-4))
    device.run(300)
    assert device.policy.limit == 3
    for lanes in (7, 4, 2, 1):
        device.lanes = lanes
        device.run(8)
        assert device.limits[-8:] == [3] * 8
    device = Device(64, [0.2] * 3, linear(1e-3, 1e-3))
    device.run(600)
    device.lanes, device.seconds = 4, linear(1e-3, 1e-6)  # where they did not, fewer lanes try them
    device.run(600)
    assert device.limits[-300:].count(0) < 50


def test_a_limit_that_could_not_be_better_is_hardly_tried_again() -> None:
    device = Device(16, [0.8] * 3, linear(1e-3, 2e-5))
    device.run(2500)
    assert device.limits[100:2000].count(0) == 0 and device.limits[100:].count(3) > 2200
    assert device.limits[2000:].count(0) <= PROBE_STEPS + 1, "one trial at most"
    device.seconds = lambda limit: 1e-3 * (1 + 9 * (limit > 0))  # what cannot be foreseen is found out
    device.run(3 * LAST_PROBE)
    assert device.policy.limit == 0


def test_a_trial_at_the_end_of_a_batch_does_not_make_drafts_look_cheap() -> None:
    """Few lanes are left when it ends, and on a CPU a step takes as long as it has tokens."""
    device, share = Device(8, [0.21, 0.2, 0.1], linear(0.0, 0.0)), {8: 1.0, 7: 0.66, 5: 0.42}
    device.seconds = lambda limit: share[device.lanes] * (100e-3 + 30e-3 * limit)
    for lanes in (8, 8, 8, 8, 8, 7, 5, 5):
        device.lanes = lanes
        device.run(1)
    device.lanes = 8
    device.run(600)
    assert device.limits[-500:].count(0) > 450, device.limits


@pytest.mark.parametrize("slow", [2, 3, 10])
def test_one_slow_trial_does_not_keep_a_limit_that_does_not_pay(slow: float) -> None:
    """Drafts that a CPU verifies take as long as tokens; the device was busy when none was tried first."""
    seconds, seen = {0: 80e-3, 1: 110e-3, 2: 150e-3, 3: 190e-3}, dict.fromkeys(range(4), 0)

    def of_step(limit: int) -> float:
        seen[limit] += 1
        return seconds[limit] * (slow if limit == 0 and seen[limit] <= PROBE_STEPS else 1)

    device = Device(8, [0.21, 0.2, 0.1], of_step)
    device.run(600)
    assert device.limits[-300:].count(0) > 250, device.limits


@pytest.mark.parametrize("slow", [1.5, 2, 3, 10])
def test_steps_that_wait_for_their_kernels_at_first_do_not_count_against_their_limit(slow: float) -> None:
    seconds, seen = {0: 4.2e-3, 1: 4.5e-3, 2: 4.75e-3, 3: 5e-3}, dict.fromkeys(range(4), 0)

    def of_step(limit: int) -> float:
        seen[limit] += 1
        return seconds[limit] * (slow if limit == 3 and seen[limit] <= 4 else 1)

    device = Device(16, [0.7] * 3, of_step)
    device.run(600)
    assert device.limits[20:].count(3) > 540, device.limits


@pytest.mark.parametrize("cycle", [150, 400])
def test_times_of_a_heavier_load_do_not_make_drafts_look_cheap(cycle: int) -> None:
    """Batch after batch that begins heavy and ends light, as its answers end, all in one group."""
    device = Device(48, [0.25] * 3, linear(1e-3, 4e-4))
    light = device.seconds
    device.seconds = lambda limit: light(limit) * (3.0 - 2.0 * (len(device.limits) % cycle) / cycle)
    device.run(3000)
    assert device.limits[-2000:].count(0) > 1900


def test_it_follows_a_change_of_acceptance_and_of_load() -> None:
    device = Device(16, [0.01] * 8, linear(1e-3, 5e-5))
    device.run(1500)
    assert device.policy.limit == 0 or device.limits[-100:].count(0) > 80
    device.chance = np.array([0.9] * 8)  # the texts begin to repeat themselves
    device.run(LAST_PROBE + 1500)
    assert device.share() > 0.95
    device.lanes, device.seconds = 200, linear(2e-3, 4e-3)  # many more requests
    device.run(2500)
    assert device.share() > 0.97


def test_a_step_never_has_more_tokens_than_there_are_shapes_for() -> None:
    for lanes in (1, 3, 60, 64, 100, 255, 256, 1000):
        policy = DraftPolicy(16, 1024)
        limit = policy.choose(lanes, 8192)
        assert limit == 0 or lanes * (1 + limit) <= 1024
    steps = ((32, 9000), (64, 9000), (64, 512))
    assert [DraftPolicy(16, 1024).choose(*step) for step in steps] == [16, 8, 4]
    assert DraftPolicy(3, 1024).choose(256, 1024) == 3


@pytest.mark.parametrize("kind", [Device, UnevenDevice])
def test_where_a_step_has_no_room_for_the_largest_limit_the_others_are_weighed(kind: type[Device]) -> None:
    """Also where the room shrinks, as it does when memory lacks."""
    wants = [4] if kind is UnevenDevice else []
    device = kind(8, *[wants] * bool(wants), [0.0] * 4, linear(1e-2, 1e-2))
    device.most = 64
    device.run(300)
    device.most = 24
    device.run(4000)
    assert device.share() > 0.97
    device.chance = np.array([0.9] * 4)
    device.seconds = linear(1e-2, 1e-4)
    device.run(LAST_PROBE + 1500)
    assert set(device.limits[-100:]) <= {1, 2} and 2 in device.limits[-100:]


@pytest.mark.parametrize("uneven", [False, True])
def test_a_row_near_its_end_goes_on_until_steps_in_flight_end_it_for_certain(uneven: bool) -> None:
    """Two steps of five tokens may end it earlier, but most do not."""
    harness = Harness(tokens_per_step=5, uneven_drafts=uneven)
    harness.scheduler._drafting = FixedDrafting(4)
    harness.add(make_request(3, 5, 40, ignore_eos=True))
    while 3 not in harness.finish:
        left = 40 - len(harness.tokens[3])
        while len(harness.late) < 2 and harness.schedule():
            pass
        assert len(harness.late) == min(2, left)
        harness.apply()
    harness.finish_all()


class Expecting(FixedDrafting):
    def gain(self, limit: int) -> float:
        return 3.0


def ending_row(*others: EngineRequest) -> Harness:
    """Row of key 3 that has at most three tokens to go and one step in flight, the oldest."""
    harness = Harness(tokens_per_step=5, uneven_drafts=True)
    harness.scheduler._drafting = Expecting(4)
    harness.add(make_request(3, 5, 30, ignore_eos=True), *others)
    while len(harness.tokens[3]) < 27:
        harness.schedule()
        harness.apply()
    assert 3 not in harness.finish
    assert harness.schedule()
    return harness


def test_a_step_that_most_likely_nobody_needs_is_not_planned() -> None:
    """Who comes next would have to wait for it."""
    harness = ending_row()
    assert not harness.schedule()
    harness.apply()
    assert 3 in harness.finish or harness.schedule(), "it has not ended, so it goes on"
    harness.finish_all()


def test_a_row_that_is_ending_goes_on_in_steps_that_others_need() -> None:
    harness = ending_row(make_request(4, 5, 50, ignore_eos=True))
    assert harness.schedule() and len(harness.plans[-1].lane_row) == 2
    harness.finish_all()
    harness = ending_row()
    harness.add(make_request(4, 5, 50, ignore_eos=True))
    assert harness.schedule() and len(harness.plans[-1].lane_row) == 2
    harness.finish_all()


def test_the_policy_expects_of_a_step_what_its_drafts_have_brought() -> None:
    device = Device(16, [0.7, 0.5], linear(1e-3, 1e-5))
    device.run(2000)
    assert device.policy.gain(0) == 1
    assert device.policy.gain(2) == pytest.approx(1 + 0.7 + 0.35, abs=0.1)
