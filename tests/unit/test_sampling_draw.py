"""The whole pipeline: distributions, the order of features, seeds, greedy rows, rows that fail."""

import dataclasses

import numpy as np
import pytest
import torch
from sampling_rows import (
    CPU,
    KINDS,
    apply_features,
    chi_square_is_plausible,
    legal_probabilities,
    make_batch,
    make_pipeline,
    make_row,
    random_logits,
    rows_of_every_kind,
    sample,
    softmax64,
)

from slipstream.sampling.draw import Draw, DrawAmongTop
from slipstream.sampling.pipeline import Pipeline, default_features
from slipstream.sampling.top_k import SMALL_TOP_K


def test_features_combine_in_the_stated_order():
    rows = [row for seed in range(4) for row in rows_of_every_kind(seed)]
    logits = random_logits(len(rows), 200, 3)
    draws = (Draw, DrawAmongTop)
    before_draw = [f for f in default_features(200) if not isinstance(f, draws)]
    got = apply_features(before_draw, rows, logits)
    # A row with a small top_k is truncated and drawn in one step; its own noise is compared elsewhere.
    among_top = apply_features([*before_draw, DrawAmongTop()], rows, logits)
    for lane, row in enumerate(rows):
        want = legal_probabilities(row, logits[lane].numpy())
        if row.params.greedy:
            assert int(got[lane].argmax()) == int(want.argmax())
        elif 0 < row.params.top_k <= SMALL_TOP_K:
            assert np.array_equal((among_top[lane] > -torch.inf).numpy(), want > 0)
        else:
            assert np.allclose(softmax64(got[lane].double().numpy()), want, rtol=1e-4, atol=1e-12)


def test_a_banned_token_takes_no_place_among_the_top_k():
    row = make_row(top_k=1, bad_words=((2,),))
    assert sample([row], torch.tensor([[0.0, 1.0, 5.0]])).tokens_N.tolist() == [1]


def test_a_bias_comes_before_the_repetition_penalty():
    """(-1 + 3) / 4 is over the 0.4 of token 0; -1 * 4 + 3 is not."""
    row = make_row([1], temperature=0.0, repetition_penalty=4.0, logit_bias={1: 3.0})
    assert sample([row], torch.tensor([[0.4, -1.0, -0.5]])).tokens_N.tolist() == [1]


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 4},
        {"top_p": 0.7},
        {"min_p": 0.15},
        {"temperature": 1.5, "min_p": 0.05, "top_k": 7, "top_p": 0.9},
        {"allowed_token_ids": [1, 2, 5, 9], "top_p": 0.8},
        {"logit_bias": {3: 2.0}, "presence_penalty": 1.0},
    ],
    ids=str,
)
def test_draws_follow_the_distribution_that_the_parameters_state(kind):
    row = make_row([1, 2], [3, 4, 3], **kind)
    logits = torch.linspace(-1.5, 1.5, 12)[torch.randperm(12, generator=torch.Generator().manual_seed(5))]
    pipeline, lanes, steps = make_pipeline(12), 250, 40
    batch = make_batch(pipeline, [dataclasses.replace(row, seed=seed) for seed in range(lanes)])
    counts = np.zeros(12)
    for step in range(steps):  # other positions, other noise; the penalties' length stays below
        later = dataclasses.replace(batch, length_N=batch.length_N + step)
        if "presence_penalty" in kind:
            later = dataclasses.replace(
                batch, columns={**batch.columns, "seed_hi": batch.columns["seed_hi"] + step}
            )
        sampled = pipeline.sample(logits.repeat(lanes, 1), later)
        assert sampled.ok_N.all()
        counts += np.bincount(sampled.tokens_N.numpy(), minlength=12)
    want = legal_probabilities(row, logits.numpy())
    assert not counts[want == 0].any()
    assert chi_square_is_plausible(counts[want > 0], want[want > 0] * counts.sum())


def test_a_row_draws_the_same_token_alone_in_any_lane_and_beside_any_others():
    rows, logits = rows_of_every_kind(), random_logits(len(KINDS), 200)
    whole = sample(rows, logits).tokens_N
    for lane, row in enumerate(rows):
        assert sample([row], logits[lane : lane + 1]).tokens_N[0] == whole[lane]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))
    mixed = sample([rows[i] for i in order], logits[order]).tokens_N
    assert torch.equal(mixed, whole[order])
    twice = sample([*rows, *rows], torch.cat((logits, logits))).tokens_N
    assert torch.equal(twice, torch.cat((whole, whole)))


