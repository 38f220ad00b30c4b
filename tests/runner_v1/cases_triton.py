"""The old runner on Triton's attention and fused layers, by Triton's interpreter, against torch's."""

import numpy as np
import pytest
from drafters import FixedDrafting
from harness import make_core, make_request, run
from tiny_models import make_tiny_model

from slipstream.contracts.sampling_params import SamplingParams


@pytest.mark.parametrize("method", ["none", "ngram", "draft_model"])
def test_tritons_attention_gives_the_tokens_of_torchs(tmp_path, method):
    model = make_tiny_model(tmp_path, "qwen3")
    rng = np.random.default_rng(2)
    prompts = [rng.integers(3, 250, n).tolist() for n in (1, 30, 12)]
    drafts = None
    if method != "none":
        drafts = {"method": method, "num_speculative_tokens": 3}
        drafts |= {"model": str(model)} if method == "draft_model" else {"prompt_lookup_min": 1}
    kinds = (dict(temperature=0.0), dict(temperature=0.9, logprobs=2), dict(top_k=9, prompt_logprobs=1))
    small = dict(max_num_seqs=2, max_model_len=64, num_gpu_blocks_override=24, block_size=4)
    results = []
    for backend in ("triton", "torch"):
        core = make_core(
            model, model_runner="v1", attention_backend=backend, max_num_batched_tokens=20,
            speculative_config=drafts, **small,
        )  # fmt: skip
        if drafts is not None:
            core.scheduler._drafting = FixedDrafting(3)
        assert core._executor.runner.runner._attention.name == backend
        requests = [
            make_request(core, key, prompt, SamplingParams(max_tokens=6, ignore_eos=True, **kind), key)
            for key, (prompt, kind) in enumerate(zip(prompts, kinds, strict=True))
        ]
        results.append(run(core, requests))
        assert (core.scheduler.stats().draft_tokens > 0) == (drafts is not None)
        core.close()
    for key, mine in results[0].items():
        theirs = results[1][key]
        assert (len(mine.tokens), mine.tokens, mine.finish) == (6, theirs.tokens, theirs.finish)
        for one, other in zip(mine.logprobs, theirs.logprobs, strict=True):
            assert one.keys() == other.keys()
            np.testing.assert_allclose(list(one.values()), list(other.values()), atol=1e-4)
