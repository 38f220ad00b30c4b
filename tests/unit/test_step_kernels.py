"""Input build and commit, against a plain Python model of rows."""

import numpy as np
import pytest
import torch

from slipstream.contracts.step import Finish
from slipstream.kernels import commit as commit_kernel
from slipstream.kernels.commit import CommitRecord, commit_step
from slipstream.kernels.step_inputs import build_step_inputs

ROWS, LEN, BLOCK = 6, 24, 4


def make_rows(rng):
    """Columns of five rows and the padding row, every one in the middle of its life."""
    length = rng.integers(6, 20, ROWS)
    return {
        "tokens": torch.from_numpy(rng.integers(0, 50, (ROWS, LEN)).astype(np.int32)),
        "length": torch.from_numpy(length.astype(np.int32)),
        "num_computed": torch.from_numpy((length - rng.integers(1, 6, ROWS)).astype(np.int32)),
        "max_len": torch.full((ROWS,), 20, dtype=torch.int32),
        "end_ids": torch.tensor([[7, -1], [-1, -1], [3, 4], [7, -1], [-1, -1], [-1, -1]], dtype=torch.int32),
        "alive": torch.tensor([1, 1, 0, 1, 1, 0], dtype=torch.int32),
        "blocks": torch.from_numpy(
            rng.permutation(ROWS * LEN // BLOCK).reshape(ROWS, -1).astype(np.int32) + 1
        ),
    }


def build(rows, lanes, query_len):
    return build_step_inputs(
        torch.tensor(lanes, dtype=torch.int32),
        torch.tensor(query_len, dtype=torch.int32),
        sum(query_len),
        tokens_RM=rows["tokens"],
        num_computed_R=rows["num_computed"],
        alive_R=rows["alive"],
        blocks_RB=rows["blocks"],
        block_size=BLOCK,
        one_each=max(query_len) == 1,
    )


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("query_len", [[1, 1, 1, 1], [1, 1, 3, 5], [2, 4, 1, 1]])
def test_inputs_are_the_tokens_positions_and_slots_of_each_lane(seed, query_len):
    rng = np.random.default_rng(seed)
    rows, lanes = make_rows(rng), rng.permutation(ROWS)[:4].tolist()
    got = build(rows, lanes, query_len)
    token, position, slot, length = [], [], [], []
    for row, count in zip(lanes, query_len, strict=True):
        start = int(rows["num_computed"][row])
        alive = bool(rows["alive"][row])
        for place in range(start, start + count) if alive else [0] * count:
            token.append(int(rows["tokens"][row, place]))
            position.append(place)
            slot.append(int(rows["blocks"][row, place // BLOCK]) * BLOCK + place % BLOCK if alive else 0)
        length.append(start + count if alive else 1)
    assert got.token_T.tolist() == token
    assert got.position_T.tolist() == position
    assert got.slot_T.tolist() == slot
    assert got.length_L.tolist() == length
    assert got.query_start_L1.tolist() == np.concatenate(([0], np.cumsum(query_len))).tolist()


def commit(rows, lanes, query_len, sampled, ok=None):
    inputs = build(rows, lanes, query_len)
    ok = torch.ones(len(lanes), dtype=torch.bool) if ok is None else torch.tensor(ok)
    record = CommitRecord(*torch.full((3, len(lanes)), 77, dtype=torch.int32))
    commit_step(
        inputs,
        torch.arange(len(lanes)),
        torch.tensor(sampled, dtype=torch.int32),
        ok,
        tokens_RM=rows["tokens"],
        length_R=rows["length"],
        num_computed_R=rows["num_computed"],
        max_len_R=rows["max_len"],
        end_ids_RE=rows["end_ids"],
        alive_R=rows["alive"],
        record=record,
    )
    return record


@pytest.mark.parametrize("seed", range(20))
def test_commit_equals_a_plain_model_of_rows(seed):
    rng = np.random.default_rng(seed)
    rows = make_rows(rng)
    rows["length"][1] = 19
    lanes = [0, 1, 2, 3, 4]
    left = (rows["length"] - rows["num_computed"]).tolist()
    query_len = [left[r] if rng.random() < 0.7 else max(1, left[r] - 1) for r in lanes]
    sampled, ok = rng.integers(0, 9, 5).tolist(), (rng.random(5) < 0.8).tolist()
    before = {name: view.clone() for name, view in rows.items()}
    record = commit(rows, lanes, query_len, sampled, ok)
    for lane, row in enumerate(lanes):
        length, done = int(before["length"][row]), int(before["num_computed"][row]) + query_len[lane]
        count, finish = 0, Finish.NONE
        if before["alive"][row] and done == length:
            count = int(ok[lane])
            if not ok[lane]:
                finish = Finish.ERROR
            elif sampled[lane] in before["end_ids"][row].tolist():
                finish = Finish.STOP
            elif length + 1 == 20:
                finish = Finish.LENGTH
        assert record.count_L[lane] == count
        assert record.finish_L[lane] == finish
        assert record.token_L[lane] == (sampled[lane] if count else -1)
        assert rows["length"][row] == length + count
        assert rows["num_computed"][row] == (done if before["alive"][row] else before["num_computed"][row])
        assert rows["alive"][row] == int(bool(before["alive"][row]) and finish == Finish.NONE)
        expected = before["tokens"][row].tolist()
        if count:
            expected[length] = sampled[lane]
        assert rows["tokens"][row].tolist() == expected


def test_a_row_already_at_its_maximum_ends_without_a_token():
    """max_tokens=0: the prompt is scored, nothing is generated."""
    rows = make_rows(np.random.default_rng(0))
    rows["max_len"][0] = rows["length"][0]
    record = commit(rows, [0], [int(rows["length"][0] - rows["num_computed"][0])], [5])
    assert (record.count_L.tolist(), record.finish_L.tolist()) == ([0], [Finish.LENGTH])
    assert rows["alive"][0] == 0


def test_finish_codes_are_those_of_the_contract():
    assert (commit_kernel.FINISH_NONE, commit_kernel.FINISH_STOP) == (Finish.NONE, Finish.STOP)
    assert (commit_kernel.FINISH_LENGTH, commit_kernel.FINISH_ERROR) == (Finish.LENGTH, Finish.ERROR)
