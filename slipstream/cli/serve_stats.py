"""What the records of a run say: rates, percentiles of latencies, goodput; as text, JSON and a plot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slipstream.cli.bench_report import PERCENTILES, percentiles
from slipstream.cli.bench_serve import GOALS
from slipstream.cli.serve_client import Record

LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E"}
LATE_MS = 10.0  # sending later than this says that the load generator is the bottleneck
_BINS = 60


def figures(
    records: Sequence[Record], seconds: float, goals: Mapping[str, float], most_running: int
) -> dict[str, Any]:
    """Latencies in milliseconds, of requests that succeeded. goals: vLLM's metric to milliseconds."""
    good = [record for record in records if not record.error]
    tokens_in = sum(record.prompt_tokens for record in good)
    tokens_out = sum(record.output_tokens for record in good)
    late = [1e3 * (record.sent - record.due) for record in records]
    found: dict[str, Any] = {
        "seconds": seconds,
        "completed": len(good),
        "failed": len(records) - len(good),
        "errors": dict(Counter(record.error for record in records if record.error).most_common(5)),
        "most_running": most_running,
        "input_tokens": tokens_in,
        "output_tokens": tokens_out,
        "requests_per_second": len(good) / seconds,
        "output_tokens_per_second": tokens_out / seconds,
        "total_tokens_per_second": (tokens_in + tokens_out) / seconds,
        "milliseconds": {name: _spread(values) for name, values in latencies(good).items() if values},
        "late_ms": percentiles(late),
        "records": [_plain(record) for record in records],
    }
    if goals:
        kept = sum(keeps(record, goals) for record in good)
        found["goodput"] = {
            "goals_ms": dict(goals), "requests_per_second": kept / seconds, "share": kept / len(records)
        }  # fmt: skip
    return found


def latencies(records: Sequence[Record]) -> dict[str, list[float]]:
    """Milliseconds: one a request; of ITL one for each gap between two chunks, whatever tokens they hold."""
    return {
        "ttft": [1e3 * record.ttft for record in records],
        "tpot": [1e3 * record.tpot for record in records if record.tpot is not None],
        "itl": [1e3 * gap for record in records for gap in record.gaps()],
        "e2e": [1e3 * record.e2e for record in records],
    }


def keeps(record: Record, goals: Mapping[str, float]) -> bool:
    """Whether a request that succeeded is within all goals. One token has no time between tokens."""
    spent = ((getattr(record, GOALS[name]), limit) for name, limit in goals.items())
    return all(value is None or 1e3 * value <= limit for value, limit in spent)


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"mean": float(np.mean(values)), **percentiles(values)}


def _plain(record: Record) -> dict[str, Any]:
    return {
        "due": record.due, "sent": record.sent, "ended": record.ended,
        "ttft": record.ttft if record.arrived else None, "tpot": record.tpot if record.arrived else None,
        "prompt_tokens": record.prompt_tokens, "output_tokens": record.output_tokens, "error": record.error,
    }  # fmt: skip


def print_figures(found: Mapping[str, Any]) -> None:
    """As a table."""
    print(f"{found['completed']} requests in {found['seconds']:.2f} s, {found['failed']} failed, "
          f"at most {found['most_running']} at once")
    for name, unit in (("requests", "requests/s"), ("output_tokens", "output tok/s"),
                       ("total_tokens", "total tok/s")):
        print(f"  {found[f'{name}_per_second']:>12,.2f} {unit}")
    print(f"{'':<6}{'mean':>12}" + "".join(f"{column:>12}" for column in PERCENTILES) + "   milliseconds")
    for name, spread in found["milliseconds"].items():
        print(f"{LATENCIES[name]:<6}" + "".join(f"{value:>12,.2f}" for value in spread.values()))
    if "goodput" in found:
        goals = " ".join(f"{name}:{limit:g}" for name, limit in found["goodput"]["goals_ms"].items())
        share, rate = found["goodput"]["share"], found["goodput"]["requests_per_second"]
        print(f"goodput {rate:.2f} requests/s, {share:.1%} of all within {goals}")
    if found["late_ms"]["p99"] > LATE_MS:
        print(f"requests were sent up to {found['late_ms']['p99']:.0f} ms late (p99): the load generator "
              "itself is short of processor, and the figures are worse than the server's")
    for error, count in found["errors"].items():
        print(f"failed {count} times: {error}")


def draw(figure: Any, records: Sequence[Record]) -> None:
    """How many requests were as fast, and what ran and came out over time."""
    good = [record for record in records if not record.error]
    found = latencies(good)
    first, between, over = figure.subplots(1, 3)
    for axes, names, title in ((first, ("ttft", "e2e"), "requests"), (between, ("tpot", "itl"), "tokens")):
        for name in names:
            values = np.sort(found[name])
            if len(values):
                axes.plot(values, np.arange(1, len(values) + 1) / len(values), label=LATENCIES[name])
        axes.set(xlabel="milliseconds", ylabel="share as fast", title=title, xscale="log", ylim=(0, 1))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    end = max(record.ended for record in good)
    edges = np.linspace(0, end, _BINS + 1)
    per_chunk = [record.output_tokens / max(1, len(record.arrived)) for record in good]
    times = np.concatenate([record.arrived for record in good])
    weights = np.concatenate([np.full(len(r.arrived), w) for r, w in zip(good, per_chunk, strict=True)])
    tokens, _ = np.histogram(times, edges, weights=weights)
    over.plot(edges[:-1], tokens / np.diff(edges), label="output tokens/s")
    middle = (edges[:-1] + edges[1:]) / 2
    running = [sum(r.sent <= at < r.ended for r in good) for at in middle]
    beside = over.twinx()
    beside.plot(middle, running, color="0.6", label="running")
    beside.set(ylabel="requests running", ylim=(0, None))
    over.set(xlabel="seconds", ylabel="output tokens/s", title="over time", ylim=(0, None))
