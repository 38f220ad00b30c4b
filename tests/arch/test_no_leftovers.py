"""Nothing half done: no notes to self, no stubs, no tests that do not run, no errors swallowed in silence."""

import ast
import re
from collections.abc import Iterator

import pytest
from sources import FOLDERS, Source, parse, sources

NOTE = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
STUB = "NotImplemented" + "Error"
MAY_SKIP = ("tests/server/browser.py",)  # a browser is no package that pip could bring
NOT_RUN = {"skip", "skipif", "xfail", "importorskip"}


def is_empty(body: list[ast.stmt]) -> bool:
    return all(
        isinstance(node, ast.Pass)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.value.value is ...)
        for node in body
    )


def leftovers(source: Source) -> Iterator[str]:
    for number, line in enumerate(source.text.splitlines(), start=1):
        if NOTE.search(line):
            yield f"{source.name}:{number} a note to self"
    for node in ast.walk(source.tree):
        place = f"{source.name}:{getattr(node, 'lineno', 0)}"
        match node:
            case ast.Name(id=name) if name == STUB:
                yield f"{place} a stub"
            case ast.Attribute(value=ast.Name(id="pytest"), attr=name) if (
                name in NOT_RUN and source.name not in MAY_SKIP
            ):
                yield f"{place} a test that does not run"
            case ast.Attribute(value=ast.Attribute(attr="mark"), attr=name) if name in NOT_RUN:
                yield f"{place} a test that does not run"
            case ast.ExceptHandler(body=body) if is_empty(body):
                yield f"{place} an error swallowed in silence"


def test_nothing_is_left_over():
    found = [line for source in sources(*FOLDERS) for line in leftovers(source)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "# TO" + "DO: later",
        "raise NotImplemented" + "Error",
        "pytest.skip('no GPU')",
        "@pytest.mark.xfail\ndef test(): ...",
        "try:\n    f()\nexcept ValueError:\n    pass",
        "try:\n    f()\nexcept ValueError:\n    ...",
    ],
)
def test_the_rule_sees(text):
    assert list(leftovers(parse(text)))


def test_the_rule_lets_an_error_through_that_is_dealt_with():
    assert not list(leftovers(parse("try:\n    f()\nexcept ValueError:\n    g()\n")))
