"""The repository's Python files, parsed, as the architecture tests look at them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("slipstream", "tests", "benchmarks", "scripts")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One file. name: its path from the root; part: the package's folder or module it belongs to."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def module(self) -> str:
        return self.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def part(self) -> str:
        return self.module.split(".")[1] if "." in self.module else ""

    def functions(self) -> Iterator[Function]:
        return (node for node in ast.walk(self.tree) if isinstance(node, Function))

    def imports(self) -> Iterator[str]:
        """Every imported name in full, wherever the import stands, typing-only ones too."""
        return imports_in(ast.walk(self.tree))


def imports_in(nodes: Iterator[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def parse(text: str) -> Source:
    """A made-up module, to show that a rule can fail."""
    return Source(ROOT / "slipstream/example.py", text, ast.parse(text))


@functools.cache
def sources(*folders: str) -> list[Source]:
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    texts = [(path, path.read_text("utf-8")) for path in paths]
    return [Source(path, text, ast.parse(text)) for path, text in texts]
