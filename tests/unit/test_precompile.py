"""Kernels that are compiled ahead: what is remembered of them."""

from slipstream.kernels import cache, precompile
from slipstream.kernels.precompile import Known


def test_launches_that_were_compiled_are_known_at_the_next_start(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    first = Known()
    assert not first
    assert first.missing(["a", "b"]) == ["a", "b"]
    first.add(["a", "b"])
    second = Known()
    assert second
    assert second.missing(["b", "c", "a"]) == ["c"]
    second.add(["c"])
    assert Known().missing(["a", "b", "c", "d"]) == ["d"]


def test_a_change_of_the_sources_begins_anew(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    Known().add(["a"])
    copied = tmp_path / "kernels"
    copied.mkdir()
    (copied / "precompile.py").write_text("other")
    monkeypatch.setattr(precompile, "__file__", str(copied / "precompile.py"))
    assert not Known()
