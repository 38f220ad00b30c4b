"""Sampling of whole batches (Pipeline.sample_all) and its kernels in Triton's interpreter, against the eager
path, which tests/unit compares with float64 formulas, and against stated distributions."""

import dataclasses

import numpy as np
import pytest
import torch
from sampling_rows import (
    KINDS,
    WAYS_TO_TRUNCATE,
    chi_square_is_plausible,
    legal_probabilities,
    make_batch,
    make_pipeline,
    make_row,
    noise_costs,
    random_logits,
    rows_of_every_kind,
)

from slipstream.contracts.limits import GREEDY_TEMPERATURE
from slipstream.kernels.logprobs import token_logprobs, token_logprobs_reference
from slipstream.sampling.pipeline import default_features

# A division by zero is how the interpreter computes what a GPU gives as infinity.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")

TRUNCATIONS = [
    *WAYS_TO_TRUNCATE,
    {"min_p": 1.0},
    {"temperature": 9.0, "top_k": 2500},
    {"temperature": 1e-5, "top_p": 0.5},
    {"top_k": 5, "top_p": 1e-46},  # 0 as float32
    {},
    {"temperature": GREEDY_TEMPERATURE / 2, "top_k": 3},
]


def both(rows, logits, stage):
    """Graph form and eager path of the same batch; logits must stay as they are."""
    pipeline = make_pipeline(logits.shape[1], max_lanes=len(rows))
    batch = make_batch(pipeline, rows)
    before = logits.clone()
    got = pipeline.sample_all(logits, dataclasses.replace(batch, feature_lanes={}), stage)
    assert torch.equal(logits.view(torch.uint8), before.view(torch.uint8))
    return got, pipeline.sample(logits.float().clone(), batch)


def assert_same(got, want):
    assert got.tokens_N.dtype == torch.int32
    assert got.ok_N.tolist() == want.ok_N.tolist()
    assert got.tokens_N.tolist() == want.tokens_N.tolist()


@pytest.mark.parametrize(
    "vocab,scale,dtype",
    [(45, 2, torch.float32), (997, 3, torch.bfloat16), (4099, 1, torch.float32), (9001, 2, torch.bfloat16)],
)
def test_every_truncation_gives_the_tokens_of_the_eager_path(vocab, scale, dtype):
    rows = [make_row(seed=vocab + lane, **kind) for lane, kind in enumerate(TRUNCATIONS)]
    logits = (random_logits(len(rows), vocab + 3, vocab) * scale / 3).to(dtype)[:, :vocab]
    assert_same(*both(rows, logits, "sampled"))


@pytest.mark.parametrize("step", [1.0, 0.25])
def test_equal_logits_share_their_fate(step):
    """Coarse steps leave a small top_k more equal tokens than it has candidates."""
    kinds = [{"top_k": 40}, {"top_k": 3, "top_p": 0.3}, {"top_p": 0.4}, {"top_k": 2300}, {"min_p": 0.5}]
    rows = [make_row(seed=lane, **kind) for lane, kind in enumerate(kinds * 2)]
    logits = random_logits(len(rows), 4099, 5).mul(0.3).div(step).round() * step
    logits[5:] = 0.0
    assert_same(*both(rows, logits, "sampled"))


def test_all_features_in_one_batch_give_the_tokens_of_the_eager_path():
    rows = rows_of_every_kind(7)
    logits = random_logits(len(rows), 997, 1).bfloat16()
    got, want = both(rows, logits, "full")
    assert want.ok_N.all()
    assert_same(got, want)


def test_edits_leave_their_scratch_as_they_found_it_and_skip_rows_that_are_not_alive():
    rows = [make_row([5, 5, 6], [6, 7, 7], presence_penalty=1.0, bad_words=((3,),), seed=s) for s in range(3)]
    pipeline = make_pipeline(50, max_lanes=4)
    batch = make_batch(pipeline, rows)
    logits = random_logits(3, 50)
    whole = pipeline.sample_all(logits, batch, "full")
    batch.columns["alive"][batch.row_N[1]] = 0
    part = pipeline.sample_all(logits, batch, "full")
    assert part.ok_N.tolist() == [True, False, True]
    assert part.tokens_N[[0, 2]].tolist() == whole.tokens_N[[0, 2]].tolist()
    assert part.tokens_N[1] == 0
    scratch = [feature._count_NV for feature in pipeline._features if feature.name == "penalties"]
    assert [each.any().item() for each in scratch] == [False]