def test_rows_that_differ_in_their_seed_alone_draw_different_tokens():
    rows = [make_row(seed=seed) for seed in [*range(100), *(i << 32 for i in range(1, 101))]]
    tokens = sample(rows, torch.zeros(200, 5000)).tokens_N
    assert len(tokens.unique()) > 180


def test_a_small_top_k_gives_the_tokens_that_the_long_way_gives(monkeypatch):
    kinds = [{"top_k": k, "top_p": p} for k in (1, 2, 20, SMALL_TOP_K) for p in (1.0, 0.9, 0.4)]
    rows = [make_row(seed=seed, temperature=1.2, **kind) for seed in range(30) for kind in kinds]
    logits = random_logits(len(rows), 3000, 9)
    logits[::2] = logits[::2].mul(2).round().div(2)  # many equal logits
    short = sample(rows, logits).tokens_N
    for module in ("draw", "top_p"):
        monkeypatch.setattr(f"slipstream.sampling.{module}.has_small_top_k", lambda params: False)
    monkeypatch.setattr("slipstream.sampling.top_k.SMALL_TOP_K", 0)
    batch = make_batch(make_pipeline(3000), rows)
    assert "draw_among_top" not in batch.feature_lanes
    assert torch.equal(short, make_pipeline(3000).sample(logits.clone(), batch).tokens_N)


def test_greedy_rows_take_the_highest_logit_and_the_lowest_id_of_equals():
    logits = random_logits(6, 1000)
    logits[0, [44, 45, 700]] = 50.0
    logits[1, [999, 31, 32]] = 50.0
    logits[2] = 1.0
    kinds = [{"temperature": 0.0}, {"temperature": 9e-6, "top_k": 3, "top_p": 0.5}] * 3
    got = sample([make_row(**kind) for kind in kinds], logits).tokens_N.tolist()
    assert got == [44, 31, 0, *logits[3:].argmax(1).tolist()]


def test_plain_greedy_rows_use_no_feature():
    batch = make_batch(make_pipeline(50), [make_row(temperature=0.0, top_k=4, min_p=0.1)])
    assert dict(batch.feature_lanes) == {}


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_a_row_with_logits_that_are_not_finite_fails_alone(poison):
    rows, logits = rows_of_every_kind(), random_logits(len(KINDS), 200)
    clean = sample(rows, logits)
    for lane in range(len(rows)):
        poisoned = logits.clone()
        poisoned[lane, 17] = poison
        got = sample(rows, poisoned)
        others = torch.arange(len(rows)) != lane
        assert not got.ok_N[lane]
        assert got.ok_N[others].all()
        assert torch.equal(got.tokens_N[others], clean.tokens_N[others])
        assert 0 <= got.tokens_N[lane] < 200


@pytest.mark.parametrize("kind", [{"temperature": 0.0}, {}, {"top_k": 5}, {"temperature": 0.3, "top_p": 0.5}])
def test_a_row_with_no_legal_token_fails_alone(kind):
    rows = [
        make_row(allowed_token_ids=[7], bad_words=((7,),), **kind),
        make_row(allowed_token_ids=[7], **kind),
    ]
    got = sample(rows, random_logits(2, 100))
    assert got.ok_N.tolist() == [False, True]
    assert got.tokens_N[1] == 7


def test_every_feature_touches_its_own_lanes_only():
    rows, logits = rows_of_every_kind(), random_logits(len(KINDS), 200)
    pipeline = make_pipeline(200)
    batch = make_batch(pipeline, rows)
    for feature in default_features(200):
        lanes = batch.feature_lanes[feature.name]
        assert 0 < len(lanes) <= len(rows)
        changed = logits.clone()
        feature.apply(changed, batch)
        others = [lane for lane in range(len(rows)) if lane not in lanes]
        assert torch.equal(changed[others], logits[others])
        assert not torch.equal(changed[lanes], logits[lanes])


def test_a_feature_that_is_not_in_the_list_is_not_in_the_table():
    names = {column.name for column in Pipeline((), 10, CPU).columns}
    assert names == set()
    declared = [column.name for column in make_pipeline(10).columns]
    assert len(declared) == len(set(declared))
