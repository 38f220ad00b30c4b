"""What benchmarks/gpu.sh logged, as a table and as JSON: both engines, their ratio, and the goals.

    python benchmarks/gpu_table.py MODEL --ours LOG [--first LOG] [--variant NAME=LOG ...] [--theirs LOG]
        [--json FILE]

A log's lines that begin with RESULT hold a JSON object for each load. ratio: how many times faster ours did
the same work. --first: the log of a start before that of --ours, for the time of a first start. --variant:
of ours with other arguments, which gets a table of its own; its price is the time beside ours without them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

Results = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Goal:
    """most_ms: a step; least_tok_s: output tokens a second; most_s: seconds; least_ratio: over the peer;
    near_load, most_over: at most this share slower than our own other load."""

    most_ms: float | None = None
    least_tok_s: float | None = None
    most_s: float | None = None
    least_ratio: float | None = None
    near_load: str | None = None
    most_over: float = 0.0


GOALS: dict[str, dict[str, Goal]] = {
    "Qwen3-0.6B": {
        "first startup": Goal(most_s=25),
        "startup": Goal(most_s=12),
        "bs1": Goal(most_ms=0.70, least_ratio=3.4),
        "bs8": Goal(most_ms=1.0, least_ratio=2.7),
        "bs64": Goal(most_ms=1.65, least_ratio=2.3),
        "bs256": Goal(most_ms=4.1, least_ratio=2.0),
        "bs256-sampled": Goal(near_load="bs256", most_over=0.05),
        "nano": Goal(least_tok_s=31_000, least_ratio=1.55),
        "prefill": Goal(least_ratio=1.1),
        "long": Goal(least_ratio=1.1),
    },
    "Llama-3.1-8B": {
        "first startup": Goal(most_s=30),
        "startup": Goal(most_s=18),
        "bs1": Goal(most_ms=3.85, least_ratio=1.25),
        "bs64": Goal(most_ms=4.9, least_ratio=1.3),
        "bs256": Goal(most_ms=9.5, least_ratio=1.4),
        "nano": Goal(least_tok_s=11_300, least_ratio=1.15),
        "prefill": Goal(least_ratio=1.1),
        "long": Goal(least_ratio=1.1),
    },
}


@dataclass
class Row:
    """One load. seconds: of the whole; missed: goals not reached, in words; open: those that need the
    peer, which did not run; price: of a variant, its time over ours without."""

    load: str
    seconds: float
    ms_per_step: float | None
    tok_s: float | None
    peer_seconds: float | None
    ratio: float | None
    goal: Goal
    missed: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    price: float | None = None


def read_results(log: str) -> Results:
    """Load -> fields. Seconds of startup are import and init together."""
    found: Results = {}
    for line in log.splitlines():
        if line.startswith("RESULT "):
            fields = json.loads(line.removeprefix("RESULT "))
            if fields["load"] == "startup":
                fields["seconds"] = fields["import_s"] + fields["init_s"]
            found[fields["load"]] = fields
    return found


def compare(model: str, ours: Results, theirs: Results, first: Results) -> list[Row]:
    """Rows in the order of ours, the first start before them."""
    goals = GOALS.get(model, {})
    loads = ({"first startup": first["startup"]} if first else {}) | ours
    rows = []
    for load, fields in loads.items():
        peer = theirs.get(load.removeprefix("first "), {}).get("seconds")
        ratio = None if peer is None else peer / fields["seconds"]
        row = Row(load, fields["seconds"], fields.get("ms_per_step"), fields.get("tok_s"), peer, ratio,
                  goals.get(load, Goal()))
        _judge(row, ours)
        rows.append(row)
    return rows


def price(rows: list[Row], ours: Results) -> list[Row]:
    """A variant's rows with what it costs."""
    for row in rows:
        if row.load in ours:
            row.price = row.seconds / ours[row.load]["seconds"]
    return rows


