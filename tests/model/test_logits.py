"""Logprobs against transformers in float32: every family and RoPE scaling, whole prefill and decode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from dense_attention import DenseAttend
from tiny_models import FAMILIES, ROPES
from transformers import AutoModelForCausalLM

from slipstream.loading import load_model, read_spec
from slipstream.models.base import Model

Tensor = torch.Tensor
CPU = torch.device("cpu")
TOLERANCE = 1e-4


def ours(folder: Path, dtype: torch.dtype = torch.float32) -> Model:
    return load_model(folder, read_spec(folder), dtype=dtype, device=CPU)


def theirs(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def run(model: Model, tokens_T: Tensor, cuts: list[int]) -> Tensor:
    """Logprobs [T, V] of one sequence fed in pieces that end at cuts."""
    attend, pieces, begin = DenseAttend(model.attention), [], 0
    with torch.inference_mode():
        for end in cuts:
            hidden = model.forward(tokens_T[begin:end], torch.arange(begin, end), attend)
            pieces.append(model.logits(hidden))
            begin = end
    return torch.cat(pieces).log_softmax(-1)


def reference(folder: Path, tokens_T: Tensor, cuts: list[int]) -> Tensor:
    """The same through transformers, with its cache."""
    model, cache, pieces, begin = theirs(folder), None, [], 0
    with torch.inference_mode():
        for end in cuts:
            out = model(tokens_T[None, begin:end], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            pieces.append(out.logits[0])
            begin = end
    return torch.cat(pieces).log_softmax(-1)


def tokens(count: int, vocab_size: int = 256) -> Tensor:
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(7))


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < TOLERANCE
    assert expected.std() > 0.5, "flat logits would agree whatever the model does"


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_whole_prefill_and_decode_agree_with_transformers(
    tiny_model: Callable[..., Path], family: str, rope: str
) -> None:
    folder = tiny_model(family, rope=rope)
    model, tokens_T = ours(folder), tokens(96)
    expected = reference(folder, tokens_T, [96])
    assert_same(run(model, tokens_T, [96]), expected)
    assert_same(run(model, tokens_T, list(range(1, 97))), expected)
    assert_same(run(model, tokens_T, [*range(7, 96, 7), 96]), expected)
