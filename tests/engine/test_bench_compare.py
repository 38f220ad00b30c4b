"""`slipstream bench compare`: its statistics on hand-made numbers, its order of runs, its engines, and
comparisons of one runner; tests/runner_v1 has one of both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from text_model import make_text_model

from slipstream.cli.bench_cells import DEFAULT, Cell, Engines, Run, effects, visits
from slipstream.cli.bench_compare import listed
from slipstream.cli.bench_report import positive
from slipstream.cli.bench_stats import WITHIN, chance, effect, spread
from slipstream.cli.main import main

SMALL = ["--max-model-len", "96", "--max-num-seqs", "8", "--dtype", "float32", "--no-progress"]
LOAD = ["--input-len", "5:9", "--output-len", "6", "--concurrency", "1,3"]
V2 = ["--runners", "v2"]


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return make_text_model(tiny_model)


def a_cell(method: str, runner: str, asynchrony: str = DEFAULT, speeds: list[float] | None = None) -> Cell:
    """A cell as if it had run one request at a time; async is on where v2 is free to choose."""
    on = asynchrony == "on" or (asynchrony == DEFAULT and runner == "v2")
    cell = Cell(method=method, runner=runner, asynchrony=asynchrony)
    cell.plan = {"async_scheduling": {"value": on, "reason": "", "flag": ""}}
    cell.runs[1] = [
        Run(
            repeat=i, order=i, seconds=1, output_tokens=8, tokens_per_second=speed, tpot_ms=1, ttft_ms=1
        )
        for i, speed in enumerate(speeds or [1.0])
    ]  # fmt: skip
    return cell


def test_a_spread_is_median_least_and_greatest() -> None:
    assert spread([5.0, 1.0, 2.0]) == (2.0, 1.0, 5.0)
    assert spread([4.0, 2.0]) == (3.0, 2.0, 4.0)


def test_an_effect_is_a_ratio_of_medians_with_the_spread_of_pairs() -> None:
    found = effect([10, 20, 40, 50, 100], [12, 22, 36, 65, 130])
    assert found.ratio == pytest.approx(36 / 40)
    assert (found.low, found.high, found.pairs) == (pytest.approx(0.9), pytest.approx(1.3), 5)
    assert found.verdict(more_is_faster=True) == WITHIN


def test_a_known_effect_is_found_under_a_drift_that_pairs_share() -> None:
    drift = np.linspace(100, 200, 7)  # the machine becomes twice as fast, which is more than the effect
    found = effect(list(drift), list(drift * 1.1))
    assert found == (pytest.approx(1.1), pytest.approx(1.1), pytest.approx(1.1), 7)
    assert found.verdict(more_is_faster=True) == "faster" and found.verdict(more_is_faster=False) == "slower"
    back = effect(list(drift * 1.1), list(drift))
    assert back.verdict(more_is_faster=True) == "slower" and back.verdict(more_is_faster=False) == "faster"


def test_noise_alone_is_called_a_difference_as_rarely_as_coins_agree() -> None:
    random = np.random.default_rng(1)
    noise = np.exp(0.05 * random.standard_normal((4000, 2, 7)))
    called = sum(effect(list(a), list(b)).verdict(True) != WITHIN for a, b in noise)
    expected = 4000 * 2 * 0.5**7  # seven coins, all heads or all tails
    assert chance(7) == 2 * 0.5**7
    assert abs(called - expected) < 4 * expected**0.5


@pytest.mark.parametrize(
    ("pairs", "least", "covered"), [(5, 1, 0.9375), (10, 2, 0.9785), (15, 4, 0.9648), (20, 6, 0.9586)]
)
def test_an_effects_interval_is_that_of_sign_test_tables(pairs: int, least: int, covered: float) -> None:
    """least: which of the sorted values, from 1, a 95 % interval of the median begins with (of five values:
    the widest there is)."""
    found = effect([1.0] * pairs, [float(rank) for rank in range(pairs, 0, -1)])
    assert (found.low, found.high) == (least, pairs + 1 - least)
    assert chance(pairs) == pytest.approx(1 - covered, abs=5e-5)


@pytest.mark.parametrize("changed", [[1.0] * 6, [1.0, 1.5, 1.5, 1.5, 1.5, 1.5]])
def test_a_spread_that_touches_1_is_no_difference(changed: list[float]) -> None:
    assert effect([1.0] * 6, changed).verdict(True) == WITHIN


def test_a_few_repeats_tell_nothing_however_clear() -> None:
    assert effect([1.0] * 4, [9.0] * 4).verdict(True) == "too few repeats to tell (4, not 5)"
    assert effect([1.0] * 5, [9.0] * 5).verdict(True) == "faster"


def test_effects_are_of_cells_that_differ_in_one_thing() -> None:
    speeds = {("none", "v1"): 10.0, ("none", "v2"): 20.0, ("ngram", "v1"): 15.0, ("ngram", "v2"): 26.0}
    cells = [a_cell(*key, "off", [speed] * 5) for key, speed in reversed(speeds.items())]
    found = {
        (one.attribute, one.within): (one.base, one.changed, one.effect.ratio)
        for one in effects(cells, 1, "tokens_per_second")
    }
    assert found == {
        ("method", "v1, async off"): ("none", "ngram", 1.5),
        ("method", "v2, async off"): ("none", "ngram", 1.3),
        ("runner", "none, async off"): ("v1", "v2", 2.0),
        ("runner", "ngram, async off"): ("v1", "v2", pytest.approx(26 / 15)),
    }
    assert not any(one.also for one in effects(cells, 1, "tokens_per_second"))


def test_an_effect_says_where_async_scheduling_differs_too() -> None:
    (found,) = effects([a_cell("none", "v1"), a_cell("none", "v2")], 1, "tokens_per_second")
    assert found.attribute == "runner" and found.also == "async scheduling differs too: off against on"


def test_async_scheduling_is_an_effect_of_its_own() -> None:
    cells = [a_cell("none", "v2", "on", [3.0]), a_cell("none", "v2", "off", [2.0])]
    (found,) = effects(cells, 1, "tokens_per_second")
    assert found[:4] == ("asynchrony", "none, v2", "off", "on") and found.effect.ratio == 1.5


def test_a_cell_refused_half_way_has_no_effect() -> None:
    cells = [a_cell("none", "v1", "off", [1.0, 2.0]), a_cell("none", "v2", "off", [3.0])]
    cells[1].refused = "no room any more"
    assert not list(effects(cells, 1, "tokens_per_second"))


def test_cells_take_turns_in_alternating_order() -> None:
    cells = [a_cell("none", "v1"), a_cell("none", "v2")]
    order = [(v.repeat, v.concurrency, v.cell.runner) for v in visits(cells, [1, 8], 2, kept=True)]
    assert order == [
        (0, 1, "v1"), (0, 1, "v2"), (0, 8, "v1"), (0, 8, "v2"),
        (1, 1, "v2"), (1, 1, "v1"), (1, 8, "v2"), (1, 8, "v1"),
    ]  # fmt: skip
    rebuilt = [(v.concurrency, v.cell.runner) for v in visits(cells, [1, 8], 1, kept=False)]
    assert rebuilt == [(1, "v1"), (8, "v1"), (1, "v2"), (8, "v2")]


@pytest.mark.parametrize("names", ["ab", "abc", "abcd"])
def test_every_cell_has_every_place_equally_often(names: str) -> None:
    cells, repeats = [a_cell(name, "v2") for name in names], 2 * len(names)
    methods = [visit.cell.method for visit in visits(cells, [1], repeats, kept=True)]
    for place in range(len(names)):
        assert sorted(methods[place :: len(names)]) == sorted(names * 2)


class Machine:
    """Starts engines as long as there is room for so many; cells of `broken` runners never start."""

    def __init__(self, room: int, broken: str = "", foreseen: str = "") -> None:
        self.room, self.broken, self.foreseen = room, broken, foreseen
        self.live: list[Any] = []
        self.starts = 0

    def start(self, cell: Cell) -> Any:
        if cell.runner == self.broken:
            raise ValueError("cannot be")
        if len(self.live) == self.room:
            raise ValueError("no room")
        self.starts += 1
        self.live.append(self)
        return self

    def shortage(self) -> str:
        return self.foreseen if self.live else ""

    def close(self) -> None:
        self.live.remove(self)


def test_engines_are_built_once_where_all_fit() -> None:
    machine, cells = Machine(room=2), [a_cell("none", "v1"), a_cell("none", "v2")]
    engines = Engines(cells, machine.start, machine.shortage)
    assert engines.kept and "kept alive" in engines.how
    assert all(engines.get(cell) is machine for cell in cells * 3) and machine.starts == 2
    engines.close()
    assert not machine.live


@pytest.mark.parametrize(
    "machine_of", [lambda: Machine(room=1), lambda: Machine(room=2, foreseen="no room")]
)
def test_engines_are_built_for_each_turn_where_memory_is_short_and_it_says_so(
    machine_of: Callable[[], Machine],
) -> None:
    machine, cells = machine_of(), [a_cell("none", "v1"), a_cell("none", "v2")]
    engines = Engines(cells, machine.start, machine.shortage)
    assert not engines.kept and "built anew" in engines.how and "no room" in engines.how
    assert all(engines.get(cell) is machine and len(machine.live) == 1 for cell in cells * 3)
    assert not any(cell.refused for cell in cells)


def test_an_engine_that_cannot_start_alone_is_refused_and_the_others_are_kept() -> None:
    machine, cells = Machine(room=2, broken="v2"), [a_cell("none", "v1"), a_cell("none", "v2")]
    engines = Engines(cells, machine.start, machine.shortage)
    assert engines.kept and [cell.refused for cell in cells] == ["", "cannot be"]
    assert engines.get(cells[0]) is machine and engines.get(cells[1]) is None


def test_cells_get_equal_requests_and_repeats_get_new_ones(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slipstream.engine.llm import LLM

    seen: dict[bool | None, list[Any]] = {False: [], True: []}
    tokens: dict[bool | None, list[Any]] = {False: [], True: []}
    generate = LLM.generate

    def watch(llm: LLM, prompts: Any, params: Any, **others: Any) -> Any:
        outputs = generate(llm, prompts, params, **others)
        seen[llm.args.async_scheduling].append([
            (p["prompt_token_ids"], one.seed, one.max_tokens) for p, one in zip(prompts, params, strict=True)
        ])  # fmt: skip
        tokens[llm.args.async_scheduling].append([output.outputs[0].token_ids for output in outputs])
        return outputs

    monkeypatch.setattr(LLM, "generate", watch)
    flags = [*SMALL, *LOAD, *V2, "--async", "on,off", "--repeats", "3"]
    assert main(["bench", "compare", str(model), *flags]) == 0
    assert seen[False] == seen[True] and len(seen[False]) == 2 + 3 * 2
    prompts = [str(prompt) for batch in seen[False] for prompt, _, _ in batch]
    assert len(set(prompts)) == len(prompts), "a prefix cache finds nothing"
    assert tokens[False] == tokens[True], "the same seeds draw the same tokens"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--concurrency", "9"], "--max-num-seqs=8"),
        (["--input-len", "90", "--output-len", "7"], "--max-model-len=96"),
        (["--runners", "v3"], "--runners"),
        (["--async", "maybe"], "--async"),
        (["--methods", "none,none"], "--methods"),
        (["--concurrency", "0"], "--concurrency"),
        (["--model-runner", "v1"], "--model-runner"),
        (["--methods", "mtp"], "every cell is refused"),
        (["--methods", "eagle3"], "model=None: method eagle3 needs"),
        (["--drafters", "eagle3=here"], "--drafters: eagle3 is none of --methods"),
        (["--drafters", "eagle3"], "must be METHOD=FOLDER"),
        (["--methods", "magic"], "method must be one of"),
        (["--text", "/no/such/text"], "/no/such/text"),
        (["--num-gpu-blocks-override", "3"], "--num-gpu-blocks-override"),
    ],
)
def test_what_cannot_be_compared_is_an_error_that_names_it(
    model: Path, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["bench", "compare", str(model), *SMALL, *LOAD, *V2, *flags])
    except SystemExit as end:
        status = int(end.code or 0)
    assert status == 2 and words in capsys.readouterr().err


def test_lists_have_commas() -> None:
    assert listed(positive)("1, 8,64") == [1, 8, 64]
