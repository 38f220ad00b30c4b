"""A row whose numbers are not finite fails alone: its neighbours, and whoever gets its blocks next, see
nothing."""

import numpy as np
import torch
from harness import make_core, make_request, run

from slipstream.contracts.sampling_params import SamplingParams
from slipstream.contracts.step import Finish

POISON = 200  # a token whose embedding is NaN
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0, logit_bias={POISON: -100.0})


@torch.inference_mode()
def poison(core):
    core._executor.runner._tick._model.embed.weight_VH[POISON] = float("nan")


def prompts(count):
    rng = np.random.default_rng(8)
    return [rng.integers(3, 190, rng.integers(3, 40)).tolist() for _ in range(count)]


def test_neighbours_and_the_next_owners_of_its_blocks_are_unharmed(tiny_model):
    args = dict(num_gpu_blocks_override=13, max_num_seqs=4)
    clean = make_core(tiny_model("llama"), **args)
    plain = {key: prompt for key, prompt in enumerate(prompts(30)) if POISON not in prompt}
    expected = run(clean, [make_request(clean, key, prompt, PARAMS) for key, prompt in plain.items()])
    clean.close()
    core = make_core(tiny_model("llama"), **args)
    poison(core)
    requests = []
    for key, prompt in plain.items():
        requests.append(make_request(core, key, prompt, PARAMS))
        bad = [*prompt[:17], POISON, *prompt[:9]]
        requests.append(make_request(core, 1000 + key, bad, PARAMS))
    got = run(core, requests)
    assert core.scheduler.stats().free_blocks == 12
    core.close()
    for key in plain:
        assert (got[key].tokens, got[key].finish) == (expected[key].tokens, Finish.LENGTH)
        assert (got[1000 + key].tokens, got[1000 + key].finish) == ([], Finish.ERROR)
        assert "not finite" in got[1000 + key].errors[0]
