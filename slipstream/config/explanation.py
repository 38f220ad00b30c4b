"""The plan and vLLM's column as a table for people and as plain data for machines. `slipstream explain`, the
engine's log and the server's /v1/engine/plan all say it through here."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from slipstream.config.plan import Choice

VLLM_KEY = "vllm_0_31"
LOG_COLUMNS = 160
_NARROWEST = 72
_VALUE_COLUMNS = 26
_REASON_COLUMNS = 28  # at least: the longest flag in its brackets
_GAP = "  "


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """choices: ours by decision; vllm: the same of vLLM 0.31.0. error: why there is no plan; choices is empty
    then."""

    vllm: Mapping[str, Choice]
    choices: Mapping[str, Choice] = field(default_factory=dict)
    error: str = ""

    def plain(self) -> dict[str, Any]:
        """decision -> {"value", "reason", "flag"}, and under vllm_0_31 the same; "error" where there is
        one."""
        ours: dict[str, Any] = {"error": self.error} if self.error else plain(self.choices)
        return {**ours, VLLM_KEY: plain(self.vllm)}

    def table(self, columns: int) -> list[str]:
        """Lines of at most `columns` characters (72 at least): decision, value, reason [flag]."""
        error = {"error": Choice(value="", reason=self.error)}
        ours = [_row(*part) for part in (error if self.error else self.choices).items()]
        theirs = [_row(*part) for part in self.vllm.items()]
        names, values = (max(len(row[i]) for row in ours + theirs) for i in range(2))
        room = max(columns, _NARROWEST) - names - 2 * len(_GAP)
        values = min(values, _VALUE_COLUMNS, room - _REASON_COLUMNS)
        widths = (names, values, room - values)
        lines = ["Slipstream", *(line for row in ours for line in _wrap(row, widths))]
        return [*lines, "vLLM 0.31.0 would choose", *(line for row in theirs for line in _wrap(row, widths))]


def plain(choices: Mapping[str, Choice]) -> dict[str, dict[str, Any]]:
    return {name: asdict(choice) for name, choice in choices.items()}


def _row(name: str, choice: Choice) -> tuple[str, str, str]:
    return name, _text(choice.value), choice.reason + (f" [{choice.flag}]" if choice.flag else "")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(part)}" for name, part in value.items() if part is not None)
    return str(value)


def _wrap(row: tuple[str, ...], widths: tuple[int, ...]) -> list[str]:
    """A row of cells, each wrapped within its width; flags stay whole."""
    cells = [
        textwrap.wrap(cell, width, break_on_hyphens=False) or [""]
        for cell, width in zip(row, widths, strict=True)
    ]
    height = max(map(len, cells))
    padded = [cell + [""] * (height - len(cell)) for cell in cells]
    lines = zip(*padded, strict=True)
    return [
        _GAP.join(piece.ljust(width) for piece, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
