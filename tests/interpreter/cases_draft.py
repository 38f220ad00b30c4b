"""What drafters with weights launch beside a decoder's kernels, in Triton's interpreter."""

import pytest
import torch

from slipstream.kernels.draft_choice import DraftNoise, choose_draft, choose_draft_reference
from slipstream.kernels.draft_lanes import draft_lanes, draft_lanes_reference, next_tokens

ROWS, WIDTH, BLOCK_SIZE = 5, 40, 4


def make_columns():
    torch.manual_seed(0)
    scalars = torch.zeros(ROWS, 3, dtype=torch.int32)
    columns = dict(zip(("alive", "length", "max_len"), scalars.unbind(1), strict=True))
    columns["alive"][:4] = 1
    columns["length"][:] = torch.tensor([9, 1, 38, 20, 12])
    columns["max_len"][:] = torch.tensor([40, 30, 40, 21, 40])
    columns["tokens"] = torch.randint(0, 90, (ROWS, WIDTH), dtype=torch.int32)
    columns["blocks"] = torch.arange(1, 1 + ROWS * 10, dtype=torch.int32).view(ROWS, 10)
    return columns


def test_the_next_token_of_each_is_read_from_its_own_row():
    columns = make_columns()
    start, row = torch.tensor([0, 3, 4, 9], dtype=torch.int32), torch.tensor([2, 0, 3])
    position = torch.tensor([36, 37, 39, 8, 3, 4, 5, 6, 7, 0, 0])
    rows = [2, 2, 2, 0, 3, 3, 3, 3, 3, 3, 3]
    expected = [columns["tokens"][r, min(p + 1, 39)] for r, p in zip(rows, position.tolist(), strict=True)]
    assert next_tokens(position, start, row, columns["tokens"]).tolist() == expected


@pytest.mark.parametrize("passes", [0, 1, 3])
def test_passes_compute_what_a_row_has_room_for_and_nothing_of_others(passes):
    columns, row = make_columns(), torch.tensor([4, 3, 0, 2, 1])
    appended = torch.tensor([1, 1, 2, 1, 0], dtype=torch.int32)
    options = dict(passes=passes, drafts=3, most=24, block_size=BLOCK_SIZE)
    lanes = draft_lanes(row, appended, columns, **options)
    same = draft_lanes_reference(row, appended, columns, *options.values())
    for name in ("position_PL", "slot_PL", "length_PL", "token_L", "count_L"):
        made, expected = getattr(lanes, name), getattr(same, name)
        assert made.dtype == expected.dtype
        assert torch.equal(made, expected)
    # Row 4 is dead, row 2 longer than the drafter's 24 positions, row 1 gained nothing; row 3 ends at 21.
    assert lanes.position_PL[:, 1].tolist() == [19, 20, 0][:passes]
    assert lanes.position_PL[:, 2].tolist() == [8, 9, 10][:passes]
    assert lanes.slot_PL[:, 2].tolist() == [3 * BLOCK_SIZE, 3 * BLOCK_SIZE + 1, 3 * BLOCK_SIZE + 2][:passes]
    newest = [columns["tokens"][r, p] for r, p in ((3, 19), (0, 8), (2, 37))]
    assert lanes.token_L.tolist() == [0, *newest, 0]
    assert not lanes.position_PL[:, [0, 3, 4]].any()
    assert lanes.count_L.tolist() == [0, 3, 3, 0, 0]


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("vocab,dtype", [(50, torch.float32), (9001, torch.float32), (4096, torch.bfloat16)])
def test_a_draft_is_the_highest_logit_with_the_rows_noise(vocab, dtype, mapped):
    torch.manual_seed(vocab)
    logits = torch.randn(6, vocab + 5).to(dtype)[:, :vocab]
    ids = torch.randperm(50_000)[:vocab].int() if mapped else None
    row = torch.tensor([3, 1, 0, 2, 4, 1])
    params = torch.rand(5, 2)
    params[:, 0] = torch.tensor([0.0, 1.0, 0.5, 2.0, 0.0])
    seeds = torch.randint(-(1 << 31), 1 << 31, (2, 5, 2), dtype=torch.int64).int()
    length = torch.arange(10, 16, dtype=torch.int32)
    noise = DraftNoise(row, length, params[:, 0], seeds[0, :, 0], seeds[1, :, 0])
    out = torch.full((6, 4), -1, dtype=torch.int32)
    choose_draft(logits, out[:, 2], ids, noise)
    assert out[:, 2].tolist() == choose_draft_reference(logits, ids, noise).tolist()
    assert (out[:, [0, 1, 3]] == -1).all()
    choose_draft(logits, out[:, 1], ids)
    highest = logits.float().argmax(1)
    assert out[:, 1].tolist() == (highest if ids is None else ids[highest]).tolist()
    assert out[2, 2] == out[2, 1]  # a greedy row has no noise


def test_a_row_of_nan_still_gives_a_token():
    logits, out = torch.full((2, 300), float("nan")), torch.full((2,), -1, dtype=torch.int32)
    choose_draft(logits, out)
    assert ((out >= 0) & (out < 300)).all()
