"""Inputs, commit and drafts of steps that verify drafts, against a plain Python model of rows."""

from dataclasses import fields

import numpy as np
import pytest
import torch

from slipstream.contracts.step import Finish
from slipstream.kernels.commit_drafts import Appended, CommitColumns, chances, commit_drafts
from slipstream.kernels.draft_inputs import DraftColumns, build_draft_inputs
from slipstream.kernels.noise import PURPOSE_ACCEPT, lane_keys
from slipstream.kernels.put_drafts import put_drafts

ROWS, LEN, BLOCK, LANES, MOST = 9, 40, 4, 7, 5


def make_rows(rng):
    """Eight rows and the padding row; most have all but their last token computed."""
    length = rng.integers(6, 20, ROWS)
    behind = 1 + rng.integers(0, 3, ROWS) * rng.integers(0, 2, ROWS)
    alive = (rng.random(ROWS) < 0.8).astype(np.int64)
    alive[-1] = 0
    rows = {
        "tokens": rng.integers(0, 3, (ROWS, LEN)), "blocks": rng.permutation(ROWS * 10).reshape(ROWS, 10) + 1,
        "end_ids": rng.integers(-1, 12, (ROWS, 2)), "alive": alive, "length": length,
        "num_computed": length - behind, "max_len": length + rng.integers(0, 9, ROWS),
        "draft_count": rng.integers(0, MOST + 1, ROWS), "seed_lo": rng.integers(0, 99, ROWS),
        "seed_hi": rng.integers(0, 99, ROWS),
    }
    return {name: torch.from_numpy(value.astype(np.int32)) for name, value in rows.items()}


def columns_of(kind, rows):
    return kind(*(rows[field.name.rpartition("_")[0]] for field in fields(kind)))


def make_step(rng, rows, tokens=None, samples=None, limits=(MOST, 99)):
    lanes = rng.permutation(ROWS)[:LANES]
    behind = (rows["length"] - rows["num_computed"]).numpy()[lanes]
    query_len = np.where(rng.random(LANES) < 0.8, behind, 1)
    made = build_draft_inputs(
        torch.from_numpy(lanes.astype(np.int32)), torch.from_numpy(query_len.astype(np.int32)),
        torch.tensor(limits, dtype=torch.int32), tokens or int(query_len.sum()) + LANES * MOST,
        samples or LANES * (1 + MOST), columns_of(DraftColumns, rows), BLOCK,
    )
    return lanes.tolist(), query_len.tolist(), made


def in_turn(wanted, room):
    """What lanes get that take one draft after the other in turns."""
    given = [0] * len(wanted)
    for turn in range(max(wanted)):
        for lane, count in enumerate(wanted):
            if count > turn and room > 0:
                given[lane], room = given[lane] + 1, room - 1
    return given


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("limits,tokens,samples", [((5, 99), 70, 60), ((3, 6), 70, 60), ((5, 99), 24, 60),
                                                   ((5, 99), 70, 10), ((0, 99), 70, 60)])
