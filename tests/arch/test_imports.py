"""Imports go down only, and `import slipstream` is light."""

import ast
import json
import subprocess
import sys

from sources import imports_in, sources

# A part may import its own modules and parts on lines above its own.
LEVELS = (
    ("contracts", "observe"),
    ("errors", "config", "kernels"),
    ("rows",),
    ("layers", "attention", "sampling"),
    ("models",),
    ("loading",),
    ("speculation",),
    ("text",),
    ("grammar",),
    ("runner", "scheduler"),
    ("runner_v1",),
    ("engine",),
    ("api",),
    ("server",),
    ("cli",),
    ("",),  # slipstream/__init__.py itself
)
LEVEL_OF = {part: level for level, parts in enumerate(LEVELS) for part in parts}
WITHOUT_TORCH = {
    "contracts", "observe", "errors", "config", "text", "grammar", "scheduler", "server", "cli", ""
}  # fmt: skip
DELETABLE = {"runner_v1"}
# All that the old runner takes of the new one: what a device's memory is, and how columns are declared.
RUNNER_V1_MAY_IMPORT = ("slipstream.runner.memory", "slipstream.rows.columns.", "slipstream.rows.stream.")
KERNELS_MAY_IMPORT = {"torch", "triton", "numpy", "slipstream"}
MODULES_OF_OURS = 2  # slipstream and what it needs at once
PACKAGE = sources("slipstream")


def part_of(imported: str) -> str | None:
    """The part of ours that a full name belongs to, None for others' packages."""
    words = imported.split(".")
    if words[0] != "slipstream":
        return None
    return words[1] if len(words) > 1 and words[1] in LEVEL_OF else ""


def test_every_part_has_its_level():
    assert {source.part for source in PACKAGE} | DELETABLE == set(LEVEL_OF)


def test_imports_go_down_only():
    wrong = [
        f"{source.name} imports {imported}"
        for source in PACKAGE
        for imported in source.imports()
        if (part := part_of(imported)) is not None
        and part != source.part
        and LEVEL_OF[part] >= LEVEL_OF[source.part]
    ]
    assert not wrong, "\n".join(wrong)


def test_parts_that_need_no_tensor_import_no_torch():
    wrong = [
        f"{source.name} imports {imported}"
        for source in PACKAGE
        for imported in source.imports()
        if source.part in WITHOUT_TORCH and imported.split(".")[0] in ("torch", "triton")
    ]
    assert not wrong, "\n".join(wrong)


def test_kernels_know_tensors_only():
    allowed = KERNELS_MAY_IMPORT | sys.stdlib_module_names
    wrong = [
        f"{source.name} imports {imported}"
        for source in PACKAGE
        for imported in source.imports()
        if source.part == "kernels" and imported.split(".")[0] not in allowed
    ]
    assert not wrong, "\n".join(wrong)


def test_nobody_imports_what_may_be_deleted():
    wrong = [
        f"{source.name} imports {imported}"
        for source in PACKAGE
        for imported in source.imports()
        if part_of(imported) in DELETABLE - {source.part}
    ]
    assert not wrong, "\n".join(wrong)


def test_the_old_runner_has_no_row_table_and_nothing_of_the_new_ones_steps():
    wrong = [
        f"{source.name} imports {imported}"
        for source in PACKAGE
        for imported in source.imports()
        if source.part == "runner_v1"
        and part_of(imported) in ("runner", "rows")
        and not imported.startswith(RUNNER_V1_MAY_IMPORT)
    ]
    assert not wrong, "\n".join(wrong)


def test_modules_do_not_import_each_other_in_a_circle():
    modules = {source.module: source for source in PACKAGE}
    edges = {
        name: {
            target
            for imported in imports_in(iter(source.tree.body))
            for target in (imported, imported.rpartition(".")[0])
            if target in modules and target != name
        }
        for name, source in modules.items()
    }
    while leaves := [name for name, targets in edges.items() if not targets]:
        for name in leaves:
            del edges[name]
        for targets in edges.values():
            targets.difference_update(leaves)
    assert not edges, f"in or behind a circle: {sorted(edges)}"


def test_importing_the_package_loads_next_to_nothing():
    code = (
        "import json, sys; before = set(sys.modules); import slipstream; "
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = json.loads(answer.stdout)
    heavy = {"torch", "transformers", "numpy", "triton", "tokenizers", "fastapi"}
    assert not heavy & {name.split(".")[0] for name in loaded}
    assert len([name for name in loaded if name.startswith("slipstream")]) <= MODULES_OF_OURS
    assert len(loaded) <= 30, loaded


def test_typing_only_imports_are_looked_at_too():
    text = "if TYPE_CHECKING:\n    from slipstream.runner import build\ndef f():\n    import torch\n"
    assert list(imports_in(ast.walk(ast.parse(text)))) == ["slipstream.runner.build", "torch"]
