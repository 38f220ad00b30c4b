"""`slipstream bench compare MODEL`: speculation methods against model runners, on the same requests, the two
effects apart.

Every cell (method, runner, async scheduling) gets what it asks for or is refused with the reason; none is
changed. Cells take turns, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from slipstream.cli.bench_cells import DEFAULT, Cell, Engines, measure, visits
from slipstream.cli.bench_compare_table import draw, figures, print_cells, print_results
from slipstream.cli.bench_engine import Load, add_load_flags, load_args, warm_up
from slipstream.cli.bench_report import add_report_flags, check_report, positive, write_report
from slipstream.config.args import EngineArgs

if TYPE_CHECKING:
    from slipstream.config.plan import EnginePlan
    from slipstream.contracts.sampling_params import SamplingParams
    from slipstream.engine.llm import LLM

CELL_FIELDS = ("model_runner", "async_scheduling", "speculative_config")
RUNNERS = ("v1", "v2")
MIB = 2**20
WARM_UP_ROUND = 0  # of the load's random numbers; repeats begin at 1


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "compare",
        help="methods against runners",
        description=__doc__,
        usage="slipstream bench compare MODEL [flags]",
    )
    add_load_flags(parser, input_len="128", output_len="128", without=CELL_FIELDS)
    group = parser.add_argument_group("comparison")
    group.add_argument(
        "--methods", type=listed(str), default=["none"], metavar="LIST",
        help="of speculation, such as none,ngram (default: none)",
    )
    group.add_argument(
        "--drafters", type=named, default={}, metavar="LIST",
        help="what methods draft with, such as eagle3=FOLDER,medusa=FOLDER",
    )
    group.add_argument(
        "--num-speculative-tokens", type=positive, default=None, metavar="K",
        help="drafts of a step at most (default: each method's own)",
    )
    group.add_argument(
        "--runners", type=listed(one_of(*RUNNERS)), default=list(RUNNERS), metavar="LIST",
        help="model runners (default: v1,v2)",
    )
    group.add_argument(
        "--async", type=listed(one_of("on", "off")), default=[DEFAULT], metavar="LIST", dest="asynchrony",
        help="async scheduling: on, off or on,off (default: as each runner has it)",
    )
    group.add_argument(
        "--concurrency", type=listed(positive), default=[1, 8, 64], metavar="LIST",
        help="requests at once, a batch of each size (default: 1,8,64)",
    )
    group.add_argument(
        "--repeats", type=positive, default=8, help="runs of each cell and batch (default: %(default)s)"
    )
    add_report_flags(parser)
    parser.set_defaults(run=run)


def listed(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Of a text such as 1,8,64: the entries, each once. Raises ArgumentTypeError."""

    def read(text: str) -> list[Any]:
        entries = [kind(entry.strip()) for entry in text.split(",")]
        if len(set(entries)) < len(entries) or "" in entries:
            raise argparse.ArgumentTypeError(f"{text!r}: must be different entries with commas between them")
        return entries

    return read


def named(text: str) -> dict[str, str]:
    """Of a text such as eagle3=FOLDER,medusa=FOLDER. Raises ArgumentTypeError."""
    pairs = [entry.partition("=") for entry in listed(str)(text)]
    if not all(equals and value for _, equals, value in pairs):
        raise argparse.ArgumentTypeError(f"{text!r}: must be METHOD=FOLDER with commas between them")
    return {name.strip(): value for name, _, value in pairs}


def one_of(*names: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r}: must be one of {', '.join(names)}")
        return text

    return read


def run(options: argparse.Namespace) -> int:
    """Prints plans, tables and effects. Raises ValueError for flags that cannot be honoured, and where every
    cell is refused."""
    check_report(options)
    contest = Contest(options)
    print_cells(contest.cells)
    if contest.plans:
        contest.measure()
    print_results(contest.cells, options.concurrency)
    write_report(
        options,
        "compare",
        contest.describe() | figures(contest.cells, options.concurrency),
        lambda figure: draw(figure, contest.cells, options.concurrency),
    )
    if all(cell.refused for cell in contest.cells):
        raise ValueError(f"every cell is refused, the first one so: {contest.cells[0].refused}")
    return 0


