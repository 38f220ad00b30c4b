"""The oracle: two runners that share the models and the rules of sampling, and no code of a step, agree on
300 mixed requests; and the old one agrees with transformers."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness import DEVICE, make_core, make_request, run
from text_model import VOCAB, write_tokenizer
from tiny_models import make_tiny_model
from transformers import AutoModelForCausalLM

from slipstream.contracts.sampling_params import SamplingParams
from slipstream.contracts.step import Admission, Finish
from slipstream.runner_v1.request import BASE_COLUMNS, admit_request
from slipstream.sampling.pipeline import Pipeline, default_features

COUNT = 300
GRAMMAR = "start: /([a-c]|é|[0-9]{2})+/"
KINDS = (
    dict(temperature=0.0),
    dict(temperature=0.9),
    dict(temperature=1.2, top_k=20, top_p=0.9),
    dict(temperature=1.4, top_k=100),
    dict(temperature=0.8, top_k=90, top_p=0.7, min_p=0.02),
    dict(temperature=1.0, top_p=0.5, logprobs=0),
    dict(temperature=0.7, min_p=0.05),
    dict(temperature=0.0, presence_penalty=0.8, frequency_penalty=0.6, repetition_penalty=1.3),
    dict(temperature=1.0, repetition_penalty=1.2, frequency_penalty=-0.4),
    dict(temperature=0.0, logprobs=3),
    dict(temperature=1.0, grammar=GRAMMAR, min_tokens=4, bad_words=["banned"], logprobs=1),
    dict(temperature=0.0, grammar=GRAMMAR, repetition_penalty=1.4),
    dict(temperature=0.8, logprobs=20, logit_bias={5: 4.0, 9: -100.0}),
    dict(temperature=1.0, allowed_token_ids=list(range(20, 60)), bad_words=["banned"]),
    dict(temperature=0.0, min_tokens=12, stop_token_ids=list(range(3, 43))),
    dict(temperature=1.1, stop_token_ids=list(range(100, 120)), ignore_eos=True),
    dict(temperature=1.0, prompt_logprobs=2),
    dict(temperature=0.0, prompt_logprobs=0, logprobs=1, max_tokens=1),
    dict(temperature=1.3, top_k=30, logit_bias={7: 2.0}, bad_words=["banned"], presence_penalty=-0.5),
)
BAD_WORDS = ((17,), (30, 31), (25, 26, 27))
# Fields that the front end answers for: what reaches a runner is a seed, an end token, a grammar or nothing.
NOT_THE_RUNNERS = {
    "n", "seed", "stop", "include_stop_str_in_output", "detokenize", "skip_special_tokens",
    "spaces_between_special_tokens", "output_kind", "structured_outputs",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tokenizer(make_tiny_model(tmp_path_factory.mktemp("oracle"), "llama", vocab_size=VOCAB))


def mixed(core, count=COUNT):
    """Requests of every kind; some share a prefix, some are samples of one prompt, some come with tokens that
    an engine which is gone had delivered."""
    rng = np.random.default_rng(11)
    requests, key = [], 0
    while len(requests) < count:
        kind = dict(KINDS[key % len(KINDS)])
        grammar = kind.pop("grammar", "")
        prompt = rng.integers(3, 250, rng.integers(1, 90)).tolist()
        if key % 4 == 0 and requests:
            prompt = requests[-1].prompt_token_ids.tolist()[:48] + prompt[:20]
        params = SamplingParams(**{"max_tokens": int(rng.integers(12, 30)), **kind})
        more = 3 if key % 13 == 6 and params.max_tokens > 3 and not grammar else 0
        resumed = rng.integers(50, 99, more).astype(np.int32)
        for sample in range(3 if key % 10 == 9 else 1):
            seed, number = key * 31 + sample * 2**40 - 5, 1000 * sample + key
            bad_words = BAD_WORDS if params.bad_words else ()
            requests.append(
                make_request(
                    core, number, prompt, params, seed, bad_words, resumed_token_ids=resumed, grammar=grammar
                )
            )
        key += 1
    return requests


def arrivals(requests):
    rng = np.random.default_rng(12)
    return {request.key: int(rng.integers(0, 60)) for request in requests}


def core_of(model, runner, **args):
    return make_core(model, model_runner=runner, max_num_seqs=48, **args)


def answer(core):
    requests = mixed(core)
    got = run(core, requests, arrivals(requests))
    core.close()
    return got


@pytest.fixture(scope="module")
def expected(model):
    got = answer(core_of(model, "v2"))
    assert len(got) >= COUNT and all(each.finish for each in got.values())
    assert {each.finish for each in got.values()} == {Finish.STOP, Finish.LENGTH}
    return got


def assert_alike(got, expected):
    assert got.keys() == expected.keys()
    for key, mine in got.items():
        theirs = expected[key]
        assert (mine.tokens, mine.finish) == (theirs.tokens, theirs.finish), key
        assert len(mine.logprobs) == len(theirs.logprobs)
        assert mine.prompt_logprobs.keys() == theirs.prompt_logprobs.keys()
        pairs = list(zip(mine.logprobs, theirs.logprobs, strict=True))
        pairs += [(entry, theirs.prompt_logprobs[place]) for place, entry in mine.prompt_logprobs.items()]
        for one, other in pairs:
            assert one.keys() == other.keys()
            np.testing.assert_allclose(list(one.values()), list(other.values()), atol=1e-4)


def test_every_sampling_feature_and_every_parameter_of_a_runner_is_asked_for(model):
    core = make_core(model, model_runner="v1")
    requests = mixed(core)
    core.close()
    pipeline = Pipeline(default_features(VOCAB), VOCAB, torch.device("cpu"))
    declared = {column.name: column for column in (*BASE_COLUMNS, *pipeline.columns)}
    bits = 0
    for request in requests:
        admission = Admission(0, 0, request, request.prompt_token_ids, 0, np.zeros(1, np.int32))
        bits |= admit_request(admission, pipeline, declared, VOCAB).features
    assert bits == (1 << len(pipeline.names)) - 1
    plain = SamplingParams()
    fields = {field.name for field in dataclasses.fields(SamplingParams)} - NOT_THE_RUNNERS
    for name in fields:
        assert any(getattr(request.params, name) != getattr(plain, name) for request in requests), name


def test_both_runners_give_300_mixed_requests_the_same_tokens_ends_and_logprobs(model, expected):
    assert_alike(answer(core_of(model, "v1", max_num_batched_tokens=64)), expected)


def test_the_old_runner_agrees_after_preemption_and_prefix_hits_too(model, expected):
    core = core_of(model, "v1", num_gpu_blocks_override=44, block_size=4)
    got = answer(core)
    assert core.scheduler.stats().preemptions >= 20
    assert any(each.num_cached for each in got.values())
    assert_alike(got, expected)


def test_lanes_of_requests_that_have_ended_change_nothing(model, expected):
    """Three steps are planned before a result is read, so plans name rows whose request has ended."""
    core = core_of(model, "v1")
    core._depth, step, dead = 3, core._executor.runner.step, []
    live_requests = core._executor.runner.runner._requests

    def watched(plan):
        kept = set(plan.lane_row.tolist()) - {admission.row for admission in plan.admissions}
        dead.extend(row for row in kept if live_requests[row].finish)
        return step(plan)

    core._executor.runner = SimpleNamespace(step=watched, close=core._executor.runner.close)
    assert_alike(answer(core), expected)
    assert len(dead) >= 30


@pytest.mark.parametrize("backend", ["torch"] if DEVICE == "cpu" else ["torch", "triton"])
def test_the_old_runners_logprobs_are_those_of_transformers(model, backend):
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    core = make_core(model, model_runner="v1", max_num_batched_tokens=64, attention_backend=backend)
    tolerance = 1e-4 if DEVICE == "cpu" else 2e-4
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 250, length).tolist() for length in (1, 40, 90)]
    params = SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True, logprobs=4, prompt_logprobs=4)
    got = run(core, [make_request(core, key, prompt, params, key) for key, prompt in enumerate(prompts)])
    core.close()
    for key, prompt in enumerate(prompts):
        with torch.inference_mode():
            logprob_TV = reference(torch.tensor([prompt + got[key].tokens])).logits[0].log_softmax(-1)
        scored = got[key].prompt_logprobs | dict(enumerate(got[key].logprobs, len(prompt)))
        assert sorted(scored) == list(range(1, len(prompt) + 30))
        for position, entry in scored.items():
            for token, value in entry.items():
                assert value == pytest.approx(float(logprob_TV[position - 1, token]), abs=tolerance)
