"""What holds of every drafting method: steps are submitted ahead, a seed is a text, and sampled tokens have
the model's distribution.

A few texts of each method in the suite, 15,000 draws; SLIPSTREAM_TEST_DRAWS=full takes 51,000.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from chi_square import count_texts, distribution, p_value
from drafter_reference import make_drafters
from drafters import FixedDrafting
from harness import make_core, make_request, run
from tiny_models import make_tiny_model

from slipstream.contracts.sampling_params import SamplingParams
from slipstream.observe.trace import steps_ahead

DRAFTS = 3
METHODS = {
    "ngram": {"prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "suffix": {"suffix_decoding_max_cached_requests": 50},
    **{name: {} for name in ("draft_model", "eagle", "eagle3", "medusa", "mlp_speculator")},
}
OPTIONS = {"num_hidden_layers": 4, "rms_norm_eps": 1e-5, "max_position_embeddings": 1024}
# Distributions: texts of four tokens over eight, the first of which the prompt gives.
FEW, PROMPT = 8, [3, 6, 5]
TEXTS = 17_000 if os.environ.get("SLIPSTREAM_TEST_DRAWS") == "full" else 5_000


class Place:
    """A model, and a drafter for each method that has weights."""

    def __init__(self, folder: Path, vocab: int, **options: object) -> None:
        self.model = make_tiny_model(folder / "model", "llama", vocab_size=vocab, **OPTIONS, **options)
        self.folders = {**make_drafters(folder, DRAFTS, vocab), "draft_model": self.model}

    def core(self, method: str, **args: object):
        config = {"method": method, "num_speculative_tokens": DRAFTS, **METHODS[method]}
        if method in self.folders:
            config["model"] = str(self.folders[method])
        return make_core(self.model, speculative_config=config, **args)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    return Place(tmp_path_factory.mktemp("methods"), 256)


@pytest.mark.parametrize("method", METHODS)
def test_the_next_step_is_submitted_before_a_result_is_read(place, method, tmp_path) -> None:
    """Where drafts are nearly all right, texts are so long that they leave steps enough."""
    pool = {"max_model_len": 1024, "num_gpu_blocks_override": 600, "block_size": 16}
    core = place.core(method, trace=str(tmp_path / "trace.json"), **pool)
    random = np.random.default_rng(3)
    tokens = 900 if method == "draft_model" else 250
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.8)
    prompts = [random.integers(3, 250, 20).tolist() for _ in range(8)]
    run(core, [make_request(core, key, prompt, params) for key, prompt in enumerate(prompts)])
    plan = core.info.plan
    core.close()
    assert (plan["model_runner"]["value"], plan["async_scheduling"]["value"]) == ("v2", True)
    ahead, steady = steps_ahead(json.loads((tmp_path / "trace.json").read_text())["traceEvents"])
    assert steady >= 200 and ahead >= 0.99 * steady


@pytest.fixture(scope="module")
def texts(place) -> list[list[int]]:
    """Of 32 seeded requests without drafts, each alone."""
    core = make_core(place.model, max_num_seqs=1)
    found = run(core, seeded(core, range(32)))
    core.close()
    return [found[key].tokens for key in range(32)]


def seeded(core, keys):
    params = SamplingParams(max_tokens=20, temperature=0.9, ignore_eos=True)
    random = np.random.default_rng(5)
    prompts = [random.integers(3, 250, 4 + key).tolist() for key in range(32)]
    return [make_request(core, key, prompts[key], params, seed=1000 + key) for key in keys]


@pytest.mark.parametrize("method", METHODS)
def test_a_seed_is_a_text_alone_in_a_batch_and_after_preemption(place, texts, method) -> None:
    for seats, pool in ((1, {}), (32, {}), (32, {"num_gpu_blocks_override": 60, "block_size": 4})):
        core = place.core(method, max_num_seqs=seats, max_num_batched_tokens=256, **pool)
        core.scheduler._drafting = FixedDrafting(DRAFTS)
        keys = range(32) if seats > 1 else (0, 17)
        found, stats = run(core, seeded(core, keys)), core.scheduler.stats()
        core.close()
        assert [found[key].tokens for key in keys] == [texts[key] for key in keys]
        assert (stats.preemptions > 0) == bool(pool) and stats.draft_tokens > 0


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> tuple[Place, np.ndarray]:
    """A vocabulary of few tokens, and the distribution of texts."""
    place = Place(tmp_path_factory.mktemp("small"), FEW, initializer_range=0.1)
    return place, distribution(place.model, PROMPT, FEW)


@pytest.mark.parametrize("method", METHODS)
def test_sampled_tokens_have_the_models_distribution(small, method) -> None:
    place, probability = small
    core = place.core(
        method, max_num_seqs=256, max_model_len=32, max_num_batched_tokens=2048, num_gpu_blocks_override=600
    )
    core.scheduler._drafting = FixedDrafting(DRAFTS)
    params = SamplingParams(max_tokens=4, temperature=1.0, ignore_eos=True)
    found = run(core, [make_request(core, key, PROMPT, params, 7919 * key + 1) for key in range(TEXTS)])
    stats = core.scheduler.stats()
    core.close()
    assert stats.draft_tokens > TEXTS // 10 and stats.accepted_tokens > TEXTS // 50
    counts = count_texts([found[key].tokens for key in range(TEXTS)], FEW)
    assert p_value(counts, probability) > 0.001