@pytest.mark.parametrize("vocab", [45, 2100])
def test_each_place_of_a_row_that_verifies_drafts_has_its_own_mask(vocab):
    legal = ((3, 9, 40), (44,), (0, 7))
    rows = [make_row(temperature=0.0), make_row(temperature=0.0, legal=legal[0], legal_later=legal[1:]),
            make_row(temperature=0.0, legal=(1, 2))]  # fmt: skip
    features = default_features(vocab, 6, torch.device("cpu"), mask_places=3)
    pipeline = make_pipeline(vocab, features)
    batch, lanes = make_batch(pipeline, rows), torch.tensor([0, 1, 1, 1, 2, 1])
    # The last lane is of a row that is not at its end yet.
    length_N = batch.length_N[lanes] + torch.tensor([0, 0, 1, 2, 0, -4])
    batch = dataclasses.replace(batch, row_N=batch.row_N[lanes], length_N=length_N.int(), feature_lanes={
        "structured_outputs": torch.arange(1, 6)})  # fmt: skip
    logits = random_logits(6, vocab, 3)
    expected = [max(one, key=lambda token, lane=lane: float(logits[lane, token]))
                for lane, one in enumerate([range(vocab), *legal, (1, 2), legal[0]])]  # fmt: skip
    assert pipeline.sample_all(logits, batch, "full").tokens_N.tolist() == expected
    assert pipeline.sample(logits.clone(), batch).tokens_N.tolist() == expected


@pytest.mark.parametrize("stage", ["sampled", "full"])
def test_a_lane_that_is_not_finite_or_has_no_legal_token_fails_alone(stage):
    kinds = [{"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.9}]
    rows = [make_row(seed=lane, **kind) for lane, kind in enumerate(kinds * 3)]
    if stage == "full":
        banned = {"allowed_token_ids": [7], "bad_words": ((7,),)}
        rows += [make_row(seed=lane, **kind, **banned) for lane, kind in enumerate(kinds)]
    clean = random_logits(len(rows), 997, 2)
    want = both(rows, clean, stage)[0]
    poisoned = clean.clone()
    for lane, poison in ((0, torch.nan), (1, torch.inf), (2, torch.nan), (3, -torch.inf)):
        poisoned[lane, 990 + lane] = poison
    got, eager = both(rows, poisoned, stage)
    assert_same(got, eager)
    assert got.ok_N.tolist() == [False] * 4 + [True] * 8 + [False] * (len(rows) - 12)
    assert got.tokens_N[4:].tolist() == want.tokens_N[4:].tolist()


@pytest.mark.parametrize(
    "kind,lanes",
    [({"temperature": 1.3}, 200), ({"temperature": 2.0, "min_p": 0.1, "top_k": 6, "top_p": 0.7}, 50)],
)
def test_draws_follow_the_distribution_that_the_parameters_state(kind, lanes):
    """tests/gpu/check_sampling.py draws many more."""
    logits = torch.linspace(-1, 1.5, 9)[torch.tensor([4, 0, 8, 2, 6, 1, 3, 7, 5])]
    row = make_row(**kind)
    pipeline = make_pipeline(9)
    batch = make_batch(pipeline, [dataclasses.replace(row, seed=seed) for seed in range(lanes)])
    sampled = pipeline.sample_all(logits.repeat(lanes, 1), batch, "sampled")
    assert sampled.ok_N.all()
    counts = np.bincount(sampled.tokens_N.numpy(), minlength=9)
    want = legal_probabilities(row, logits.numpy())
    assert not counts[want == 0].any()
    assert chi_square_is_plausible(counts[want > 0], want[want > 0] * lanes)


def test_noise_costs_are_the_logarithms_of_the_stated_bits():
    got, want = noise_costs(7, torch.device("cpu"))
    assert np.abs(got / want - 1).max() < 5e-6


def test_the_stage_is_the_first_that_covers_the_features():
    pipeline = make_pipeline(100)
    rows = [make_row(**kind, bad_words=((3,),) if i == 0 else ()) for i, kind in enumerate(KINDS)]
    found = []
    for row in rows:
        names = make_batch(pipeline, [row]).feature_lanes
        found.append(pipeline.stage_of([*names, "logprobs"]))
    sampled = [i in (3, 4, 5, 6, 7, 8, 9, 10) for i in range(len(KINDS))]
    assert found == ["sampled" if each else "full" for each in sampled]
    assert pipeline.stage_of(["logprobs"]) == "greedy"
    assert [pipeline.stages.index(each) for each in ("greedy", "sampled", "full")] == [0, 1, 2]


@pytest.mark.parametrize("vocab,num_top", [(1, 0), (7, 20), (997, 5), (4099, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_those_of_the_reference(vocab, num_top, dtype):
    logits = random_logits(4, vocab + 2, vocab)[:, :vocab].to(dtype)
    logits[1] = logits[1].round()
    logits[2] = 1.5
    token = torch.randint(vocab, (4,), generator=torch.Generator().manual_seed(vocab), dtype=torch.int32)
    got = token_logprobs(logits, token, num_top)
    want = token_logprobs_reference(logits.float(), token.long(), num_top)
    assert [each.dtype for each in got] == [each.dtype for each in want]
    assert torch.equal(got[0], want[0])
    assert torch.allclose(got[1], want[1], rtol=0, atol=2e-6)
    assert torch.equal(got[2], want[2])


def test_logprobs_of_a_row_of_nan_name_tokens_and_change_no_other_row():
    logits = random_logits(3, 500)
    token = torch.tensor([3, 4, 5])
    want = token_logprobs(logits, token, 6)
    logits[1] = torch.nan
    got = token_logprobs(logits, token, 6)
    assert ((got[0] >= 0) & (got[0] < 500)).all()
    for left, right in zip(got, want, strict=True):
        assert torch.equal(left[[0, 2]], right[[0, 2]])
