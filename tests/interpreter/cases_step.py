"""Staged writes, input build and commit in Triton's interpreter, against their torch references (which
tests/unit/test_step_kernels.py compares with a plain model of rows)."""

from dataclasses import fields

import numpy as np
import pytest
import torch
from kernel_cases import fill_writes

from slipstream.kernels.commit import CommitRecord, CommitRing, commit_step, commit_step_reference
from slipstream.kernels.scatter import Room, scatter_writes_reference
from slipstream.kernels.step_inputs import build_step_inputs, build_step_inputs_reference
from slipstream.rows.doors import PackedWrites

ROWS, LEN, BLOCK, ENDS = 40, 50, 4, 5


def make_rows(seed):
    """Columns as the table keeps them: scalars are strided views of one record, lists have rows of their
    own."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high, *size):
        return torch.randint(low, high, size, generator=generator, dtype=torch.int32)

    record = draw(0, 9, ROWS, 7)
    scalars = ("alive", "length", "num_computed", "max_len")
    rows = {name: record[:, place] for place, name in enumerate(scalars)}
    rows["length"].copy_(draw(8, 30, ROWS))
    rows["num_computed"].copy_(rows["length"] - draw(1, 8, ROWS))
    rows["max_len"].copy_(rows["length"] + draw(0, 3, ROWS))
    rows["alive"].copy_(draw(0, 5, ROWS).clamp(max=1))
    rows["alive"][-1] = 0
    rows["tokens"] = draw(0, 9, ROWS, LEN)
    rows["blocks"] = draw(1, 99, ROWS, -(-LEN // BLOCK))
    rows["end_ids"] = draw(-1, 9, ROWS, ENDS)
    return rows


def inputs_of(run, rows, lane_to_row, query_len, tokens):
    columns = (rows["tokens"], rows["num_computed"], rows["alive"], rows["blocks"])
    one_each = tokens == len(query_len) == int(query_len.sum()) and bool((query_len == 1).all())
    if run is build_step_inputs_reference:
        return run(lane_to_row, query_len, tokens, *columns, BLOCK, one_each)
    names = ("tokens_RM", "num_computed_R", "alive_R", "blocks_RB")
    named = dict(zip(names, columns, strict=True))
    return run(lane_to_row, query_len, tokens, **named, block_size=BLOCK, one_each=one_each)


def same(got, expected):
    for field in fields(expected):
        left, right = getattr(got, field.name), getattr(expected, field.name)
        assert left.dtype == right.dtype, field.name
        assert torch.equal(left, right), field.name


def lanes_of(seed, lanes, most):
    generator = torch.Generator().manual_seed(seed)
    row = torch.randperm(ROWS, generator=generator)[:lanes].int()
    count = torch.randint(1, most + 1, (lanes,), generator=generator, dtype=torch.int32)
    return row, count


@pytest.mark.parametrize("lanes,most,padding", [(1, 1, 0), (39, 1, 0), (13, 7, 0), (13, 7, 20), (33, 2, 3)])
def test_inputs_equal_the_reference(lanes, most, padding):
    rows, (row, count) = make_rows(lanes), lanes_of(lanes, lanes, most)
    tokens = int(count.sum()) + padding
    expected = inputs_of(build_step_inputs_reference, rows, row, count, tokens)
    same(inputs_of(build_step_inputs, rows, row, count, tokens), expected)
    if padding:
        for values in (expected.token_T, expected.position_T, expected.slot_T):
            assert not values[-padding:].any()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("sampling", ["all", "some", "none"])
def test_commit_equals_the_reference(seed, sampling):
    rows, (row, count) = make_rows(seed), lanes_of(seed, 35, 7)
    left = rows["length"][row.long()] - rows["num_computed"][row.long()]
    query_len = torch.where(count < 5, left, count)
    inputs = inputs_of(build_step_inputs_reference, rows, row, query_len, int(query_len.sum()))
    generator = torch.Generator().manual_seed(seed + 100)
    lane = torch.arange({"all": 35, "some": 35, "none": 0}[sampling])[:: 1 if sampling == "all" else 3]
    lane = lane.contiguous()
    token = torch.randint(0, 9, lane.shape, generator=generator, dtype=torch.int32)
    ok = torch.rand(lane.shape, generator=generator) < 0.8
    results = []
    for kernel in (True, False):
        mine = make_rows(seed)
        names = ("tokens", "length", "num_computed", "max_len", "end_ids", "alive")
        suffix = ("RM", "R", "R", "R", "RE", "R")
        record = CommitRecord(*torch.full((3, 64), 77, dtype=torch.int32)[:, :35].unbind())
        if kernel:
            named = {f"{n}_{s}": mine[n] for n, s in zip(names, suffix, strict=True)}
            commit_step(inputs, lane, token, ok, **named, record=record)
        else:
            commit_step_reference(inputs, lane, token, ok, *(mine[n] for n in names), record)
        results.append((record, mine))
    (got, got_rows), (expected, expected_rows) = results
    same(got, expected)
    for name, view in expected_rows.items():
        assert torch.equal(got_rows[name][:-1], view[:-1]), name


@pytest.mark.parametrize("count,spans", [(0, ()), (1, (1,)), (40_000, (1, 20_000, 3)), (7, (2048, 90) * 40)])
def test_scatter_equals_the_reference(count, spans):
    arenas = torch.full((2, sum(spans) + 50_000), -5, dtype=torch.int32).unbind()
    writes = PackedWrites(Room(40_000, 90, 90_000), pinned=False)
    fill_writes(writes, np.random.default_rng(count), len(arenas[0]), count, spans)
    writes.scatter(arenas[0])
    scatter_writes_reference(arenas[1], writes._packed, writes.room)
    assert torch.equal(*arenas)
    assert int((arenas[0] != -5).sum()) == count + sum(spans)


def test_records_of_a_ring_are_written_in_turn():
    rows = make_rows(5)
    row = torch.arange(35, dtype=torch.int32)
    inputs = inputs_of(build_step_inputs_reference, rows, row, torch.ones_like(row), 35)
    names = ("tokens", "length", "num_computed", "max_len", "end_ids", "alive")
    suffix = ("RM", "R", "R", "R", "RE", "R")
    ring = CommitRing(torch.full((3, 3, 40), 77, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))
    ok = torch.ones(35, dtype=torch.bool)
    for step in range(5):
        token = torch.full((35,), 100 + step, dtype=torch.int32)
        mine = {name: view.clone() for name, view in rows.items()}
        record = CommitRecord(*torch.full((3, 35), 77, dtype=torch.int32).unbind())
        theirs = {name: view.clone() for name, view in rows.items()}
        commit_step_reference(inputs, row.long(), token, ok, *(theirs[n] for n in names), record)
        named = {f"{n}_{s}": mine[n] for n, s in zip(names, suffix, strict=True)}
        before = ring.memory_S3L.clone()
        commit_step(inputs, row.long(), token, ok, **named, record=ring)
        written = ring.memory_S3L[step % 3]
        assert all(torch.equal(written[i, :35], getattr(record, f)) for i, f in
                   enumerate(("count_L", "finish_L", "token_L")))
        before[step % 3, :, :35] = written[:, :35]
        assert torch.equal(ring.memory_S3L, before)
