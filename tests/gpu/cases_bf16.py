"""bfloat16 on a CUDA device: no farther from float32 than transformers' own bfloat16, by KL divergence.

    PYTHONPATH=tests:tests/engine SLIPSTREAM_TEST_DEVICE=cuda python -m pytest tests/gpu/cases_bf16.py
"""

from __future__ import annotations

import pytest
import torch
from harness import make_core, make_request, run
from tiny_models import FAMILIES
from transformers import AutoModelForCausalLM

from slipstream.contracts.sampling_params import SamplingParams

LENGTH = 96


@torch.inference_mode()
def reference(folder, dtype, tokens):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").cuda()
    return model(torch.tensor([tokens]).cuda()).logits[0, :-1].double().log_softmax(-1).cpu()


def ours(folder, vocab_size, tokens):
    """Log-probabilities of every token at positions 1 and on."""
    core = make_core(folder, dtype="bfloat16", max_logprobs=-1, max_num_seqs=4)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=-1)
    got = run(core, [make_request(core, 0, tokens, params)])[0]
    core.close()
    out = torch.empty(len(tokens) - 1, vocab_size, dtype=torch.float64)
    for position, entry in got.prompt_logprobs.items():
        out[position - 1, list(entry)] = torch.tensor(list(entry.values()), dtype=torch.float64)
    return out


def divergence(exact, other):
    return float((exact.exp() * (exact - other)).sum(-1).mean())


def check(folder, vocab_size):
    draw = torch.Generator().manual_seed(7)
    tokens = torch.randint(3, vocab_size, (LENGTH,), generator=draw).tolist()
    exact = reference(folder, torch.float32, tokens)
    theirs = divergence(exact, reference(folder, torch.bfloat16, tokens))
    mine = divergence(exact, ours(folder, vocab_size, tokens))
    print(f"KL: ours {mine:.3e}, transformers' {theirs:.3e}")
    assert mine <= theirs


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models_are_no_farther_from_float32_than_in_transformers(tiny_model, family):
    check(tiny_model(family), 256)


def test_the_real_model_is_no_farther_from_float32_than_in_transformers(demo_model):
    check(demo_model.folder, 49152)
