"""float32 logprobs of the whole engine against transformers: whole prefill, chunks of seven, decode, after a
prefix hit, after preemption, and beyond the sliding window."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import DEVICE, Collected, make_core, make_request, run
from tiny_models import FAMILIES, ROPES
from transformers import AutoModelForCausalLM

from slipstream.contracts.sampling_params import SamplingParams

TOLERANCE = 1e-4 if DEVICE == "cpu" else 2e-4
PROMPT, DECODE = 70, 66


def prompt_of(seed: int, vocab_size: int, length: int = PROMPT) -> list[int]:
    return torch.randint(3, vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


class Reference:
    """transformers' logprobs of a whole sequence."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )

    @torch.inference_mode()
    def check(self, prompt: list[int], got: Collected) -> int:
        """Compares every logprob that came back, prompt's and decoded ones; returns the count of
        positions."""
        sequence = torch.tensor([prompt + got.tokens])
        logprob_TV = self.model(sequence).logits[0].log_softmax(-1)
        scored = dict(got.prompt_logprobs)
        scored |= {len(prompt) + i: entry for i, entry in enumerate(got.logprobs)}
        for position, entry in scored.items():
            assert int(sequence[0, position]) in entry
            for token, value in entry.items():
                assert abs(value - float(logprob_TV[position - 1, token])) < TOLERANCE, (position, token)
        return len(scored)


def ask(core, key, prompt, max_tokens=DECODE, prompt_logprobs=2):
    params = SamplingParams(
        max_tokens=max_tokens, ignore_eos=True, temperature=0.0, logprobs=2, prompt_logprobs=prompt_logprobs
    )
    return make_request(core, key, prompt, params)


def check_all_paths(folder: Path, vocab_size: int, blocks_for_two: int) -> None:
    reference = Reference(folder)
    prompts = [prompt_of(seed, vocab_size) for seed in (1, 2)]
    for budget in (512, 7):  # whole prefill; chunks of seven; then decode
        core = make_core(folder, max_num_batched_tokens=budget, max_num_seqs=4)
        got = run(core, [ask(core, 0, prompts[0])])[0]
        assert reference.check(prompts[0], got) == PROMPT - 1 + DECODE
        core.close()
    core = make_core(folder)
    run(core, [ask(core, 0, prompts[0], prompt_logprobs=None)])
    got = run(core, [ask(core, 1, prompts[0], prompt_logprobs=None)])[1]
    assert got.num_cached == PROMPT // 16 * 16
    assert reference.check(prompts[0], got) == DECODE
    core.close()
    core = make_core(folder, num_gpu_blocks_override=blocks_for_two)
    got = run(core, [ask(core, i, p, prompt_logprobs=2 * i) for i, p in enumerate(prompts)])
    assert core.scheduler.stats().preemptions > 0
    for i, prompt in enumerate(prompts):
        assert reference.check(prompt, got[i]) == PROMPT - 1 + DECODE
    core.close()


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_and_rope_scaling_agrees_on_every_path(tiny_model, family, rope):
    check_all_paths(tiny_model(family, rope=rope), 256, blocks_for_two=15)


@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_positions_beyond_the_sliding_window_agree(tiny_model, family):
    window = dict(sliding_window=24) | (
        dict(use_sliding_window=True, max_window_layers=1) if family == "qwen2" else {}
    )
    check_all_paths(tiny_model(family, **window), 256, blocks_for_two=15)


def test_the_real_model_agrees_on_every_path(demo_model):
    check_all_paths(demo_model.folder, 49152, blocks_for_two=15)
