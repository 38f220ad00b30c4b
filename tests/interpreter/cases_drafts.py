"""Steps that verify drafts in Triton's interpreter: kernels against their torch references (which
tests/unit/test_draft_kernels.py compares with a plain model of rows), and bucketed steps against eager
ones."""

from dataclasses import fields

import pytest
import torch
from cases_step import same
from kernel_cases import attention_case

from slipstream.kernels import commit_drafts as commit
from slipstream.kernels import draft_inputs as inputs
from slipstream.kernels import put_drafts as put
from slipstream.kernels import verify_attention as verify
from slipstream.kernels.attention_common import LayerAttention

ROWS, LEN, BLOCK, ENDS, MOST = 40, 50, 4, 5, 6
SCALARS = ("alive", "length", "num_computed", "max_len", "draft_count", "seed_lo", "seed_hi")


def make_rows(seed):
    """Columns as the table keeps them: scalars are strided views of one record. Most rows are decoding."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high, *size):
        return torch.randint(low, high, size, generator=generator, dtype=torch.int32)

    record = draw(0, 9, ROWS, len(SCALARS))
    rows = {name: record[:, place] for place, name in enumerate(SCALARS)}
    rows["length"].copy_(draw(8, 30, ROWS))
    rows["num_computed"].copy_(rows["length"] - 1 - draw(0, 4, ROWS) * draw(0, 2, ROWS))
    rows["max_len"].copy_(rows["length"] + draw(0, 9, ROWS))
    rows["draft_count"].copy_(draw(0, MOST + 1, ROWS))
    rows["alive"].copy_(draw(0, 5, ROWS).clamp(max=1))
    rows["alive"][-1] = 0
    # Few ids, so that drafts are right now and then.
    rows["tokens"] = draw(0, 2, ROWS, LEN)
    rows["blocks"] = draw(1, 99, ROWS, -(-LEN // BLOCK))
    rows["end_ids"] = draw(-1, 40, ROWS, ENDS)
    return rows


def columns_of(kind, rows):
    names = [field.name.rpartition("_")[0] for field in fields(kind)]
    return kind(*(rows[name] for name in names))


def step_of(rows, seed, lanes=35, tokens=160, samples=150, limits=(4, 100)):
    generator = torch.Generator().manual_seed(seed)
    row = torch.randperm(ROWS, generator=generator)[:lanes].int()
    left = rows["length"][row.long()] - rows["num_computed"][row.long()]
    count = torch.where(torch.rand(lanes, generator=generator) < 0.2, 1, left).int()
    args = (row, count, torch.tensor(limits, dtype=torch.int32), tokens, samples)
    return *args, columns_of(inputs.DraftColumns, rows), BLOCK


@pytest.mark.parametrize(
    "sizes",
    [
        dict(), dict(lanes=1, tokens=8, samples=5), dict(tokens=85), dict(samples=60), dict(limits=(0, 0)),
        dict(limits=(16, 7)), dict(limits=(6, 41)), dict(lanes=40, tokens=300, samples=280, limits=(6, 1000)),
    ],
)
def test_inputs_equal_the_reference(sizes):
    for seed in range(3):
        step = step_of(make_rows(seed), seed, **sizes)
        same(inputs.build_draft_inputs(*step), inputs.build_draft_inputs_reference(*step))


def outcome(rows, seed, kernel, accept, record):
    step = step_of(rows, seed)
    made = inputs.build_draft_inputs_reference(*step)
    generator = torch.Generator().manual_seed(seed + 100)
    token = torch.randint(0, 2, (150,), generator=generator, dtype=torch.int32)
    ok = torch.rand(150, generator=generator) < 0.9
    out = commit.Appended(torch.full((35,), 77, dtype=torch.int32), torch.full((35,), 77))
    columns = columns_of(commit.CommitColumns, rows)
    run = commit.commit_drafts if kernel else commit.commit_drafts_reference
    run(made, token, ok, columns, record, out, accept)
    return made, out


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("accept", [None, (0.9, 0.5, 0.5, 0.0, 1.0)])
def test_commit_equals_the_reference(seed, accept):
    chances = None if accept is None else commit.chances(torch.tensor(accept, dtype=torch.float64))
    results = []
    for kernel in (True, False):
        rows, record = make_rows(seed), torch.full((3 + MOST, 64), 77, dtype=torch.int32)[:, :35]
        _, out = outcome(rows, seed, kernel, chances, record)
        results.append((rows, record, out))
    (got_rows, got, got_out), (rows, record, out) = results
    same(got_out, out)
    assert torch.equal(got[:3], record[:3])
    assert int(record[0].max()) > 1
    for lane, count in enumerate(record[0].tolist()):
        assert torch.equal(got[3 : 3 + count, lane], record[3 : 3 + count, lane])
    for name, view in rows.items():
        assert torch.equal(got_rows[name][:-1], view[:-1]), name


def test_records_of_a_ring_are_written_in_turn():
    ring = commit.CommitRing(torch.full((3, 9, 40), 77, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))
    for step in range(4):
        record = torch.full((9, 35), 77, dtype=torch.int32)
        outcome(make_rows(step), step, False, None, record)
        before = ring.memory_S3L.clone()
        outcome(make_rows(step), step, True, None, ring)
        written = ring.memory_S3L[step % 3, :, :35]
        assert torch.equal(written[:3], record[:3])
        first = torch.arange(6)[:, None] < record[0]
        assert torch.equal(written[3:][first], record[3:][first])
        before[step % 3, :, :35] = written
        assert torch.equal(ring.memory_S3L, before)


@pytest.mark.parametrize("seed", range(4))
def test_drafts_put_into_rows_equal_the_reference(seed):
    generator = torch.Generator().manual_seed(seed)
    row = torch.randperm(ROWS, generator=generator)[:35]
    drafts = torch.randint(0, 99, (35, MOST + 2), generator=generator, dtype=torch.int32)[:, :MOST]
    count, appended = torch.randint(-1, MOST + 3, (2, 35), generator=generator, dtype=torch.int32)
    names = ("tokens", "alive", "length", "max_len", "draft_count")
    got, expected = make_rows(seed), make_rows(seed)
    put.put_drafts(row, drafts, count, appended, **{
        f"{name}_{'RM' if name == 'tokens' else 'R'}": got[name] for name in names
    })
    put.put_drafts_reference(row, drafts, count, appended, *(expected[name] for name in names))
    for name, view in expected.items():
        assert torch.equal(got[name][:-1], view[:-1]), name


SHAPES = [
    LayerAttention(4, 2, 64, 0.125),
    LayerAttention(6, 2, 128, 0.09, window=21),
    LayerAttention(3, 3, 96, 0.1, soft_cap=5.0),
]
# Lanes of 1 to 5 tokens, one that is too long for the kernel, and one with no token at all.
LANES = [(40, 1), (0, 1), (33, 5), (0, 3), (150, 4), (20, 9), (62, 2), (30, 0)]
CONFIGS = [
    verify.VerifyConfig(5, 16, 4, 16, 2, 2, min_tiles=1),
    verify.VerifyConfig(5, 32, 8, 16, 2, 2),
    verify.VerifyConfig(6, 16, 1, 32, 2, 2),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_lanes_with_drafts_attend_as_far_as_each_of_their_tokens_may_see(shape, config):
    case = attention_case(shape, LANES, seed=shape.head_dim, mixed=True).with_step_stored()
    q_THD = case.q_prepared.float()
    scratch = verify.VerifyScratch(shape, torch.device("cpu"))
    for each in (scratch.acc, scratch.lse):
        each.fill_(float("nan"))
    for run in (True, False):
        out = torch.full_like(q_THD, float("nan"))
        if run:
            verify.verify_attention(q_THD, case.lanes, case.pool, shape, config, scratch, out)
        else:
            verify.verify_attention_reference(q_THD, case.lanes, case.pool, shape, config, out)
        count = torch.tensor([new for _, new in LANES])
        mine = count[case.lane_T] <= config.tokens
        torch.testing.assert_close(out[mine].double(), case.expected()[mine], atol=2e-5, rtol=1e-5)
        assert out[~mine].isnan().all()
        assert not scratch.counter.any()
