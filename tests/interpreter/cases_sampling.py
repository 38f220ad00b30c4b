"""Sampling kernels in Triton's interpreter."""

import pytest
import torch

from slipstream.kernels.greedy import choose_greedy, choose_greedy_reference


@pytest.mark.parametrize("run", [choose_greedy, choose_greedy_reference])
@pytest.mark.parametrize("lanes,vocab", [(1, 50), (5, 4096), (4, 9001)])
def test_the_first_of_the_highest_logits_is_chosen(run, lanes, vocab):
    torch.manual_seed(vocab)
    logits = torch.randn(lanes, vocab + 3)[:, :vocab]
    place = torch.randint(0, vocab, (lanes, 2))
    logits.scatter_(1, place, 9.0)
    token, ok = run(logits)
    assert token.dtype == torch.int32
    assert token.tolist() == place.amin(1).tolist()
    assert ok.all()


@pytest.mark.parametrize("run", [choose_greedy, choose_greedy_reference])
def test_a_row_that_is_not_finite_is_refused_and_gives_an_id(run):
    logits = torch.zeros(5, 6000)
    for row, value in enumerate((float("nan"), float("inf"), float("-inf"))):
        logits[row, 5000 + row] = value
    logits[3, 5999] = 1.0
    logits[4, :2] = torch.tensor([float("inf"), float("-inf")])
    token, ok = run(logits)
    assert token.tolist() == [0, 0, 0, 5999, 0]
    assert ok.tolist() == [False, False, False, True, False]
