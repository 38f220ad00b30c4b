"""Bucketed steps on Triton's kernels, run by its interpreter, against eager steps in torch operations."""

import dataclasses
import re

import numpy as np
import pytest
import torch
from harness import make_request, run
from text_model import BYTE_ZERO, VOCAB, write_tokenizer
from tiny_models import make_tiny_model

from slipstream.config.args import EngineArgs
from slipstream.contracts.sampling_params import SamplingParams
from slipstream.engine import core as core_module
from slipstream.engine.core import EngineCore
from slipstream.engine.plan import make_plan
from slipstream.rows.stream import CpuStream
from slipstream.runner.build import make_bucketed, make_parts
from slipstream.runner.memory import MemoryPlan

BLOCKS = 60


def build_interpreted(plan):
    """As build_runner does for CUDA, without measuring memory and without graphs."""
    stream = CpuStream()

    def build():
        parts = make_parts(plan, torch.device("cpu"))
        made = make_bucketed(parts)
        made.attention.allocate(BLOCKS)
        return parts, made

    parts, made = stream.submit(build).wait()
    memory = MemoryPlan(
        weights=0, activations=0, graphs=0, kv=0, other=0, num_blocks=BLOCKS, allowed=0
    )
    return parts.built(parts.runner(made.tick, stream), memory)


def make_core(model, monkeypatch, bucketed, **args):
    plan = make_plan(
        EngineArgs(
            model=str(model), device="cpu", dtype="float32", max_num_seqs=3, max_model_len=64,
            num_gpu_blocks_override=BLOCKS, max_num_batched_tokens=24, block_size=4, **args,
        )
    )
    if bucketed:
        buckets = dict(graph_sizes=(1, 2), token_buckets=(8, 24))
        plan = dataclasses.replace(plan, attention_backend="triton", **buckets)
        monkeypatch.setattr(core_module, "build_runner", build_interpreted)
    else:
        monkeypatch.undo()
    return EngineCore(plan)


KINDS = (
    dict(temperature=0.0, logprobs=2),
    dict(temperature=0.9, seed=3),
    dict(temperature=1.1, top_k=9, top_p=0.8),
    dict(temperature=0.0, repetition_penalty=1.4, prompt_logprobs=1),
    dict(temperature=1.0, allowed_token_ids=list(range(30, 56)), logit_bias={33: 2.0}),
)
# Beside the tokens allowed there, of which this one's digits are 0 to 4.
GRAMMARS = {len(KINDS) - 1: "start: /([!-&][0-9]){30}/"}


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_bucketed_steps_give_the_tokens_of_eager_ones(tmp_path, monkeypatch, family):
    more = dict(sliding_window=9) if family == "mistral" else {}
    model = write_tokenizer(make_tiny_model(tmp_path, family, vocab_size=VOCAB, **more))
    rng = np.random.default_rng(2)
    prompts = [rng.integers(3, 250, n).tolist() for n in (1, 30, 7, 12, 26)]
    results = []
    for bucketed in (False, True):
        core = make_core(model, monkeypatch, bucketed)
        requests = [
            make_request(
                core, key, prompt, SamplingParams(max_tokens=5, ignore_eos=True, **kind), key,
                grammar=GRAMMARS.get(key, ""),
            )
            for key, (prompt, kind) in enumerate(zip(prompts, KINDS, strict=True))
        ]
        results.append(run(core, requests, {3: 2, 4: 5}))
        core.close()
    said = bytes(token - BYTE_ZERO for token in results[0][len(KINDS) - 1].tokens)
    assert re.fullmatch(b"([!-&][0-4]){2}[!-&]", said)
    for key, eager in results[0].items():
        got = results[1][key]
        assert (got.tokens, got.finish) == (eager.tokens, eager.finish), KINDS[key]
        for mine, theirs in zip(got.logprobs, eager.logprobs, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-4)
        for position, theirs in eager.prompt_logprobs.items():
            assert got.prompt_logprobs[position] == pytest.approx(theirs, abs=1e-4)
