"""Bucketed steps with drafts on Triton's kernels, run by its interpreter, against plain eager steps."""

import dataclasses

import numpy as np
import pytest
import torch
from drafting import UNEVEN, DraftEngine, TableDrafter, draft_plan
from harness import make_core, make_request, run
from tiny_models import make_tiny_model

from slipstream.contracts.sampling_params import SamplingParams
from slipstream.rows.stream import CpuStream
from slipstream.runner.build import make_bucketed, make_parts
from slipstream.runner.memory import MemoryPlan

BLOCKS = 60
SIZES = dict(max_num_seqs=2, max_model_len=64, num_gpu_blocks_override=BLOCKS, block_size=4)
KINDS = (
    dict(temperature=0.0, logprobs=2),
    dict(temperature=0.9, seed=3),
    dict(temperature=0.0, repetition_penalty=1.4, prompt_logprobs=1, min_tokens=3),
)


def build_interpreted(plan, drafter_of):
    """As build_runner does for CUDA, without measuring memory and without graphs."""
    stream = CpuStream()
    plan = dataclasses.replace(
        plan, attention_backend="triton", graph_sizes=(1, 2), token_buckets=(8, 24, 40)
    )

    def build():
        parts = make_parts(plan, torch.device("cpu"), drafter_of)
        made = make_bucketed(parts)
        made.attention.allocate(BLOCKS)
        return parts, made

    parts, made = stream.submit(build).wait()
    memory = MemoryPlan(weights=0, activations=0, graphs=0, kv=0, other=0, num_blocks=BLOCKS, allowed=0)
    return parts.built(parts.runner(made.tick, stream), memory)


@pytest.mark.parametrize("uneven", [False, True])
def test_bucketed_steps_with_drafts_give_the_tokens_of_plain_ones(tmp_path, uneven):
    """uneven: one row has all its drafts and the others none, in steps with room for half of that."""
    model, most = make_tiny_model(tmp_path, "mistral", sliding_window=9), 2
    rng = np.random.default_rng(2)
    prompts = [rng.integers(3, 250, n).tolist() for n in (1, 30, 7)]

    def requests(core):
        return [
            make_request(core, key, prompt, SamplingParams(max_tokens=5, ignore_eos=True, **kind), key)
            for key, (prompt, kind) in enumerate(zip(prompts, KINDS, strict=True))
        ]

    core = make_core(model, **SIZES, max_num_batched_tokens=40)
    asked = requests(core)
    plain = run(core, asked, {1: 2, 2: 5})
    core.close()
    texts = [prompt + plain[key].tokens for key, prompt in enumerate(prompts)]
    counts = (lambda length: (length % 2 == 0) * most) if uneven else None
    drafter = TableDrafter(texts, most, 256, wrong=3, counts=counts)
    more = dict(speculation=UNEVEN) if uneven else {}
    plan = draft_plan(model, most, max_num_batched_tokens=40, **SIZES, **more)
    limits = (most, 1, 0, most)
    engine = DraftEngine(plan, drafter, build=build_interpreted, limit=lambda step: limits[step % 4])
    drafted = engine.run(asked, {1: 2, 2: 5})
    engine.close()
    verified, taken = engine.verified_and_taken()
    assert 0 < taken < verified
    for key, expected in plain.items():
        got = drafted[key]
        assert (got.tokens, got.finish) == (expected.tokens, expected.finish), KINDS[key]
        for mine, theirs in zip(got.logprobs, expected.logprobs, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-4)
        for position, theirs in expected.prompt_logprobs.items():
            assert got.prompt_logprobs[position] == pytest.approx(theirs, abs=1e-4)
