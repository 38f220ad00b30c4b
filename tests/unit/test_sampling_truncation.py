"""temperature, min_p, top_k, top_p against float64 formulas, with ties, odd sizes and impossible tokens."""

import numpy as np
import pytest
import torch
from sampling_rows import apply_features, make_row, softmax64

from slipstream.kernels.truncate import keep_min_p, keep_top_k, keep_top_p
from slipstream.sampling.min_p import MinP
from slipstream.sampling.temperature import Temperature

VOCABS = [1, 2, 31, 64, 1000, 5003]


def cases(vocab: int, seed: int = 0) -> torch.Tensor:
    """Lanes of several kinds: peaked, flat, tied, nearly tied, half impossible, far from zero."""
    random = torch.randn(6, vocab, generator=torch.Generator().manual_seed(seed)) * 4
    random[1] *= 0.01
    random[2] = (random[2]).round()
    random[3] = 17 + random[3] * 1e-4
    random[4, : vocab // 2] = -torch.inf
    random[5] -= 12345.0
    return random


def kept(logits: torch.Tensor) -> np.ndarray:
    return (logits > -torch.inf).numpy()


@pytest.mark.parametrize("vocab", VOCABS)
def test_top_k_keeps_the_k_highest_and_those_equal_to_the_last(vocab):
    for k in {1, 2, 3, vocab // 3 + 1, vocab}:
        if k > vocab:
            continue
        logits = cases(vocab, k)
        want = logits.numpy() >= np.sort(logits.numpy(), 1)[:, -k][:, None]
        want &= kept(logits)
        keep_top_k(logits, torch.arange(6), torch.full((6,), k, dtype=torch.int32))
        # A token 32 nats below the highest is never drawn; it may stay or go.
        near = softmax64(logits.double().numpy().clip(-1e9)) > 2e-14
        assert np.array_equal(kept(logits)[near], want[near])
        assert not kept(logits)[~want].any()


def top_p_set(logits: np.ndarray, top_p: float) -> np.ndarray:
    """The plain definition: sort, add up, keep what begins before top_p; equals of the last one stay."""
    probability = softmax64(logits.astype(np.float64))
    order = np.argsort(-probability, kind="stable")
    before = np.cumsum(probability[order]) - probability[order]
    last = logits[order[np.flatnonzero(before < top_p)[-1]]]
    return (logits >= last) & (probability > 0)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.95, 0.999])
def test_top_p_keeps_the_smallest_set_that_reaches_it(vocab, top_p):
    logits = cases(vocab, int(1000 * top_p))
    want = np.stack([top_p_set(line, np.float32(top_p)) for line in logits.numpy()])
    keep_top_p(logits, torch.arange(6), torch.full((6,), top_p))
    assert np.array_equal(kept(logits), want)
    assert kept(logits).any(1).all()


def test_top_p_does_not_split_equal_logits():
    logits = torch.tensor([[2.0, 1.0, 2.0, 2.0, 0.0]])
    keep_top_p(logits, torch.arange(1), torch.tensor([0.3]))
    assert kept(logits).tolist() == [[True, False, True, True, False]]


@pytest.mark.parametrize("vocab", VOCABS)
def test_min_p_is_relative_to_the_highest_probability(vocab):
    for min_p in (1e-4, 0.05, 0.5, 1.0):
        logits = cases(vocab, 7)
        probability = softmax64(logits.double().numpy())
        want = probability >= np.float32(min_p) * probability.max(1, keepdims=True) * (1 - 1e-9)
        keep_min_p(logits, torch.arange(6), torch.full((6,), min_p))
        assert np.array_equal(kept(logits), want)


def test_min_p_is_taken_after_temperature():
    logits = torch.tensor([[0.0, -2.0]] * 2)
    rows = [make_row(temperature=1.0, min_p=0.2), make_row(temperature=4.0, min_p=0.2)]
    got = kept(apply_features([Temperature(), MinP()], rows, logits))
    assert got.tolist() == [[True, False], [True, True]]  # exp(-2) < 0.2 < exp(-0.5)


def test_temperature_divides_the_logits():
    temperatures = [0.1, 0.7, 1.0, 2.0, 1e4]
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(0)) * 5
    got = apply_features([Temperature()], [make_row(temperature=t) for t in temperatures], logits)
    want = softmax64(logits.double().numpy() / np.array(temperatures)[:, None])
    assert np.allclose(softmax64(got.double().numpy()), want, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("temperature", [1e-5, 1.1e-5, 1e-3, 1e4])
def test_extreme_temperatures_give_no_nan_and_keep_the_order(temperature):
    logits = torch.tensor([[30.0, -80.0, 29.999, 1e4], [-torch.inf, -3e30, 3.0, -5.0]])
    got = apply_features([Temperature()], [make_row(temperature=temperature)] * 2, logits)
    assert not got.isnan().any()
    assert got[0].argsort().tolist() == logits[0].argsort().tolist()
    assert got[1, 0] == -torch.inf
    assert (got <= 0).all()


@pytest.mark.parametrize(
    "truncate", [lambda x, n: keep_top_k(x, n, torch.full_like(n, 3).int()),
                 lambda x, n: keep_top_p(x, n, torch.full((len(n),), 0.7)),
                 lambda x, n: keep_min_p(x, n, torch.full((len(n),), 0.2))],
    ids=["top_k", "top_p", "min_p"],
)
def test_a_lane_of_nan_or_infinity_changes_no_other_lane(truncate):
    good = torch.randn(4, 200, generator=torch.Generator().manual_seed(2))
    mixed = good.clone()
    mixed[1, 7], mixed[3] = torch.nan, torch.inf
    truncate(good, torch.arange(4))
    truncate(mixed, torch.arange(4))
    assert torch.equal(good[[0, 2]], mixed[[0, 2]])
