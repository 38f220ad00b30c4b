"""The verifier: drafts change no text, whatever they are worth, and no distribution; one that is broken on
purpose is found out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from chi_square import count_texts, distribution, p_value
from drafting import DraftEngine, TableDrafter, draft_plan
from harness import make_core, make_request, run
from tiny_models import make_tiny_model

from slipstream.contracts.sampling_params import SamplingParams
from slipstream.contracts.step import Finish
from slipstream.runner.draft_tick import EagerDraftTick
from slipstream.sampling.pipeline import SampledTokens
from slipstream.sampling.protocol import SampleBatch

LENGTH = 30


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def greedy(model):
    """Requests, and what plain decoding makes of them."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 250, n).tolist() for n in (1, 40, 7, 19, 33, 16)]
    core = make_core(model, max_num_seqs=8)
    params = SamplingParams(max_tokens=LENGTH, temperature=0.0, ignore_eos=True)
    requests = [make_request(core, key, prompt, params) for key, prompt in enumerate(prompts)]
    out = run(core, requests)
    core.close()
    return requests, out, [prompt + out[key].tokens for key, prompt in enumerate(prompts)]


@pytest.mark.parametrize("most", [1, 4, 16])
def test_true_drafts_are_all_taken_and_false_ones_none(model, greedy, most):
    requests, plain, texts = greedy
    for wrong in (0, 1, 3):
        drafter = TableDrafter(texts, most, 256, wrong)
        engine = DraftEngine(draft_plan(model, most, max_num_batched_tokens=160), drafter)
        got = engine.run(requests, {2: 3})
        engine.close()
        assert all(got[key].tokens == plain[key].tokens for key in plain)
        verified, taken = engine.verified_and_taken()
        # After its prompt a text of true drafts takes a step for each 1 + most tokens.
        steps = -(-(LENGTH - 1) // (1 + most))
        assert taken == {0: (LENGTH - 1 - steps) * len(texts), 1: 0}.get(wrong, taken)
        assert verified > 0 and (wrong != 3 or 0 < taken < verified)


def test_a_row_without_drafts_beside_rows_that_have_some_goes_on_as_ever(model, greedy):
    requests, plain, texts = greedy
    drafter = TableDrafter(texts, 5, 256, 4, counts=lambda length_L: length_L % 7 - 1)
    plan = draft_plan(model, 5, max_num_batched_tokens=70, num_gpu_blocks_override=14)
    engine = DraftEngine(plan, drafter, limit=lambda step: (5, 5, 0, 2)[step % 4])
    got = engine.run(requests, {3: 2}, abort_at={0: 6})
    preempted = engine.scheduler.stats().preemptions
    engine.close()
    assert preempted > 0 and set(drafter.steps) == {0, 2, 5}
    assert len(got[0].tokens) < LENGTH and got[0].tokens == plain[0].tokens[: len(got[0].tokens)]
    assert all(got[key].tokens == plain[key].tokens for key in range(1, len(texts)))


# Distributions: texts of four tokens, of which three are drafted, over eight tokens.
VOCAB, PROMPT, DRAWS, FEW = 8, [3, 6, 5], 17_000, 5_000


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A model, and the distribution of its texts."""
    folder = tmp_path_factory.mktemp("small")
    make_tiny_model(folder, "llama", vocab_size=VOCAB, initializer_range=0.1)
    return folder, distribution(folder, PROMPT, VOCAB)


class AnyText(TableDrafter):
    def admit(self, request, write):
        write.scalar("text", request.key % len(self.table))


def draws(folder, count: int, **speculation) -> np.ndarray:
    """Second to fourth token of so many texts, as a number."""
    # Few texts are guessed, likely ones and others: over all guesses faults would cancel out.
    guesses = [[0] * 4 + guess for guess in ([4, 2, 2], [0, 1, 0], [2, 2, 2])]
    plan = draft_plan(folder, 3, max_num_seqs=256, max_model_len=32, max_num_batched_tokens=2048,
                      num_gpu_blocks_override=600, speculation=speculation)
    engine = DraftEngine(plan, AnyText(guesses, 3, VOCAB))
    core = make_core(folder, max_num_seqs=1)
    params = SamplingParams(max_tokens=4, temperature=1.0, ignore_eos=True)
    requests = [make_request(core, key, PROMPT, params, 7919 * key + 1) for key in range(count)]
    core.close()
    got = engine.run(requests)
    engine.close()
    verified, taken = engine.verified_and_taken()
    assert verified >= 2 * count and taken > count // 10
    return count_texts([got[key].tokens for key in range(count)], VOCAB)


def test_drafted_tokens_have_the_models_distribution(small):
    folder, probability = small
    assert probability.sum() == pytest.approx(1.0)
    assert p_value(draws(folder, DRAWS), probability) > 0.001


def test_a_verifier_that_takes_every_draft_is_found_out(small):
    folder, probability = small
    rates = dict(rejection_sample_method="synthetic", synthetic_acceptance_rates=[1.0] * 3)
    assert p_value(draws(folder, FEW, **rates), probability) < 1e-9


def test_a_verifier_that_draws_afresh_where_a_draft_is_refused_is_found_out(small, monkeypatch):
    """Without the recovery step: what is refused must not be drawn again with its full probability."""
    folder, probability = small
    choose = EagerDraftTick._choose

    def draw_afresh(self, logits_NV, batch, num_logprobs):
        again = SampleBatch(batch.row_N, batch.length_N + 1000, batch.columns, batch.feature_lanes)
        second = self._pipeline.sample(logits_NV.clone(), again)
        scores, first = choose(self, logits_NV, batch, num_logprobs)
        end_N = (batch.columns["length"] + batch.columns["draft_count"])[batch.row_N]
        guess_N = batch.columns["tokens"][batch.row_N, batch.length_N.long()]
        refused_N = (batch.length_N < end_N) & (guess_N != first.tokens_N)
        return scores, SampledTokens(torch.where(refused_N, second.tokens_N, first.tokens_N), first.ok_N)

    monkeypatch.setattr(EagerDraftTick, "_choose", draw_afresh)
    assert p_value(draws(folder, FEW), probability) < 1e-9


def test_synthetic_acceptance_takes_drafts_as_often_as_asked_whatever_they_are(model):
    rates = [0.8, 0.6, 0.3]
    plan = draft_plan(model, 3, max_num_seqs=64, max_num_batched_tokens=400, num_gpu_blocks_override=600,
                      speculation=dict(rejection_sample_method="synthetic", synthetic_acceptance_rates=rates))
    engine = DraftEngine(plan, AnyText([[250] * 120], 3, 256))
    core = make_core(model, max_num_seqs=1)
    params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
    got = engine.run([make_request(core, key, [5, 9], params, key) for key in range(40)])
    core.close()
    engine.close()
    assert all(len(one.tokens) == 100 and one.finish is Finish.LENGTH for one in got.values())
    gained = np.concatenate([r.num_tokens[r.drafted == 3] for r in engine.results if r.drafted is not None])
    for place, rate in enumerate(rates, 1):
        share = (gained > place).mean()
        assert abs(share - rate) < 4 * np.sqrt(rate * (1 - rate) / len(gained)), place
