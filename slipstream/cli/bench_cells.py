"""The cells of a comparison: what each asks for and got, its runs, and the engines that serve them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from slipstream.cli.bench_engine import count_outputs
from slipstream.cli.bench_stats import Effect, effect
from slipstream.contracts.sampling_params import SamplingParams

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM

# Attribute of a cell -> what the others are held against, where it is measured; else the first one is.
BASES = {"method": "none", "runner": "v1", "asynchrony": "off"}
DEFAULT = "default"  # of async scheduling: as the runner has it
KEPT = "kept alive, all of them at once"


@dataclass(slots=True, kw_only=True)
class Run:
    """One batch, all requests given at once. Milliseconds are medians over its requests: tpot_ms a token
    after the first (None where no request has two), ttft_ms to the first one. acceptance: share of verified
    drafts that were taken; accepted_length: tokens of a request's step that verified drafts; None without
    drafts. order: which run of the comparison this was, from 0."""

    repeat: int
    order: int
    seconds: float
    output_tokens: int
    tokens_per_second: float
    tpot_ms: float | None
    ttft_ms: float
    acceptance: float | None = None
    accepted_length: float | None = None


@dataclass(slots=True, kw_only=True)
class Cell:
    """method, runner, asynchrony ("on", "off" or DEFAULT): as asked. plan: what the engine chose, decision ->
    {"value", "reason", "flag"}; empty where refused, which says why, is not. runs: by concurrency."""

    method: str
    runner: str
    asynchrony: str
    plan: dict[str, dict[str, Any]] = field(default_factory=dict)
    refused: str = ""
    runs: dict[int, list[Run]] = field(default_factory=dict)
    starts: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.method}, {self.column}"

    @property
    def column(self) -> str:
        """The runner, and async scheduling as it is where that is known."""
        got = f"{self.on_or_off} by default" if self.plan else "as the runner has it"
        return f"{self.runner}, async {got if self.asynchrony == DEFAULT else self.asynchrony}"

    @property
    def on_or_off(self) -> str:
        return "on" if self.plan["async_scheduling"]["value"] else "off"

    def values(self, concurrency: int, metric: str) -> list[float]:
        """Of each repeat, in order; empty where there is no such figure, or the cell is refused (perhaps
        after some of its runs)."""
        if self.refused:
            return []
        found = sorted(self.runs.get(concurrency, []), key=lambda run: run.repeat)
        return [value for run in found if (value := getattr(run, metric)) is not None]


class Found(NamedTuple):
    """An effect: attribute went from base to changed, within what both cells share. also: what else differs
    between them, empty where nothing does."""

    attribute: str
    within: str
    base: str
    changed: str
    also: str
    effect: Effect


def measure(llm: LLM, prompts: list[Any], params: list[SamplingParams], repeat: int, order: int) -> Run:
    """Raises EngineError where a request failed."""
    gc.collect()  # so that nobody pays for another engine's leftovers
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    tokens, first, later = count_outputs(outputs), [], []
    drafts = drafted = accepted = 0
    for output in outputs:
        times = output.metrics
        assert times is not None and times.first_token_time is not None and times.finished_time is not None
        first.append(times.first_token_time - times.arrival_time)
        drafts, drafted = drafts + times.num_drafts, drafted + times.draft_tokens
        accepted += times.accepted_tokens
        if (after := len(output.outputs[0].token_ids) - 1) > 0:
            later.append((times.finished_time - times.first_token_time) / after)
    return Run(
        repeat=repeat,
        order=order,
        seconds=seconds,
        output_tokens=tokens,
        tokens_per_second=tokens / seconds,
        tpot_ms=1e3 * median(later) if later else None,
        ttft_ms=1e3 * median(first),
        acceptance=accepted / drafted if drafted else None,
        accepted_length=1 + accepted / drafts if drafts else None,
    )


class Visit(NamedTuple):
    repeat: int
    concurrency: int
    cell: Cell


def visits(cells: Sequence[Cell], concurrency: Sequence[int], repeats: int, kept: bool) -> Iterator[Visit]:
    """Every cell in turn: each repeat in the other direction than the last, each second one from the next
    cell on, so that none is always first, last or in the middle. Where an engine is built for its turn (not
    kept), it does every concurrency in it."""
    for repeat in range(repeats):
        first = repeat // 2 % max(len(cells), 1)
        turn = [*cells[first:], *cells[:first]]
        if repeat % 2:
            turn.reverse()
        if kept:
            yield from (Visit(repeat, count, cell) for count in concurrency for cell in turn)
        else:
            yield from (Visit(repeat, count, cell) for cell in turn for count in concurrency)


def effects(cells: Sequence[Cell], concurrency: int, metric: str) -> Iterator[Found]:
    """What each attribute does with the others as they are: cells that differ in it alone, by what was
    asked."""
    measured = [cell for cell in cells if cell.values(concurrency, metric)]
    for attribute, preferred in BASES.items():
        others = [name for name in BASES if name != attribute]
        groups: dict[tuple[str, ...], list[Cell]] = {}
        for cell in measured:
            groups.setdefault(tuple(getattr(cell, name) for name in others), []).append(cell)
        for group in groups.values():
            base = next((cell for cell in group if getattr(cell, attribute) == preferred), group[0])
            for cell in group:
                if cell is not base:
                    pair = base.values(concurrency, metric), cell.values(concurrency, metric)
                    yield _found(attribute, base, cell, effect(*pair))


def _found(attribute: str, base: Cell, changed: Cell, size: Effect) -> Found:
    shared = [getattr(base, name) for name in ("method", "runner") if name != attribute]
    also, got = "", (base.on_or_off, changed.on_or_off)
    if attribute != "asynchrony":
        if got[0] == got[1]:
            shared.append(f"async {got[0]}")
        else:
            also = f"async scheduling differs too: {got[0]} against {got[1]}"
    names = getattr(base, attribute), getattr(changed, attribute)
    return Found(attribute, ", ".join(shared), *names, also, size)


class Engines:
    """An LLM a cell: built once and kept where all fit into memory together, else built for each turn. how
    says which. start(cell) builds a warm one and raises ValueError that becomes cell.refused. shortage()
    says why there is no room for another beside those there are; empty: it may be tried."""

    def __init__(
        self, cells: Sequence[Cell], start: Callable[[Cell], LLM], shortage: Callable[[], str]
    ) -> None:
        self._start = start
        self._shortage = shortage
        self._live: dict[str, LLM] = {}
        self.kept, self.how = True, KEPT
        while self.kept:
            missing = [cell for cell in cells if not cell.refused and cell.name not in self._live]
            if not missing:
                break
            self._join(missing[0])

    def _join(self, cell: Cell) -> None:
        """Beside the others; where that fails, alone: what fails even so is refused, what does not says that
        memory is short."""
        if not self._live:
            self._alone(cell)
            return
        reason = self._shortage()
        if not reason:
            try:
                self._live[cell.name] = self._start(cell)
                return
            except (ValueError, MemoryError, RuntimeError) as error:
                reason = str(error)
        self.close()
        if self._alone(cell):
            self.kept = False
            self.how = f"built anew for each turn: {cell.name} does not fit beside the others ({reason})"

    def _alone(self, cell: Cell) -> bool:
        try:
            self._live[cell.name] = self._start(cell)
        except ValueError as error:
            cell.refused = str(error)
        return not cell.refused

    def get(self, cell: Cell) -> LLM | None:
        """None where the cell is refused."""
        if cell.name not in self._live and not cell.refused:
            self.close()
            self._alone(cell)
        return self._live.get(cell.name)

    def close(self) -> None:
        """Ends all engines and frees what they held."""
        for llm in self._live.values():
            llm.close()
        self._live.clear()
        gc.collect()
