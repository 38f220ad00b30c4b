"""Drafting changes no text: mixed requests on a tiny model, with a drafter that is mostly right, against the
same requests without one. Stop strings, end tokens, min_tokens and logprobs within accepted drafts; figures
of what was drafted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from drafters import FixedDrafting, Truthful
from harness import Collected, make_core, run
from test_mixed_requests import mixed
from text_model import make_text_model

from slipstream.contracts.sampling_params import SamplingParams
from slipstream.engine.core import EngineCore
from slipstream.engine.llm import LLM

COUNT, K = 80, 5


@pytest.fixture(scope="module")
def model(tiny_model) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def plain(model: Path) -> dict[int, Collected]:
    """Without drafts, all at once."""
    core = make_core(model)
    requests = mixed(core, COUNT)
    out = run(core, requests)
    core.close()
    for request in requests:
        Truthful.learn(request.prompt_token_ids.tolist(), request.seed, out[request.key].tokens)
    return out


def drafting_core(model: Path, limit: int = K, **args: object) -> EngineCore:
    """With as many drafts a step, whatever they cost here."""
    config = {"method": "custom_class", "model": "drafters.Truthful", "num_speculative_tokens": limit}
    core = make_core(model, speculative_config=config, **args)
    core.scheduler._drafting = FixedDrafting(limit)
    return core


def check(got: dict[int, Collected], want: dict[int, Collected]) -> None:
    for key, one in want.items():
        assert (got[key].tokens, got[key].finish) == (one.tokens, one.finish), f"request {key}"
        assert len(got[key].logprobs) == len(one.logprobs)
        for ours, theirs in zip(got[key].logprobs, one.logprobs, strict=True):
            assert ours == pytest.approx(theirs, abs=2e-4)


@pytest.mark.parametrize("tight", [False, True])
def test_texts_and_logprobs_are_those_of_plain_decoding(
    model: Path, plain: dict[int, Collected], tight: bool
) -> None:
    """A tight pool holds few requests, so they preempt each other; prompts come in pieces of up to 64."""
    pool = dict(num_gpu_blocks_override=44, block_size=4) if tight else {}
    core = drafting_core(model, max_num_batched_tokens=64, max_num_seqs=12, **pool)
    requests, random = mixed(core, COUNT), np.random.default_rng(3)
    got = run(core, requests, {request.key: int(random.integers(0, 80)) for request in requests})
    stats = core.scheduler.stats()
    core.close()
    check(got, plain)
    assert (stats.preemptions > 0) == tight
    assert stats.accepted_tokens > COUNT and stats.accepted_tokens < stats.draft_tokens
    assert sum(stats.accepted_per_position) == stats.accepted_tokens
    assert len(stats.accepted_per_position) == K
    assert list(stats.accepted_per_position) == sorted(stats.accepted_per_position, reverse=True)


LOOKUPS = [
    {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, "num_speculative_tokens": 4},
    {"method": "suffix", "suffix_decoding_max_cached_requests": 20},
]


@pytest.mark.parametrize("config", LOOKUPS, ids=["ngram", "suffix"])
def test_seeded_and_greedy_texts_are_those_of_plain_decoding_with_lookups(
    model: Path, plain: dict[int, Collected], config: dict[str, object]
) -> None:
    core = make_core(model, speculative_config=config, max_num_seqs=32)
    most = core.scheduler.config.tokens_per_step - 1
    core.scheduler._drafting = FixedDrafting(most)
    got = run(core, mixed(core, COUNT))
    stats = core.scheduler.stats()
    core.close()
    check(got, plain)
    assert 0 < stats.accepted_tokens <= stats.draft_tokens <= most * stats.drafts


def test_an_abort_in_the_middle_harms_nobody(model: Path, plain: dict[int, Collected]) -> None:
    core = drafting_core(model, limit=16, max_num_seqs=16)
    requests = mixed(core, COUNT)
    gone = {request.key: 3 + number for number, request in enumerate(requests[::5])}
    got = run(core, requests, abort_at=gone)
    core.close()
    check(got, {key: one for key, one in plain.items() if key not in gone})


def test_fewer_steps_are_needed(model: Path, plain: dict[int, Collected]) -> None:
    core = drafting_core(model)
    request = mixed(core, COUNT)[0]
    got = run(core, [request])[request.key]
    stats = core.scheduler.stats()
    core.close()
    assert stats.steps < 0.7 * len(got.tokens)
    assert stats.drafts <= stats.steps and stats.drafts * K >= stats.draft_tokens


@pytest.fixture(scope="module")
def text_model(tiny_model) -> Path:
    return make_text_model(tiny_model)


@pytest.fixture(scope="module")
def llms(text_model: Path) -> Iterator[tuple[LLM, LLM]]:
    """Without and with drafts."""
    flags = {"dtype": "float32", "max_model_len": 160, "max_num_seqs": 4, "num_gpu_blocks_override": 200}
    config = {"method": "custom_class", "model": "drafters.Truthful", "num_speculative_tokens": 7}
    pair = LLM(str(text_model), **flags), LLM(str(text_model), speculative_config=config, **flags)
    yield pair
    for llm in pair:
        llm.close()


def test_stop_strings_within_accepted_drafts_cut_text_tokens_and_logprobs(llms: tuple[LLM, LLM]) -> None:
    plain, drafted = llms
    whole = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True, seed=1)
    first = plain.generate(["hello"], whole, use_tqdm=False)[0]
    Truthful.learn(first.prompt_token_ids, 1, list(first.outputs[0].token_ids))
    text, drafts = first.outputs[0].text, 0
    for begin in range(4, len(text) - 4, 14):
        stop = text[begin : begin + 3]
        params = whole.clone(stop=[stop], logprobs=1, min_tokens=begin // 2)
        one, two = (llm.generate(["hello"], params, use_tqdm=False)[0] for llm in (plain, drafted))
        ours, theirs = two.outputs[0], one.outputs[0]
        assert (ours.text, ours.token_ids) == (theirs.text, theirs.token_ids)
        assert (ours.finish_reason, ours.stop_reason) == (theirs.finish_reason, theirs.stop_reason)
        assert len(ours.logprobs) == len(ours.token_ids)
        for place, token in enumerate(ours.token_ids):
            assert ours.logprobs[place][token].logprob == pytest.approx(
                theirs.logprobs[place][token].logprob, abs=2e-4
            )
        assert one.metrics.draft_tokens == 0
        assert two.metrics.accepted_tokens <= two.metrics.draft_tokens
        drafts += two.metrics.accepted_tokens
    assert drafts > 25, "most tokens were drafts"


def test_an_explained_engine_says_how_it_drafts(llms: tuple[LLM, LLM]) -> None:
    plan = llms[1].info.plan
    assert plan["speculation"]["value"] == "custom_class"
    assert plan["model_runner"]["value"] == "v2" and plan["async_scheduling"]["value"] is True


@pytest.mark.parametrize(
    ("path", "words"),
    [("nowhere.Drafter", "cannot be imported"), ("drafters.Nobody", "cannot be imported"),
     ("collections.Counter", "is no Drafter's class")],
)  # fmt: skip
def test_a_class_that_is_no_drafter_is_refused_by_name(model: Path, path: str, words: str) -> None:
    config = {"method": "custom_class", "model": path}
    with pytest.raises(ValueError, match=f"--speculative-config: model='{path}'.*{words}"):
        make_core(model, speculative_config=config)
