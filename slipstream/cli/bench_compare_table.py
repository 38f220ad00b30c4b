"""A comparison as text, as figures for JSON and as a plot."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from slipstream.cli.bench_cells import Cell, Found, effects
from slipstream.cli.bench_stats import MIN_PAIRS, chance, spread

PLAN_LINES = ("model_runner", "async_scheduling", "speculation")
ATTRIBUTES = {"method": "method", "runner": "runner", "asynchrony": "async scheduling"}
WIDTH = 110
HEAD = 26
CELL = 36


class Metric(NamedTuple):
    """more_is_faster: None where it says nothing of speed."""

    label: str
    form: str
    more_is_faster: bool | None


METRICS = {
    "tokens_per_second": Metric("output tokens/s", ",.1f", True),
    "tpot_ms": Metric("TPOT ms", ",.2f", False),
    "ttft_ms": Metric("TTFT ms", ",.2f", False),
    "acceptance": Metric("acceptance", ".1%", None),
    "accepted_length": Metric("tokens a draft", ".2f", None),
}
SPEEDS = {name: metric for name, metric in METRICS.items() if metric.more_is_faster is not None}


def print_cells(cells: Sequence[Cell]) -> None:
    """Each cell's plan, or why there is none."""
    for cell in cells:
        print(cell.name)
        if cell.refused:
            _wrapped("  refused: ", cell.refused)
        for name in PLAN_LINES if cell.plan and not cell.refused else ():
            value, reason = cell.plan[name]["value"], cell.plan[name]["reason"]
            shown = ("on" if value else "off") if isinstance(value, bool) else value
            _wrapped(f"  {name:<17}{shown:<5} ", reason)


def print_results(cells: Sequence[Cell], concurrency: Sequence[int]) -> None:
    """A table for each concurrency, and the effects under it."""
    notes = [cell for cell in cells if cell.refused]
    for count in concurrency:
        print(f"\n{count} at once; median (least .. greatest) of the repeats")
        _print_table(cells, count, notes)
        print()
        found = [(name, one) for name in SPEEDS for one in effects(cells, count, name)]
        for attribute, title in ATTRIBUTES.items():
            lines = [_sentence(one, name) for name, one in found if one.attribute == attribute]
            if not lines and len({getattr(cell, attribute) for cell in cells}) > 1:
                lines = ["nothing to compare: no two measured cells differ in it alone"]
            if lines:
                print(f"effect of {title}", *lines, sep="\n  ")
    for number, cell in enumerate(notes, start=1):
        _wrapped(f"[{number}] {cell.name}: refused: ", cell.refused)
    pairs = max((len(runs) for cell in cells for runs in cell.runs.values()), default=0)
    if pairs:
        print(
            "\nAn effect is the ratio of medians (where the median ratio of two runs of one repeat lies).\n"
            "It is a difference only where 1 is outside of that. Noise alone puts it there in\n"
            f"{chance(pairs):.1%} of lines with --repeats {pairs}; with under {MIN_PAIRS} none is called."
        )


def _print_table(cells: Sequence[Cell], count: int, notes: Sequence[Cell]) -> None:
    columns: dict[tuple[str, str], str] = {}
    for cell in cells:
        key = cell.runner, cell.asynchrony
        if key not in columns or (cell.plan and not cell.refused):
            columns[key] = cell.column
    print(" " * HEAD + "".join(f"{title:<{CELL}}" for title in columns.values()).rstrip())
    for method in dict.fromkeys(cell.method for cell in cells):
        row = {(cell.runner, cell.asynchrony): cell for cell in cells if cell.method == method}
        for name, metric in METRICS.items():
            label = method if name == "tokens_per_second" else ""
            texts = [_text(row[key], count, name, notes) for key in columns]
            print(f"{label:<10}{metric.label:<{HEAD - 10}}" + "".join(f"{t:<{CELL}}" for t in texts).rstrip())


def _text(cell: Cell, count: int, name: str, notes: Sequence[Cell]) -> str:
    if cell.refused:
        return f"refused [{notes.index(cell) + 1}]"
    values = cell.values(count, name)
    if not values:
        return "-"
    form = METRICS[name].form
    middle, low, high = spread(values)
    return f"{middle:{form}} ({low:{form}} .. {high:{form}})"


def _sentence(found: Found, name: str) -> str:
    more_is_faster = METRICS[name].more_is_faster
    assert more_is_faster is not None
    what = f"{found.changed} / {found.base} within {found.within}"
    size = f"{found.effect.ratio:.3f} ({found.effect.low:.3f} .. {found.effect.high:.3f})"
    verdict = found.effect.verdict(more_is_faster) + (f"; {found.also}" if found.also else "")
    return f"{METRICS[name].label:<16} {what:<36} {size:<24} {verdict}"


def figures(cells: Sequence[Cell], concurrency: Sequence[int]) -> dict[str, Any]:
    """Every run, the medians and the effects."""
    return {
        "cells": [_cell_figures(cell) for cell in cells],
        "effects": [
            {
                "concurrency": count,
                "metric": name,
                **found._asdict(),
                "effect": found.effect._asdict(),
                "verdict": found.effect.verdict(bool(metric.more_is_faster)),
            }
            for count in concurrency
            for name, metric in SPEEDS.items()
            for found in effects(cells, count, name)
        ],
    }


def _cell_figures(cell: Cell) -> dict[str, Any]:
    summary = {
        count: {name: spread(values)._asdict() for name in METRICS if (values := cell.values(count, name))}
        for count in cell.runs
    }
    return {"name": cell.name, **asdict(cell), "summary": summary}


def draw(figure: Any, cells: Sequence[Cell], concurrency: Sequence[int]) -> None:
    """Each cell's median over concurrency; bars from the least to the greatest."""
    places = range(len(concurrency))
    measured = [cell for cell in cells if cell.runs and not cell.refused]
    for axes, (name, metric) in zip(figure.subplots(1, len(SPEEDS)), SPEEDS.items(), strict=True):
        for index, cell in enumerate(measured):
            shift = 0.1 * (index - (len(measured) - 1) / 2)  # so that bars do not cover each other
            found = {place: values for place in places if (values := cell.values(concurrency[place], name))}
            spreads = [spread(values) for values in found.values()]
            axes.errorbar(
                [place + shift for place in found],
                [one.median for one in spreads],
                yerr=[
                    [one.median - one.low for one in spreads],
                    [one.high - one.median for one in spreads],
                ],
                fmt="o-", capsize=3, label=cell.name,
            )  # fmt: skip
        axes.set(title=metric.label, xlabel="requests at once", ylim=(0, None))
        axes.set_xticks(list(places), [str(count) for count in concurrency])
        axes.grid(alpha=0.3)
    if measured:
        axes.legend(fontsize="small")


def _wrapped(start: str, text: str) -> None:
    print(textwrap.fill(text, WIDTH, initial_indent=start, subsequent_indent="      "))