class Contest:
    """The cells of the flags, their plans, and the load that all of them get."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._args = args = self._sized(load_args(options))
        self.cells = [
            Cell(method=method, runner=runner, asynchrony=asynchrony)
            for method in options.methods
            for runner in options.runners
            for asynchrony in options.asynchrony
        ]
        self._check_drafters()
        planned = ((cell, plan_of(cell, args, self._speculation(cell.method))) for cell in self.cells)
        self.plans = {cell.name: plan for cell, plan in planned if plan is not None}
        for plan in self.plans.values():
            self._check(plan)
        self.how = ""
        self._largest = 0  # bytes by which an engine made this process grow at most

    def _check_drafters(self) -> None:
        idle = set(self._options.drafters) - set(self._options.methods)
        if idle:
            raise ValueError(f"--drafters: {min(idle)} is none of --methods")

    def _speculation(self, method: str) -> dict[str, Any] | None:
        """--speculative-config of a method."""
        if method == "none":
            return None
        fields = {
            "model": self._options.drafters.get(method),
            "num_speculative_tokens": self._options.num_speculative_tokens,
        }
        return {"method": method, **{key: value for key, value in fields.items() if value is not None}}

    def _sized(self, args: EngineArgs) -> EngineArgs:
        """A KV pool of what the largest batch can need, the same for every cell, unless a flag says
        otherwise: pools of all free memory would differ and leave no room for other cells."""
        if args.num_gpu_blocks_override is not None or args.kv_cache_memory_bytes is not None:
            return args
        most: int = max(self._options.concurrency)
        blocks = most * self._blocks_of_request(args.block_size)
        return dataclasses.replace(args, num_gpu_blocks_override=blocks + 1)  # and the null block

    def _blocks_of_request(self, block_size: int) -> int:
        longest: int = self._options.input_len[1] + self._options.output_len[1]
        return -(-longest // block_size) + 1  # one more for steps that are planned ahead

    def _check(self, plan: EnginePlan) -> None:
        """Raises ValueError where a batch would wait or be cut, so that it is not what its name says."""
        most = max(self._options.concurrency)
        if most > plan.max_num_seqs:
            raise ValueError(f"--concurrency={most}: must be at most --max-num-seqs={plan.max_num_seqs}")
        longest = self._options.input_len[1] + self._options.output_len[1]
        if longest > plan.max_model_len:
            raise ValueError(
                f"--input-len and --output-len: up to {longest} tokens, more than "
                f"--max-model-len={plan.max_model_len}"
            )

    def measure(self) -> None:
        """Fills the cells' runs. A cell that cannot be started is refused with the reason."""
        from tqdm.auto import tqdm

        from slipstream.engine.input_processor import open_tokenizer

        spec = next(iter(self.plans.values())).spec
        load = Load(self._options, spec.vocab_size, open_tokenizer(self._args))
        concurrency, repeats = self._options.concurrency, self._options.repeats
        runnable = [cell for cell in self.cells if not cell.refused]
        engines = Engines(runnable, lambda cell: self._start(cell, load), self._shortage)
        self.how = engines.how
        print(f"engines: {self.how}", flush=True)
        turns = list(visits(runnable, concurrency, repeats, engines.kept))
        bar = tqdm(turns, unit="run", disable=not self._options.progress, dynamic_ncols=True)
        try:
            for order, (repeat, count, cell) in enumerate(bar):
                if (llm := engines.get(cell)) is not None:
                    batch = seeded_batch(load, repeat + 1, count)
                    cell.runs.setdefault(count, []).append(measure(llm, *batch, repeat, order))
        finally:
            engines.close()

    def _start(self, cell: Cell, load: Load) -> LLM:
        """An engine that has done a batch of every size. Raises ValueError."""
        from slipstream.engine.llm import LLM
        from slipstream.runner.memory_cpu import resident_memory

        before, begin = resident_memory(), time.perf_counter()
        llm = LLM(**self.plans[cell.name].args.describe())
        cell.starts.append(time.perf_counter() - begin)
        cell.plan = llm.info.plan
        limits = llm.info.limits
        most = max(self._options.concurrency)
        if limits.num_blocks < (needed := most * self._blocks_of_request(limits.block_size)):
            llm.close()
            raise ValueError(
                f"--concurrency={most}: needs {needed} KV blocks, there are {limits.num_blocks}; "
                "raise --num-gpu-blocks-override or --kv-cache-memory-bytes"
            )
        for count in self._options.concurrency:
            warm_up(llm, *seeded_batch(load, WARM_UP_ROUND, count))
        self._largest = max(self._largest, resident_memory() - before)
        return llm

    def _shortage(self) -> str:
        """Of the host's memory, which a process can overdraw without an error and be killed for it."""
        from slipstream.runner.memory_cpu import available_memory

        available = available_memory()
        if self._largest <= available:
            return ""
        return f"an engine takes {self._largest / MIB:,.0f} MiB, {available / MIB:,.0f} MiB are left"

    def describe(self) -> dict[str, Any]:
        """For the report: what was asked and how engines were held."""
        names = (
            "methods", "drafters", "num_speculative_tokens", "runners", "asynchrony", "concurrency",
            "repeats", "input_len", "output_len",
        )  # fmt: skip
        asked = {name: getattr(self._options, name) for name in names}
        return {**asked, "num_gpu_blocks": self._args.num_gpu_blocks_override, "engines": self.how}


def plan_of(cell: Cell, args: EngineArgs, speculation: dict[str, Any] | None) -> EnginePlan | None:
    """The plan that the cell asks for, kept in it too; None where it is refused. Reads no weights."""
    from slipstream.config.explanation import plain
    from slipstream.engine.plan import make_plan

    asked = dataclasses.replace(
        args,
        model_runner=cell.runner,
        async_scheduling={"on": True, "off": False}.get(cell.asynchrony),
        speculative_config=speculation,
    )
    try:
        plan = make_plan(asked)
    except ValueError as error:
        cell.refused = str(error)
        return None
    cell.plan = plain(plan.choices)
    return plan


def seeded_batch(load: Load, turn: int, count: int) -> tuple[list[Any], list[SamplingParams]]:
    """The requests of a turn (a repeat) and batch size: the same for every cell, new in each turn, so that
    no prefix cache has seen them. Each has a seed of its own, unless --seed gives one."""
    import numpy as np

    random = np.random.default_rng((turn, count))
    prompts, params = load.requests(random, count)
    seeds = random.integers(0, 2**31, count)
    each = [
        one if one.seed is not None else one.clone(seed=int(seed))
        for one, seed in zip(params, seeds, strict=True)
    ]
    return prompts, each
