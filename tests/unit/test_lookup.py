"""N-gram and suffix drafts in torch operations, against plain Python; what both are worth is measured by
benchmarks/lookup_acceptance.py."""

import pytest
import torch
from lookup_cases import Rows, compare_ngrams, compare_suffixes, propose
from lookup_reference import draft_ngram

from slipstream.kernels.history import MOST_TOKENS, Histories
from slipstream.speculation.ngram import Ngram
from slipstream.speculation.suffix import LOGGED, Suffix

FOREST = [5, 6, 7, 8, 9, 10, 11, 12]


def make_suffix(**changed):
    options = {
        "max_tree_depth": 24, "max_cached_requests": 2, "max_spec_factor": 1.0, "min_token_prob": 0.1,
        "num_drafts": 4, "max_model_len": 40, "device": torch.device("cpu"),
    }  # fmt: skip
    return Suffix(**options | changed)


def drafts_after(drafter, text, row=0, rows=None):
    table = rows or Rows(3, 40, "cpu", 0)
    table.admit(row, text, 1)
    return propose(drafter, table, [row], [1])[0]


def end(rows, row):
    rows.columns["alive"][row] = 0


@pytest.mark.parametrize("seed", range(4))
def test_drafts_are_those_written_out(seed):
    assert compare_ngrams("cpu", 100 * seed, rows=30) > 25
    assert compare_suffixes("cpu", 100 * seed) > 25


@pytest.mark.parametrize(
    "text,least,most,expected",
    [
        ([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3], 1, 3, [8, 1, 2, 3]),  # the most recent
        ([4, 1, 2, 3, 9, 0, 2, 3, 8, 4, 1, 2, 3], 1, 4, [9, 0, 2, 3]),  # the longest before the most recent
        ([4, 1, 2, 3, 9, 0, 2, 3, 8, 4, 1, 2, 3], 1, 2, [8, 4, 1, 2]),  # no more than most
        ([1, 2, 3, 9, 3], 2, 3, []),  # no less than least
        ([7, 1, 2, 1, 2], 1, 3, [1, 2, 1, 2]),  # on into itself
        ([1, 2], 1, 5, []),
        ([1], 1, 5, []),
    ],
)
def test_an_ngram_is_continued_as_it_was_before(text, least, most, expected):
    assert draft_ngram(text, least, most, 4) == expected
    assert drafts_after(Ngram(lookup_min=least, lookup_max=most, num_drafts=4), text) == expected


def test_a_suffix_goes_on_as_most_of_its_occurrences_did():
    text = [1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2, 5, 1, 2]
    assert drafts_after(make_suffix(), text)[:1] == [3], "twice, and 5 is more recent"
    assert drafts_after(make_suffix(min_token_prob=0.9), text) == []
    longer = [9, 1, 2, 4, 1, 2, 3, 1, 2, 3, 9, 1, 2]
    assert drafts_after(make_suffix(), longer)[:1] == [4], "a longer match weighs more than two"


def test_drafts_are_as_many_as_the_match_allows():
    text = [*FOREST, 1, *FOREST[:3]]
    for factor, count in ((1.0, 3), (0.34, 1), (0.3, 0), (2.0, 4), (100.0, 4)):
        assert drafts_after(make_suffix(max_spec_factor=factor), text) == FOREST[3 : 3 + count]


def test_an_output_is_remembered_once_its_request_has_ended_until_others_take_its_place():
    drafter, rows = make_suffix(), Rows(3, 40, "cpu", 0)
    rows.admit(0, [1, *FOREST], 1)
    assert drafts_after(drafter, [3, 5, 6, 7], 1, rows) == [], "it goes on"
    end(rows, 0)
    for _ in range(3):
        assert drafts_after(drafter, [3, 5, 6, 7], 1, rows) == [8, 9, 10]
    assert int(drafter._log.state_3[1]) == 1, "logged once"
    rows.admit(0, [1, *FOREST[:3:-1]], 1)
    end(rows, 0)
    rows.admit(2, [1, 2, 2], 3)
    end(rows, 2)
    assert drafts_after(drafter, [3, 5, 6, 7], 1, rows) == [8, 9, 10], "no output is no request"
    rows.admit(0, [1, 20, 21], 1)
    end(rows, 0)
    assert drafts_after(drafter, [3, 5, 6, 7], 1, rows) == [], "two others are there"
    assert drafts_after(drafter, [3, 12, 11, 10], 1, rows) == [9]


def test_prompts_are_not_remembered_and_a_column_tells_who_is_logged():
    drafter, rows = make_suffix(), Rows(3, 40, "cpu", 0)
    rows.admit(0, [*FOREST, 30], len(FOREST))
    end(rows, 0)
    assert drafts_after(drafter, [3, 5, 6, 7], 1, rows) == []
    assert [column.name for column in drafter.columns] == [LOGGED]
    assert rows.columns[LOGGED].tolist() == [1, 0, 0, 0]


def test_nothing_is_remembered_where_no_request_may_be():
    drafter, rows = make_suffix(max_cached_requests=0), Rows(3, 40, "cpu", 0)
    rows.admit(0, [1, *FOREST], 1)
    end(rows, 0)
    assert drafts_after(drafter, [3, 5, 6, 7], 1, rows) == []
    assert drafter.num_bytes < make_suffix(max_cached_requests=100).num_bytes


def test_numbers_out_of_range_are_named():
    for least, most in ((0, 3), (4, 3), (1, 64)):
        with pytest.raises(ValueError, match=f"prompt_lookup_max={most}"):
            Ngram(lookup_min=least, lookup_max=most, num_drafts=4)
    for depth in (1, 65):
        with pytest.raises(ValueError, match="max_tree_depth"):
            make_suffix(max_tree_depth=depth)
    row_L, scalar_R = torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    wide_RM = torch.empty(2, MOST_TOKENS + 1, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match="no lookup"):
        Histories(row_L, row_L.int(), wide_RM, scalar_R, scalar_R)
