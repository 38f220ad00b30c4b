"""allowed_token_ids, logit_bias, min_tokens, bad_words: what becomes impossible, and what is left alone."""

import numpy as np
import pytest
import torch
from sampling_rows import apply_features, make_row

from slipstream.contracts.limits import MAX_BAD_WORD_TOKENS, MAX_LOGIT_BIAS
from slipstream.sampling.allowed_token_ids import AllowedTokenIds
from slipstream.sampling.bad_words import BadWords
from slipstream.sampling.logit_bias import LogitBias
from slipstream.sampling.min_tokens import MinTokens

NEVER = -np.inf


def random_logits(lanes: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(lanes, vocab, generator=torch.Generator().manual_seed(seed)) * 4


@pytest.mark.parametrize("vocab", [5, 32, 33, 97, 1000])
def test_only_allowed_tokens_keep_their_logits(vocab):
    rng = np.random.default_rng(vocab)
    allowed = [sorted(rng.choice(vocab, size, replace=False).tolist()) for size in (1, vocab // 2 + 1, vocab)]
    rows = [make_row(), *(make_row(allowed_token_ids=ids) for ids in allowed)]
    logits = random_logits(len(rows), vocab)
    got = apply_features([AllowedTokenIds(vocab)], rows, logits)
    want = logits.numpy().copy()
    for lane, ids in enumerate(allowed, start=1):
        want[lane, np.setdiff1d(np.arange(vocab), ids)] = NEVER
    assert np.array_equal(got.numpy(), want)


def test_a_bias_is_added_to_its_tokens_and_to_no_other():
    biases = [{0: 2.5}, {}, {7: -100.0, 3: 1e-3, 99: 100.0}, {i: i / 8 for i in range(100)}]
    rows = [make_row(logit_bias=bias) for bias in biases]
    logits = random_logits(4, 100)
    want = logits.double().numpy().copy()
    for lane, bias in enumerate(biases):
        for token, value in bias.items():
            want[lane, token] += value
    assert np.allclose(apply_features([LogitBias()], rows, logits).numpy(), want, rtol=1e-6, atol=1e-6)


def test_a_bias_may_have_as_many_entries_as_the_table_of_limits_allows():
    bias = {i: float(i % 7) for i in range(MAX_LOGIT_BIAS)}
    logits = random_logits(1, MAX_LOGIT_BIAS + 10)
    change = apply_features([LogitBias()], [make_row(logit_bias=bias)], logits) - logits
    want = [bias.get(i, 0.0) for i in range(MAX_LOGIT_BIAS + 10)]
    assert np.allclose(change.numpy(), [want], atol=1e-5)


@pytest.mark.parametrize("produced", [0, 1, 2, 3, 4])
def test_end_ids_are_impossible_until_the_output_has_min_tokens(produced):
    rows = [
        make_row(output=[5] * produced, min_tokens=3, end_ids=(0, 9)),
        make_row(output=[5] * produced, min_tokens=0, end_ids=(0, 9)),
        make_row(output=[5] * produced, min_tokens=3, end_ids=()),
    ]
    logits = random_logits(3, 12)
    want = logits.numpy().copy()
    if produced < 3:
        want[0, [0, 9]] = NEVER
    assert np.array_equal(apply_features([MinTokens()], rows, logits).numpy(), want)


def banned_by(word: tuple[int, ...], tokens: list[int]) -> bool:
    """The rule in plain Python: the row ends with all of the word but its last token."""
    prefix = list(word[:-1])
    return not prefix or (tokens[-len(prefix) :] == prefix and len(tokens) >= len(prefix))


def test_a_bad_word_is_banned_exactly_where_the_row_ends_with_its_beginning():
    rng = np.random.default_rng(3)
    rows, vocab = [], 6  # so few tokens that words often match
    for _ in range(200):
        words = tuple(
            tuple(rng.integers(0, vocab, rng.integers(1, 5)).tolist()) for _ in range(rng.integers(1, 6))
        )
        prompt = rng.integers(0, vocab, rng.integers(1, 4)).tolist()
        output = rng.integers(0, vocab, rng.integers(0, 6)).tolist()
        rows.append(make_row(prompt, output, bad_words=words))
    logits = random_logits(len(rows), vocab)
    want, banned = logits.numpy().copy(), 0
    for lane, row in enumerate(rows):
        for word in row.bad_words:
            if banned_by(word, row.tokens):
                want[lane, word[-1]] = NEVER
                banned += len(word) > 1
    assert banned > 20
    assert np.array_equal(apply_features([BadWords()], rows, logits).numpy(), want)


def test_a_bad_word_may_begin_in_the_prompt_and_end_in_the_output():
    row = make_row(prompt=[4, 8], output=[15], bad_words=((8, 15, 16), (23, 15, 11)))
    logits = random_logits(1, 30)
    got = apply_features([BadWords()], [row], logits)[0]
    assert got[16] == NEVER
    assert got[11] == logits[0, 11]


def test_a_bad_word_longer_than_the_row_does_not_match():
    row = make_row(prompt=[2], bad_words=((2, 2, 5), (1, 2, 6)))
    logits = random_logits(1, 10)
    assert torch.equal(apply_features([BadWords()], [row], logits), logits)


def test_bad_words_may_have_as_many_tokens_as_the_table_of_limits_allows():
    words = tuple((1, 10 + i) for i in range(MAX_BAD_WORD_TOKENS // 2))
    logits = random_logits(1, 10 + len(words) + 5)
    got = apply_features([BadWords()], [make_row(prompt=[3, 1], bad_words=words)], logits)[0]
    assert (got[10 : 10 + len(words)] == NEVER).all()
    assert torch.equal(got[:10], logits[0, :10])
    assert torch.equal(got[-5:], logits[0, -5:])
