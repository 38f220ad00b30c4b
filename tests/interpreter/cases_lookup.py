"""N-gram and suffix drafts in Triton's interpreter, against plain Python."""

import pytest
from lookup_cases import compare_ngrams, compare_suffixes

from slipstream.kernels import history


@pytest.fixture(autouse=True)
def small_programs(monkeypatch):
    """Several parts of several pieces a row, as on a GPU, in short rows."""
    monkeypatch.setattr(history, "PARTS_OF_FEW", 2)
    monkeypatch.setattr(history, "CHUNK", 16)


def test_ngrams_are_those_written_out():
    assert compare_ngrams("cpu", 7, rows=8, width=70) > 5


def test_suffixes_are_those_written_out():
    assert compare_suffixes("cpu", 0, rounds=2, rows=6, width=45) > 5
