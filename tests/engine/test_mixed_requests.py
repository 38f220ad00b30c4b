"""The main promise: a request's tokens do not depend on what runs beside it, how its prompt was cut, whether
it was preempted, or how many steps were in flight."""

import numpy as np
import pytest
from harness import DEVICE, make_core, make_request, run
from tiny_models import make_tiny_model

from slipstream.contracts.sampling_params import SamplingParams

# On a GPU a row's sums depend on the batch unless asked not to.
EXACT = {} if DEVICE == "cpu" else dict(dtype="bfloat16", batch_invariant=True)
KINDS = (
    dict(temperature=0.0),
    dict(temperature=0.9),
    dict(temperature=1.2, top_k=20, top_p=0.9),
    dict(temperature=0.7, min_p=0.05),
    dict(temperature=0.0, presence_penalty=0.8, frequency_penalty=0.6, repetition_penalty=1.3),
    dict(temperature=1.0, repetition_penalty=1.2, frequency_penalty=-0.4),
    dict(temperature=0.0, logprobs=3),
    dict(temperature=0.8, logprobs=2, logit_bias={5: 4.0, 9: -100.0}),
    dict(temperature=1.0, allowed_token_ids=list(range(20, 60))),
    dict(temperature=0.0, min_tokens=12, stop_token_ids=list(range(3, 43))),
    dict(temperature=1.0, prompt_logprobs=2),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("mixed"), "llama")


def mixed(core, count):
    """`count` requests; every tenth stands for n=3: three samples of one prompt with seeds of their own."""
    rng = np.random.default_rng(5)
    requests, key = [], 0
    while len(requests) < count:
        kind = KINDS[key % len(KINDS)]
        prompt = rng.integers(3, 250, rng.integers(1, 90)).tolist()
        if key % 4 == 0 and requests:  # a shared prefix: blocks come from the cache
            prompt = requests[-1].prompt_token_ids.tolist()[:48] + prompt[:20]
        params = SamplingParams(max_tokens=int(rng.integers(12, 40)), **kind)
        bad_words = ((17,), (30, 31)) if key % 7 == 3 else ()
        samples = range(3 if key % 10 == 9 else 1)
        seeds = {1000 * sample + key: key * 31 + sample * 2**40 for sample in samples}
        requests += [make_request(core, k, prompt, params, seed, bad_words) for k, seed in seeds.items()]
        key += 1
    return requests


def strip(collected):
    return {key: (c.tokens, c.finish) for key, c in collected.items()}


@pytest.fixture(scope="module")
def alone(model):
    """Every request by itself, synchronously: the answer that all other runs must repeat."""
    core = make_core(model, async_scheduling=False, enable_prefix_caching=False, **EXACT)
    out = {}
    for request in mixed(core, 200):
        out |= run(core, [request])
    core.close()
    assert all(c.tokens and c.finish for c in out.values())
    return out


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("chunk", [64, 512])
@pytest.mark.parametrize("tight", [False, True])
def test_tokens_are_those_of_the_request_alone(model, alone, asynchronous, chunk, tight):
    """`chunk` bounds the tokens of a step: with 48 decoding rows beside it a prompt comes in pieces of 16 and
    fewer under 64. A tight pool of 44 blocks of 4 tokens holds one to four requests, so they preempt each
    other."""
    pool = dict(num_gpu_blocks_override=44, block_size=4) if tight else dict(num_gpu_blocks_override=2000)
    core = make_core(
        model, async_scheduling=asynchronous, max_num_batched_tokens=chunk, max_num_seqs=48, **pool, **EXACT
    )
    requests = mixed(core, 200)
    rng = np.random.default_rng(chunk)
    got = run(core, requests, {r.key: int(rng.integers(0, 120)) for r in requests})
    preemptions = core.scheduler.stats().preemptions
    core.close()
    assert strip(got) == strip(alone)
    for key, c in got.items():
        for mine, theirs in zip(c.logprobs, alone[key].logprobs, strict=True):
            assert mine.keys() == theirs.keys()
            np.testing.assert_allclose(list(mine.values()), list(theirs.values()), atol=1e-4)
        assert c.prompt_logprobs.keys() == alone[key].prompt_logprobs.keys()
    if tight:
        assert preemptions >= 50


def test_prompt_chunks_of_sixteen_give_the_same_tokens(model, alone):
    core = make_core(model, max_num_batched_tokens=16, max_num_seqs=16, **EXACT)
    assert strip(run(core, mixed(core, 200))) == strip(alone)
    core.close()
