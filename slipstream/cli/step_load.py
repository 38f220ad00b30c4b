"""The load of `slipstream bench step`: the real scheduler over rows that decode, and a device that answers at
once.

Prefix caching is on and every block of the pool holds an old prefix, as after hours of serving, so that each
block granted is evicted first. Two steps are in flight. """

from __future__ import annotations

import time
from collections import deque
from typing import Any

import numpy as np

from slipstream.cli.bench_report import percentiles
from slipstream.contracts.request import EngineRequest
from slipstream.contracts.sampling_params import SamplingParams
from slipstream.contracts.step import Finish, StepPlan, StepResult
from slipstream.engine.wire import encode
from slipstream.scheduler import Scheduler, SchedulerConfig

PARTS = ("schedule", "apply", "output", "total")
BLOCK_SIZE = 16
BATCHED_TOKENS = 8192
STEPS_IN_FLIGHT = 2
PROMPT_TOKENS = (64, 512)  # drawn evenly, both ends included
VOCAB_SIZE = 50_000
WARM_UP_STEPS = 50


def measure(rows: int, steps: int, output_len: int | None = None) -> dict[str, Any]:
    """One run: percentiles of each part in microseconds, and how many blocks were granted, lane sets made."""
    load = StepLoad(rows, steps, output_len)
    load.fill()
    for _ in range(WARM_UP_STEPS):
        load.step()
    times = np.zeros((steps, 4))
    changes = granted = 0
    for step in range(steps):
        plans, times[step, :3] = load.step()
        changes += sum(plan.lanes_changed for plan in plans)
        granted += sum(len(plan.grant_row) for plan in plans)
    times[:, 3] = times.sum(1)
    figures: dict[str, Any] = {
        "rows": rows, "steps": steps, "output_len": output_len, "lane_changes": changes,
        "blocks_granted": granted,
    }
    for part, spent in zip(PARTS, times.T, strict=True):
        figures[part] = percentiles(spent)
    return figures


class StubDevice:
    """One token for each lane that samples, and an end at max_len. Lengths are exact, as on a device."""

    def __init__(self, rows: int) -> None:
        self._length = np.zeros(rows, np.int32)
        self._max_len = np.zeros(rows, np.int32)

    def run(self, plan: StepPlan) -> StepResult:
        for admission in plan.admissions:
            self._length[admission.row] = len(admission.tokens)
            self._max_len[admission.row] = admission.request.max_len
        row = plan.lane_row
        length, max_len = self._length[row], self._max_len[row]
        counts = (plan.lane_samples & (length < max_len)).astype(np.int32)
        length += counts
        self._length[row] = length
        ends = plan.lane_samples & (length == max_len)
        finish = np.where(ends, Finish.LENGTH, Finish.NONE).astype(np.int32)
        tokens = (row * 7919 + length) % VOCAB_SIZE
        return StepResult(plan.step, row, plan.lane_generation, counts, tokens[:, None], finish)


class StepLoad:
    """output_len: mean tokens of a request, 1 to twice that, each replaced as it ends; None: nobody ends."""

    def __init__(self, rows: int, steps: int, output_len: int | None) -> None:
        self._rows, self._churn = rows, output_len is not None
        # Where nobody ends, each must outlast the prefill of all rows, the warm-up and the measurement.
        lasting = steps + WARM_UP_STEPS + rows * PROMPT_TOKENS[1] // BATCHED_TOKENS + 64
        self._longest = 2 * output_len if output_len is not None else lasting
        max_model_len = PROMPT_TOKENS[1] + self._longest
        self._config = SchedulerConfig(
            max_num_seqs=rows, max_num_batched_tokens=max(BATCHED_TOKENS, rows), max_model_len=max_model_len,
            block_size=BLOCK_SIZE, num_blocks=1 + rows * -(-max_model_len // BLOCK_SIZE),
        )
        self._scheduler = Scheduler(self._config)
        self._device = StubDevice(rows)
        self._late: deque[StepResult] = deque()
        self._random = np.random.default_rng(0)
        self._key = 0
        self._replace = False

    def fill(self) -> None:
        """Old prefixes in every block, then all rows decoding."""
        tokens = PROMPT_TOKENS[1]
        for _ in range(-(-self._config.usable_blocks * BLOCK_SIZE // tokens)):
            self._add(tokens, 1)
        while self._scheduler.has_work:
            self.step()
        while self._late:
            self._scheduler.apply(self._late.popleft())
        self._replace = self._churn
        for _ in range(self._rows):
            self._join()
        while self._scheduler.num_waiting:
            self.step()

    def step(self) -> tuple[list[StepPlan], tuple[float, float, float]]:
        """Fill the pipeline, then take the oldest result: the plans made, and microseconds of each part."""
        clock = time.perf_counter
        plans, planning = [], 0.0
        while len(self._late) < STEPS_IN_FLIGHT:
            begin = clock()
            plan = self._scheduler.schedule()
            planning += clock() - begin
            if plan is None:
                break
            plans.append(plan)
            self._late.append(self._device.run(plan))
        result = self._late.popleft()
        begin = clock()
        outputs = self._scheduler.apply(result)
        applied = clock()
        encode(outputs)
        sent = clock()
        joining = 0.0
        if self._replace:
            joining = sum(self._join() for _ in range(np.count_nonzero(outputs.finish)))
        return plans, (1e6 * (planning + joining), 1e6 * (applied - begin), 1e6 * (sent - applied))

    def _join(self) -> float:
        low, high = PROMPT_TOKENS
        output = int(self._random.integers(1, self._longest + 1)) if self._churn else self._longest
        return self._add(int(self._random.integers(low, high + 1)), output)

    def _add(self, prompt: int, output: int) -> float:
        """Seconds that the scheduler took to queue it; the request itself is the front end's work."""
        request = EngineRequest(
            key=self._key, prompt_token_ids=self._random.integers(0, VOCAB_SIZE, prompt, dtype=np.int32),
            params=SamplingParams(max_tokens=output), seed=0, end_token_ids=(), max_len=prompt + output,
        )
        self._key += 1
        begin = time.perf_counter()
        self._scheduler.add(request)
        return time.perf_counter() - begin
