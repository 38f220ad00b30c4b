"""The old runner drafts with every kind of drafter: its texts are those of plain decoding, in a pool so tight
that requests preempt each other. Lookups on the host against cases worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafters import FixedDrafting, Truthful
from harness import Collected, make_core, run
from test_oracle import mixed

from slipstream.speculation.host_lookup import SuffixTree, ngram_drafts

COUNT = 60
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"prompt_lookup_min": 1, "prompt_lookup_max": 3, "num_speculative_tokens": 4},
    "suffix": {"suffix_decoding_max_cached_requests": 5},
    "draft_model": {"num_speculative_tokens": 3},
    "custom_class": {"model": "drafters.Truthful", "num_speculative_tokens": 5},
}


@pytest.fixture(scope="module")
def model(tiny_model) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def plain(model: Path) -> dict[int, Collected]:
    core = make_core(model, model_runner="v1")
    requests = mixed(core, COUNT)
    out = run(core, requests)
    core.close()
    for request in requests:
        output = [*request.resumed_token_ids.tolist(), *out[request.key].tokens]
        Truthful.learn(request.prompt_token_ids.tolist(), request.seed, output)
    return out


def test_it_starts_where_a_step_may_be_as_long_as_a_row(model: Path) -> None:
    config = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}
    core = make_core(
        model, model_runner="v1", speculative_config=config, max_model_len=128, num_gpu_blocks_override=None
    )
    core.close()


@pytest.mark.parametrize("method", METHODS)
def test_texts_are_those_of_plain_decoding(model: Path, plain: dict[int, Collected], method: str) -> None:
    config = {"method": method, **METHODS[method]}
    if method == "draft_model":
        config["model"] = str(model)  # it drafts for itself
    args = dict(num_gpu_blocks_override=50, block_size=4, max_num_batched_tokens=64, max_num_seqs=8)
    core = make_core(model, model_runner="v1", speculative_config=config, **args)
    core.scheduler._drafting = FixedDrafting(core.scheduler.config.tokens_per_step - 1)
    requests, random = mixed(core, COUNT), np.random.default_rng(3)
    got = run(core, requests, {request.key: int(random.integers(0, 60)) for request in requests})
    stats = core.scheduler.stats()
    core.close()
    for key, want in plain.items():
        assert (got[key].tokens, got[key].finish) == (want.tokens, want.finish), f"request {key}"
        for ours, theirs in zip(got[key].logprobs, want.logprobs, strict=True):
            assert ours == pytest.approx(theirs, abs=2e-4)
    assert stats.preemptions > 0 and 0 < stats.accepted_tokens < stats.draft_tokens


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_block_may_hold_a_whole_row(model: Path, plain: dict[int, Collected], runner: str) -> None:
    config = {"method": "draft_model", "model": str(model)}
    core = make_core(
        model, model_runner=runner, block_size=256, num_gpu_blocks_override=20, speculative_config=config
    )
    requests = mixed(core, 4)
    got = run(core, requests)
    core.close()
    assert all(got[request.key].tokens == plain[request.key].tokens for request in requests)


def test_an_ngram_is_the_longest_and_of_equals_the_most_recent() -> None:
    #         0  1  2  3  4  5  6  7  8  9
    tokens = [1, 2, 3, 9, 2, 3, 8, 1, 2, 3]
    assert ngram_drafts(tokens, 1, 3, 3) == [9, 2, 3]  # 1 2 3, though 2 3 is more recent
    assert ngram_drafts(tokens, 1, 2, 2) == [8, 1]
    assert ngram_drafts(tokens, 4, 5, 2) == []
    assert ngram_drafts([7, 7, 7], 1, 5, 4) == [7]


def test_a_suffix_tree_follows_the_likeliest_continuation_as_far_as_it_is_likely() -> None:
    tree = SuffixTree(8)
    for text in ([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 4]):
        tree.add(text)
    # After 1 2 comes 3 (3 of 3), then 4 (2 of 3).
    assert tree.drafts([0, 1, 2], 5, 2.0, 0.1) == (pytest.approx(1 + 2 / 3), [3, 4])
    assert tree.drafts([0, 1, 2], 5, 2.0, 0.7) == (1.0, [3])
    assert tree.drafts([0, 1, 2], 1, 2.0, 0.1) == (1.0, [3])
    assert tree.drafts([0, 1, 2], 5, 0.5, 0.1) == (1.0, [3])  # half a draft a matched token
    tree.add([1, 2, 3, 4], by=-1)
    tree.add([1, 2, 3, 4], by=-1)
    assert tree.drafts([0, 1, 2], 5, 2.0, 0.1) == (2.0, [3, 5])
    assert tree.drafts([6], 5, 2.0, 0.1) == (0.0, [])