def _judge(row: Row, ours: Results) -> None:
    goal = row.goal
    if goal.most_ms is not None and (row.ms_per_step is None or row.ms_per_step > goal.most_ms):
        row.missed.append(f"at most {goal.most_ms:g} ms a step")
    if goal.least_tok_s is not None and (row.tok_s is None or row.tok_s < goal.least_tok_s):
        row.missed.append(f"at least {goal.least_tok_s:,.0f} tok/s")
    if goal.most_s is not None and row.seconds > goal.most_s:
        row.missed.append(f"at most {goal.most_s:g} s")
    if goal.least_ratio is not None:
        if row.ratio is None:
            row.open.append(f"at least {goal.least_ratio:g}x vLLM")
        elif row.ratio < goal.least_ratio:
            row.missed.append(f"at least {goal.least_ratio:g}x vLLM")
    if goal.near_load is not None and goal.near_load in ours:
        over = row.seconds / ours[goal.near_load]["seconds"] - 1
        if over > goal.most_over:
            row.missed.append(f"within {goal.most_over:.0%} of {goal.near_load}, is {over:.1%} over")


def table(rows: list[Row]) -> str:
    priced = any(row.price is not None for row in rows)
    lines = [f"{'load':<14}{'ms/step':>9}{'tok/s':>10}{'seconds':>9}{'vLLM s':>9}{'ratio':>7}"]
    lines[0] += f"{'price':>7}  goals" if priced else "  goals"
    for row in rows:
        cells = [_cell(row.ms_per_step, 9, 3), _cell(row.tok_s, 10, 0), _cell(row.seconds, 9, 3)]
        cells += [_cell(row.peer_seconds, 9, 3), _cell(row.ratio, 7, 2)]
        cells += [_cell(row.price, 7, 2)] if priced else []
        verdicts = [f"missed: {text}" for text in row.missed] + [f"open: {text}" for text in row.open]
        met = "reached" if row.goal != Goal() else ""
        lines.append(f"{row.load:<14}{''.join(cells)}  {'; '.join(verdicts) or met}")
    return "\n".join(lines)


def _cell(value: float | None, width: int, digits: int) -> str:
    return f"{'' if value is None else f'{value:,.{digits}f}':>{width}}"


def facts() -> dict[str, Any]:
    """Machine and versions."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        gpu = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        gpu = "unknown"
    versions = {}
    for package in ("torch", "triton"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpu": gpu, "machine": platform.machine(), "python": platform.python_version(), **versions,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="name of the model, for its goals")
    parser.add_argument("--ours", type=Path, required=True)
    parser.add_argument("--first", type=Path)
    parser.add_argument("--variant", action="append", default=[], help="NAME=LOG")
    parser.add_argument("--theirs", type=Path)
    parser.add_argument("--cache", default="", help="kernels before the first start: empty or filled")
    parser.add_argument("--command", default="", help="what was run, for the record")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    def read(path: Path | None) -> Results:
        return read_results(path.read_text("utf-8", "replace")) if path else {}

    ours, theirs, first = read(options.ours), read(options.theirs), read(options.first)
    variants = {name: read(Path(log)) for name, _, log in (each.partition("=") for each in options.variant)}
    rows = compare(options.model, ours, theirs, first)
    print(f"{options.model}\n{table(rows)}")
    of_variants = {}
    for name, results in variants.items():
        of_variants[name] = price(compare(options.model, results, theirs, {}), ours)
        print(f"{options.model}, {name}\n{table(of_variants[name])}")
    if options.json:
        record = {
            "benchmark": "gpu", "model": options.model, "command": options.command, **facts(),
            "kernel_cache_at_first_start": options.cache, "rows": [asdict(row) for row in rows],
            "variant_rows": {name: [asdict(row) for row in rows] for name, rows in of_variants.items()},
            "slipstream": ours, "variants": variants, "vllm": theirs,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
