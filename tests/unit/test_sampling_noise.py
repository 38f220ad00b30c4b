"""The stateless noise: its stated formula bit for bit, and its quality as random numbers."""

import math

import numpy as np
import torch
from sampling_rows import chi_square_is_plausible

from slipstream.kernels.noise import PURPOSE_TOKEN, gumbel_cost, lane_keys, noise_bits, uniform

WORD = 0xFFFFFFFF


def mix32(x: int) -> int:
    """lowbias32 in plain integers."""
    x ^= x >> 16
    x = x * 0x7FEB352D & WORD
    x ^= x >> 15
    x = x * 0x846CA68B & WORD
    return x ^ x >> 16


def noise32(seed: int, position: int, purpose: int, token: int) -> int:
    """The formula of kernels/noise.py in plain integers."""
    keys = []
    for key in (0x3C6EF372, 0x9E3779B9):
        for word in (seed & WORD, seed >> 32 & WORD, position, purpose):
            key = mix32(key ^ word)
        keys.append(key)
    x = mix32(token) ^ keys[0]
    x = x * 0x7FEB352D & WORD
    x ^= x >> 15
    x = (x + keys[1]) * 0x846CA68B & WORD
    return x ^ x >> 16


def words(values) -> torch.Tensor:
    return torch.tensor(np.array(values, np.int64).astype(np.int32))


def draws(seeds, positions, purpose=PURPOSE_TOKEN, tokens=1) -> np.ndarray:
    """Uniform numbers [len(seeds), tokens]; seeds are 64-bit."""
    seeds = np.asarray(seeds, np.int64)
    key = lane_keys(words(seeds & WORD), words(seeds >> 32), words(positions), purpose)
    return uniform(noise_bits(key, torch.arange(tokens, dtype=torch.int32))).numpy()


def test_noise_is_the_stated_formula_bit_for_bit():
    rng = np.random.default_rng(0)
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), *rng.integers(-(2**63), 2**63 - 1, 20).tolist()]
    positions = [0, 1, 2**31 - 1, *rng.integers(0, 2**20, len(seeds) - 3).tolist()]
    tokens = [0, 1, 49151, 151935, 262143]
    for purpose in (0, 1, 7):
        array = np.array(seeds, np.int64)
        key = lane_keys(words(array & WORD), words(array >> 32), words(positions), purpose)
        got = noise_bits(key, words(tokens)).numpy().view(np.uint32)
        want = [[noise32(s, p, purpose, t) for t in tokens] for s, p in zip(seeds, positions, strict=True)]
        assert got.tolist() == want


def test_noise_of_chosen_tokens_is_the_noise_of_the_whole_vocabulary():
    key = lane_keys(words([3, 4]), words([0, 9]), words([5, 6]), PURPOSE_TOKEN)
    whole = gumbel_cost(key, torch.arange(1000, dtype=torch.int32))
    ids = torch.tensor([[999, 0, 17], [4, 4, 500]], dtype=torch.int32)
    assert torch.equal(gumbel_cost(key, ids), whole.gather(1, ids.long()))


def test_uniform_numbers_never_are_zero_or_one_and_their_cost_is_finite():
    extremes = words([0, -1, 2**31 - 1, -(2**31), 255, 256])
    numbers = uniform(extremes)
    assert ((numbers > 0) & (numbers < 1)).all()
    assert numbers.log().neg().log().isfinite().all()


def test_noise_is_uniform_over_tokens_seeds_and_positions():
    samples = (
        draws(range(8), [11] * 8, tokens=49152),
        draws(range(100_000), [0] * 100_000),
        draws([5] * 100_000, range(100_000)),
        draws([i << 32 for i in range(100_000)], [0] * 100_000),
    )
    for numbers in samples:
        counts = np.histogram(numbers, bins=256, range=(0, 1))[0]
        assert chi_square_is_plausible(counts, np.full(256, numbers.size / 256))


def joint_is_uniform(a: np.ndarray, b: np.ndarray) -> bool:
    counts = np.histogram2d(a.ravel(), b.ravel(), bins=16, range=[(0, 1), (0, 1)])[0].ravel()
    return chi_square_is_plausible(counts, np.full(256, a.size / 256))


def test_neighbours_in_seed_position_purpose_and_token_are_independent():
    count = 60_000
    base = draws(range(count), [9] * count)
    assert joint_is_uniform(base[:-1], base[1:])
    assert joint_is_uniform(base, draws(range(count), [10] * count))
    assert joint_is_uniform(base, draws(range(count), [9] * count, purpose=1))
    assert joint_is_uniform(base, draws([i + (1 << 32) for i in range(count)], [9] * count))
    by_position = draws([1] * count, range(count))
    assert joint_is_uniform(by_position[:-1], by_position[1:])
    assert joint_is_uniform(by_position, draws([2] * count, range(count)))
    by_token = draws(range(8), range(8), tokens=20_000)
    assert joint_is_uniform(by_token[:, :-1], by_token[:, 1:])
    assert joint_is_uniform(by_token[:-1], by_token[1:])


def test_no_two_of_many_lane_keys_are_equal():
    seeds = np.repeat(np.arange(500), 200)
    key = lane_keys(words(seeds), words(seeds * 0), words(np.tile(np.arange(200), 500)), PURPOSE_TOKEN)
    joined = (key[0].long() << 32) | (key[1].long() & WORD)
    assert len(joined.unique()) == 100_000


def test_cost_is_exponentially_distributed():
    key = lane_keys(words(range(4)), words([0] * 4), words([0] * 4), PURPOSE_TOKEN)
    cost = gumbel_cost(key, torch.arange(50_000, dtype=torch.int32)).double()
    assert abs(cost.mean() - 1) < 0.01
    edges = [-math.log(1 - i / 100) for i in range(100)] + [math.inf]
    counts = np.histogram(cost.numpy(), bins=edges)[0]
    assert chi_square_is_plausible(counts, np.full(100, cost.numel() / 100))