def test_a_lane_at_its_rows_end_computes_its_drafts_as_far_as_there_is_room(seed, limits, tokens, samples):
    rng = np.random.default_rng(seed)
    rows = make_rows(rng)
    lanes, query_len, made = make_step(rng, rows, tokens, samples, limits)
    room = min(tokens - sum(query_len), samples - LANES, limits[1])
    wanted = []
    for row, count in zip(lanes, query_len, strict=True):
        at_end = rows["alive"][row] and rows["num_computed"][row] + count == rows["length"][row]
        wanted.append(min(int(rows["draft_count"][row]), limits[0]) if at_end else 0)
    given = in_turn(wanted, room)
    place, token_at, sampled = 0, [], []
    for lane, (row, count) in enumerate(zip(lanes, query_len, strict=True)):
        start, alive = (int(rows[name][row]) for name in ("num_computed", "alive"))
        drafts = given[lane]
        assert made.num_draft_L[lane] == drafts
        assert made.length_L[lane] == (start + count + drafts if alive else 1)
        assert made.end_L[lane] == start + count
        token_at += [(row, start + offset if alive else 0, alive) for offset in range(count + drafts)]
        end = start + count if alive else 1
        sampled += [(place + count - 1 + draft, row, end + draft) for draft in range(1 + drafts)]
        place += count + drafts
        assert made.query_start_L1[lane + 1] == place
        assert made.sample_start_L1[lane + 1] == len(sampled)
    assert place <= tokens and len(sampled) <= samples
    for token, (row, position, alive) in enumerate(token_at):
        assert made.token_T[token] == rows["tokens"][row, position]
        assert made.position_T[token] == position
        slot = int(rows["blocks"][row, position // BLOCK]) * BLOCK + position % BLOCK
        assert made.slot_T[token] == (slot if alive else 0)
    sampled += [(0, ROWS - 1, 0)] * (samples - len(sampled))
    got = torch.stack((made.sample_token_N, made.sample_row_N, made.sample_length_N.long()), 1)
    assert got.tolist() == [list(each) for each in sampled]
    for padding in (made.token_T, made.position_T, made.slot_T):
        assert not padding[place:].any()


def is_taken(rows, row, position, chance):
    words = (rows["seed_lo"][row : row + 1], rows["seed_hi"][row : row + 1])
    key = lane_keys(*words, torch.tensor([position], dtype=torch.int32), PURPOSE_ACCEPT)[0]
    return (int(key[0]) & 0xFFFFFFFF) / 2**32 < chance


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("rates", [(), (0.9, 0.7, 1.0, 0.5, 0.0)])
def test_a_lane_keeps_drafts_until_the_sampler_disagrees_or_its_row_ends(seed, rates):
    rng = np.random.default_rng(seed)
    rows = make_rows(rng)
    lanes, _, made = make_step(rng, rows)
    samples = len(made.sample_row_N)
    token, ok = rng.integers(0, 3, samples), rng.random(samples) < 0.9
    before = {name: view.clone() for name, view in rows.items()}
    record = torch.full((4 + MOST, LANES), 77, dtype=torch.int32)
    out = Appended(torch.zeros(LANES, dtype=torch.int32), torch.zeros(LANES, dtype=torch.int64))
    accept = chances(torch.tensor(rates, dtype=torch.float64)) if rates else None
    commit_drafts(
        made, torch.from_numpy(token.astype(np.int32)), torch.from_numpy(ok),
        columns_of(CommitColumns, rows), record, out, accept,
    )
    for lane, row in enumerate(lanes):
        length, most = int(before["length"][row]), int(before["max_len"][row])
        first, drafts = int(made.sample_start_L1[lane]), int(made.num_draft_L[lane])
        gained, finish, computed = [], Finish.NONE, int(made.end_L[lane])
        alive = bool(before["alive"][row])
        if alive and computed == length:
            # As if each token had a step of its own.
            for draft in range(1 + drafts):
                here = length + draft
                if here >= most:
                    finish = Finish.LENGTH
                    break
                if not ok[first + draft]:
                    finish = Finish.NONE if draft else Finish.ERROR
                    break
                guess, chosen = int(before["tokens"][row, here]), int(token[first + draft])
                taken = draft < drafts and guess == chosen
                if rates and draft < drafts:
                    taken = is_taken(rows, row, here, rates[draft])
                gained.append(guess if taken else chosen)
                if gained[-1] in before["end_ids"][row].tolist():
                    finish = Finish.STOP
                elif here + 1 == most:
                    finish = Finish.LENGTH
                if finish or not taken:
                    break
            computed = length + len(gained) - 1 if gained else computed
        assert record[:3, lane].tolist() == [len(gained), finish, drafts]
        assert record[3 : 3 + len(gained), lane].tolist() == gained
        assert rows["length"][row] == length + len(gained)
        assert rows["num_computed"][row] == (computed if alive else before["num_computed"][row])
        assert rows["alive"][row] == int(alive and finish == Finish.NONE)
        assert rows["draft_count"][row] == 0
        assert rows["tokens"][row, length : length + len(gained)].tolist() == gained
        kept = torch.equal(rows["tokens"][row, :length], before["tokens"][row, :length])
        assert kept or row == ROWS - 1
        assert out.appended_L[lane] == len(gained)
        assert out.source_L[lane] == made.sample_token_N[first + max(len(gained) - 1, 0)]


@pytest.mark.parametrize("seed", range(10))
def test_drafts_stand_past_the_end_of_rows_that_gained_a_token_and_leave_room_for_one_more(seed):
    rng = np.random.default_rng(seed)
    rows = make_rows(rng)
    lanes = rng.permutation(ROWS - 1)[:LANES]
    drafts, count = rng.integers(10, 99, (LANES, MOST)), rng.integers(-1, MOST + 3, LANES)
    appended = rng.integers(0, 3, LANES)
    before = {name: view.clone() for name, view in rows.items()}
    put_drafts(
        torch.from_numpy(lanes), *(torch.from_numpy(a.astype(np.int32)) for a in (drafts, count, appended)),
        tokens_RM=rows["tokens"], alive_R=rows["alive"], length_R=rows["length"], max_len_R=rows["max_len"],
        draft_count_R=rows["draft_count"],
    )
    for lane, row in enumerate(lanes.tolist()):
        length, expected = int(before["length"][row]), before["tokens"][row].tolist()
        fits = 0
        if before["alive"][row] and appended[lane]:
            fits = max(0, min(int(count[lane]), MOST, int(before["max_len"][row]) - length - 1))
        expected[length : length + fits] = drafts[lane, :fits].tolist()
        assert rows["draft_count"][row] == fits
        assert rows["tokens"][row].tolist() == expected
