"""The pin of the old runner: its folder may be deleted with its tests and this file, and nothing else breaks.

The core of the suite runs in a copy of the tree without them.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from sources import ROOT

GONE = ("slipstream/runner_v1", "tests/runner_v1", "tests/arch/test_deletable.py")
CORE = (
    "tests/arch/test_imports.py",
    "tests/arch/test_doors.py",
    "tests/unit/test_rows.py",
    "tests/unit/test_memory_plan.py",
    "tests/engine/test_bad_numbers.py",
    "tests/engine/test_async_scheduling.py",
    "tests/engine/test_llm.py",
)


def copy_without_the_old_runner(folder: Path) -> Path:
    ignore = shutil.ignore_patterns("__pycache__", ".*")
    for name in ("slipstream", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", folder)
    for name in GONE:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return folder


def python(tree: Path, *arguments: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(tree)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=tree, env=env, capture_output=True, text=True, timeout=500
    )


def test_the_core_of_the_suite_passes_without_the_old_runner(tmp_path):
    tree = copy_without_the_old_runner(tmp_path)
    found = python(tree, "-c", "import slipstream; print(slipstream.__file__)").stdout
    assert found.startswith(str(tree)), "the copy is what is tested"
    done = python(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", *CORE)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


def test_without_its_folder_the_old_runner_is_refused_by_name(tmp_path):
    tree = copy_without_the_old_runner(tmp_path)
    code = (
        "from slipstream.config.args import EngineArgs\n"
        "from slipstream.config.runner import has_runner_v1\n"
        "from slipstream.engine.plan import make_plan\n"
        "from tiny_models import make_tiny_model\n"
        "assert not has_runner_v1()\n"
        "model = str(make_tiny_model('model', 'llama'))\n"
        "print(make_plan(EngineArgs(model=model)).model_runner)\n"
        "make_plan(EngineArgs(model=model, model_runner='v1'))\n"
    )
    done = python(tree, "-c", f"import sys; sys.path.append('tests')\n{code}")
    assert done.stdout.split() == ["v2"], done.stderr
    assert "--model-runner=v1" in done.stderr.splitlines()[-1]
