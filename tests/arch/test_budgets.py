"""Budgets: where one hurts, the design is wrong."""

import ast

from sources import FOLDERS, Function, Source, parse, sources

FILE_LINES, FUNCTION_LINES, LINE_COLUMNS = 400, 60, 110
RUNNER_AND_ROWS_LINES, RUNNER_V1_LINES = 2500, 900
EVERYTHING = sources(*FOLDERS)


def function_lines(function: Function) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def untyped(source: Source) -> list[str]:
    """Functions with an argument, but for self and cls, or a result without a type."""
    methods = {
        id(function)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef)
        for function in node.body
        if isinstance(function, Function)
        and not any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in function.decorator_list)
    }
    found = []
    for function in source.functions():
        args = function.args
        named = [*args.posonlyargs, *args.args][1 if id(function) in methods else 0 :]
        named += [*args.kwonlyargs, *(arg for arg in (args.vararg, args.kwarg) if arg)]
        if function.returns is None or any(arg.annotation is None for arg in named):
            found.append(f"{source.name}:{function.lineno} {function.name}")
    return found


def test_files_are_short():
    long = {s.name: len(s.text.splitlines()) for s in EVERYTHING if len(s.text.splitlines()) > FILE_LINES}
    assert not long, long


def test_functions_are_short():
    long = {
        f"{source.name}:{function.lineno} {function.name}": function_lines(function)
        for source in EVERYTHING
        for function in source.functions()
        if function_lines(function) > FUNCTION_LINES
    }
    assert not long, long


def test_lines_are_short():
    long = [
        f"{source.name}:{number}"
        for source in EVERYTHING
        for number, line in enumerate(source.text.splitlines(), start=1)
        if len(line) > LINE_COLUMNS
    ]
    assert not long, long


def test_every_function_of_the_package_is_typed():
    wrong = [line for source in sources("slipstream") for line in untyped(source)]
    assert not wrong, wrong


def lines_of(*parts: str) -> int:
    return sum(len(source.text.splitlines()) for source in sources("slipstream") if source.part in parts)


def test_runner_and_rows_stay_small():
    assert 1000 < lines_of("runner", "rows") < RUNNER_AND_ROWS_LINES


def test_the_old_runner_stays_small():
    assert lines_of("runner_v1") <= RUNNER_V1_LINES


def test_the_check_for_types_sees_what_is_missing():
    text = "class A:\n    def f(self, x) -> int: ...\n    def g(self): ...\ndef h(*x: int) -> int: ...\n"
    assert [line.split()[-1] for line in untyped(parse(text))] == ["f", "g"]
