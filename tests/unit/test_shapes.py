"""Which captured shape serves a step."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.runner.shapes import FULL, GREEDY, SAMPLED, Shapes
from slipstream.runner.warmup import with_graphs

LANES, TOKENS, TOP = (1, 2, 4, 8, 16, 32, 64, 128), (32, 64, 128, 256, 512), 20
STAGES = {"temperature": SAMPLED, "penalties": FULL}


def stage_of(names):
    order = (GREEDY, SAMPLED, FULL)
    return max((STAGES[name] for name in names), key=order.index, default=GREEDY)


SHAPES = Shapes(LANES, TOKENS, stage_of, TOP)


@given(
    lanes=st.integers(1, 128),
    extra=st.integers(0, 512),
    features=st.sets(st.sampled_from(sorted(STAGES))),
    num_logprobs=st.integers(-1, TOP),
)
def test_every_step_fits_into_a_captured_shape_that_does_what_it_needs(lanes, extra, features, num_logprobs):
    decode, tokens = extra == 0, min(lanes + extra, 512)
    shape = SHAPES.find(lanes, tokens, decode=decode, features=features, num_logprobs=num_logprobs)
    assert shape in SHAPES.all()
    assert shape.lanes >= lanes
    assert shape.tokens >= tokens
    assert shape.decode == decode
    assert not decode or shape.tokens == shape.lanes
    order = (GREEDY, SAMPLED, FULL)
    assert order.index(shape.stage) >= order.index(stage_of(features))
    assert shape.num_logprobs >= num_logprobs
    assert (shape.num_logprobs < 0) == (num_logprobs < 0)


@pytest.mark.parametrize("lanes", range(1, 129))
def test_greedy_decoding_takes_the_least_bucket(lanes):
    shape = SHAPES.find(lanes, lanes, decode=True, features=(), num_logprobs=-1)
    assert shape.lanes == min(size for size in LANES if size >= lanes)
    assert shape.stage == GREEDY


def test_graphs_end_with_the_sizes_that_were_asked_for():
    plan = SimpleNamespace(graph_sizes=(2, 8), token_buckets=(32, 128))
    captured = with_graphs(plan, SHAPES.all())
    assert {shape.lanes for shape in captured if shape.decode} == {1, 2, 4, 8}
    assert {shape.tokens for shape in captured if not shape.decode} == {32, 64, 128}
    assert with_graphs(SimpleNamespace(graph_sizes=(), token_buckets=()), SHAPES.all()) == []


def test_more_logprobs_than_graphs_compute_have_a_shape_of_their_own():
    shape = SHAPES.find(3, 3, decode=True, features=(), num_logprobs=500)
    assert shape.num_logprobs == 500
    assert shape not in SHAPES.all()


def test_the_largest_shape_comes_first_and_none_comes_twice():
    shapes = SHAPES.all()
    assert len(set(shapes)) == len(shapes)
    assert [shape.tokens for shape in shapes] == sorted((shape.tokens for shape in shapes), reverse=True)


DRAFTING = {
    (most, uneven): Shapes(LANES, TOKENS, stage_of, TOP, most, uneven)
    for most in (1, 3, 16)
    for uneven in (False, True)
}


@given(
    lanes=st.integers(1, 128),
    prefill=st.integers(0, 512),
    features=st.sets(st.sampled_from(sorted(STAGES))),
    num_logprobs=st.integers(-1, TOP),
    kind=st.sampled_from(sorted(DRAFTING)),
    share=st.integers(1, 16),
)
def test_a_step_with_drafts_fits_into_a_captured_shape(lanes, prefill, features, num_logprobs, kind, share):
    shapes, (most, uneven), share = DRAFTING[kind], kind, min(share, kind[0])
    drafts = most if uneven else share
    tokens, decode = min(lanes + prefill, 512), prefill == 0
    facts = dict(decode=decode, features=features, num_logprobs=num_logprobs)
    shape = shapes.find(lanes, tokens, **facts, drafts=drafts, room=lanes * share)
    assert shape in shapes.all()
    assert shape.lanes >= lanes and shape.tokens >= tokens and shape.samples >= shape.lanes
    assert shape.samples <= max(1024, shape.lanes) and shape.drafts <= most
    assert shapes.find(lanes, tokens, **facts).samples == shapes.find(lanes, tokens, **facts).lanes
    if decode and shape.drafts:
        room = shape.samples // shape.lanes - 1
        assert shape.tokens == shape.samples == shape.lanes * (1 + room)
        assert shape.drafts == (most if uneven else room)
        if shape.stage != FULL and shape.lanes * (1 + share) <= 512:
            assert room >= share and shape.drafts >= drafts, "there is room for all"


@pytest.mark.parametrize(("lanes", "stage"), [(1, GREEDY), (16, GREEDY), (17, SAMPLED), (100, SAMPLED)])
def test_greedy_rows_that_draft_have_shapes_of_their_own_where_steps_are_short(lanes, stage):
    find = DRAFTING[3, False].find
    step = dict(decode=True, num_logprobs=-1, drafts=3, room=3 * lanes)
    assert find(lanes, lanes, features=(), **step).stage == stage
    assert find(lanes, lanes, features={"temperature"}, **step).stage == SAMPLED


def test_without_drafts_the_shapes_are_those_of_an_engine_that_has_none():
    plain, drafting = SHAPES.all(), DRAFTING[3, False].all()
    assert [s for s in drafting if s in plain] == [s for s in plain if s.decode or s.stage != FULL]
    assert len(set(drafting)) == len(drafting)
