"""Engines whose drafters have weights say what they say without, in pools where rows preempt each other; and
a draft model that is the model itself is right nearly always, for greedy rows and for rows that draw."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from drafter_reference import make_drafters
from drafters import FixedDrafting
from harness import Collected, make_core, make_request, run

from slipstream.contracts.outputs import EngineStats
from slipstream.contracts.sampling_params import SamplingParams

DRAFTS, COUNT = 3, 8


@pytest.fixture(scope="module")
def target(tiny_model) -> Path:
    return tiny_model("llama", num_hidden_layers=4, rms_norm_eps=1e-5)


@pytest.fixture(scope="module")
def drafters(target: Path, tmp_path_factory) -> dict[str, Path]:
    """A folder for each method, of random weights."""
    return {**make_drafters(tmp_path_factory.mktemp("drafters"), DRAFTS), "draft_model": target}


def texts(
    target: Path, draft: dict[str, object] | None, tight: bool
) -> tuple[dict[int, Collected], EngineStats]:
    pool = dict(num_gpu_blocks_override=23, block_size=4) if tight else {}
    core = make_core(target, max_num_seqs=6, max_num_batched_tokens=48, speculative_config=draft, **pool)
    if draft:
        core.scheduler._drafting = FixedDrafting(DRAFTS)
    random, requests = np.random.default_rng(0), []
    for key in range(COUNT):
        params = SamplingParams(
            max_tokens=int(random.integers(6, 20)), temperature=key % 2 * 0.9, ignore_eos=True,
            top_p=0.9 if key % 3 == 2 else 1.0,
        )
        prompt = random.integers(3, 250, int(random.integers(2, 60))).tolist()
        requests.append(make_request(core, key, prompt, params, seed=key))
    found, stats = run(core, requests), core.scheduler.stats()
    core.close()
    return found, stats


@pytest.fixture(scope="module")
def plain(target: Path) -> dict[int, Collected]:
    return texts(target, None, False)[0]


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3", "medusa", "mlp_speculator"])
def test_no_text_is_changed_by_drafts(method, target, drafters, plain):
    tight = method == "eagle3"
    config = {"method": method, "model": str(drafters[method]), "num_speculative_tokens": DRAFTS}
    found, stats = texts(target, config, tight)
    for key, expected in plain.items():
        assert (found[key].tokens, found[key].finish) == (expected.tokens, expected.finish), f"request {key}"
    assert stats.draft_tokens > COUNT * DRAFTS
    assert (stats.preemptions > 0) == tight
    if method == "draft_model":
        # What top_p cuts off is not cut from drafts, so a few of those that draw differ.
        assert stats.accepted_tokens > 0.9 * stats.draft_tokens
