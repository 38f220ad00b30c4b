"""Whether sampled texts have a model's distribution: what it is, by transformers, and Pearson's test."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import torch


def distribution(folder: Path, prompt: list[int], vocab: int) -> np.ndarray:
    """The probability of each continuation of four tokens, of which the first is summed over, in float64."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    texts = torch.tensor([[*prompt, *rest] for rest in itertools.product(range(vocab), repeat=3)])
    with torch.no_grad():
        p_XTV = reference(texts).logits.softmax(-1)[:, len(prompt) - 1 :]
    joint = p_XTV[:, 3]
    for place in range(3):
        joint = joint * p_XTV[:, place].gather(1, texts[:, len(prompt) + place, None])
    probability = joint.view(vocab, vocab, vocab, vocab).sum(0).flatten().numpy()
    assert abs(probability.sum() - 1) < 1e-6
    return probability


def count_texts(texts: list[list[int]], vocab: int) -> np.ndarray:
    """How often each second to fourth token came, in distribution's order."""
    second, third, fourth = np.array(texts).T[1:]
    return np.bincount((second * vocab + third) * vocab + fourth, minlength=vocab**3)


def p_value(counts: np.ndarray, probability: np.ndarray) -> float:
    """Pearson's test; cells that expect less than five are one."""
    expected = counts.sum() * probability
    large = expected >= 5
    expected = np.append(expected[large], expected[~large].sum())
    seen = np.append(counts[large], counts[~large].sum())
    statistic = float(((seen - expected) ** 2 / expected).sum())
    halves = torch.tensor([(len(seen) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))
