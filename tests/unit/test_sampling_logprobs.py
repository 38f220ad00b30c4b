"""Raw log-probabilities against torch's float64 log_softmax."""

import numpy as np
import pytest
import torch

from slipstream.kernels.candidates import first_argmax, top_candidates
from slipstream.kernels.logprobs import token_logprobs


def tied_logits(rows: int, vocab: int) -> torch.Tensor:
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * 6
    logits[::2] = logits[::2].round()
    return logits


@pytest.mark.parametrize("vocab", [1, 7, 32, 1000, 49152])
@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_logprobs_agree_with_log_softmax(vocab, num_top):
    logits = tied_logits(11, vocab)
    token = torch.randint(vocab, (11,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    ids, values, rank = token_logprobs(logits, token, num_top)
    want = logits.double().log_softmax(1)
    assert ids.dtype == rank.dtype == torch.int32
    assert torch.equal(ids[:, 0], token)
    assert torch.allclose(values.double(), want.gather(1, ids.long()), rtol=0, atol=2e-6)
    own = logits.gather(1, token[:, None].long())
    assert rank.tolist() == (1 + (logits > own).sum(1)).tolist()
    # By value, then by id.
    order = np.stack([np.lexsort((np.arange(vocab), -line)) for line in logits.double().numpy()])
    assert np.array_equal(ids[:, 1:].numpy(), order[:, :num_top])


def test_the_whole_vocabulary_can_be_asked_for():
    logits = tied_logits(3, 777)
    ids, values, _ = token_logprobs(logits, torch.tensor([1, 2, 3]), 777)
    assert ids.shape == (3, 778)
    assert torch.equal(ids[:, 1:].sort(1).values, torch.arange(777, dtype=torch.int32).expand(3, 777))
    assert torch.allclose(values[:, 1:].double().exp().sum(1), torch.ones(3, dtype=torch.float64), atol=1e-5)


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[1e4, 1e4 - 1, -1e4]])
    _, values, rank = token_logprobs(logits, torch.tensor([1]), 2)
    assert torch.allclose(values, torch.tensor([[-1.3132617, -0.3132617, -1.3132617]]), atol=1e-5)
    assert rank.tolist() == [2]


@pytest.mark.parametrize("vocab", [1, 33, 4096, 5001])
def test_candidates_and_argmax_prefer_the_lowest_id_of_equals(vocab):
    logits = tied_logits(9, vocab)
    logits[3] = -torch.inf
    order = np.stack([np.lexsort((np.arange(vocab), -line)) for line in logits.double().numpy()])
    for count in (1, 10, 128, vocab + 5):
        values, ids = top_candidates(logits, count)
        assert np.array_equal(ids.numpy(), order[:, :count])
        assert torch.equal(values, logits.gather(1, ids))
    best, first = first_argmax(logits)
    assert first.tolist() == order[:, 0].tolist()
    assert torch.equal(best, logits.amax(1))
