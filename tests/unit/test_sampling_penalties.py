"""Repetition, frequency and presence penalties against a float64 formula."""

import numpy as np
import torch
from sampling_rows import MAX_MODEL_LEN, apply_features, make_row

from slipstream.kernels.lanes import LANES_AT_ONCE
from slipstream.sampling.penalties import Penalties


def penalised(logits: np.ndarray, row) -> np.ndarray:
    """vLLM's definition, a token at a time."""
    out, params = logits.astype(np.float64), row.params
    for token in set(row.tokens):
        out[token] = (
            out[token] / params.repetition_penalty
            if out[token] > 0
            else out[token] * params.repetition_penalty
        )
    for token in set(row.output):
        out[token] -= params.frequency_penalty * row.output.count(token) + params.presence_penalty
    return out


def test_penalties_agree_with_the_formula_on_random_rows():
    rng, vocab = np.random.default_rng(0), 40
    rows = []
    for _ in range(3 * LANES_AT_ONCE + 1):
        prompt = rng.integers(0, vocab, rng.integers(1, 20)).tolist()
        output = rng.integers(0, vocab, rng.integers(0, MAX_MODEL_LEN - 20)).tolist()
        rows.append(
            make_row(
                prompt,
                output,
                repetition_penalty=float(rng.choice([1.0, 0.7, 1.3])),
                frequency_penalty=float(rng.choice([0.0, -1.5, 0.4])),
                presence_penalty=float(rng.choice([0.0, 2.0, -0.3])),
            )
        )
    logits = torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(1)) * 3
    got = apply_features([Penalties()], rows, logits).numpy()
    want = np.stack([penalised(line, row) for line, row in zip(logits.numpy(), rows, strict=True)])
    assert np.allclose(got, want, rtol=1e-5, atol=1e-5)


def test_frequency_and_presence_do_not_look_at_the_prompt():
    row = make_row([5, 5, 6], [6, 7, 7], frequency_penalty=0.5, presence_penalty=0.25)
    got = apply_features([Penalties()], [row], torch.zeros(1, 10))[0].tolist()
    assert got == [0, 0, 0, 0, 0, 0, -0.75, -1.25, 0, 0]


def test_repetition_looks_at_prompt_and_output_and_depends_on_the_sign():
    row = make_row([1], [2], repetition_penalty=2.0)
    got = apply_features([Penalties()], [row], torch.tensor([[4.0, 4.0, -4.0, -4.0]]))[0].tolist()
    assert got == [4.0, 2.0, -8.0, -4.0]


def test_what_is_behind_the_end_of_the_row_counts_for_nothing():
    """The table of this test is full of rubbish there, far out of the vocabulary."""
    row = make_row([1], [2], presence_penalty=1.0)
    assert apply_features([Penalties()], [row], torch.zeros(1, 4))[0].tolist() == [0, 0, -1, 0]
