"""The engine loop: joins scheduler and runner, and keeps up to `steps_in_flight` steps on the stream.

While a step runs, the next one is planned and submitted; then the oldest result is read. One thread owns a
core.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Sequence

from slipstream.config.executor import executor_choice
from slipstream.config.explanation import LOG_COLUMNS, Explanation, plain
from slipstream.config.plan import Choice, EnginePlan
from slipstream.contracts.limits import ModelLimits
from slipstream.contracts.outputs import EngineOutputs
from slipstream.contracts.request import EngineRequest
from slipstream.engine.client import EngineInfo
from slipstream.engine.executor import Executor, InlineExecutor
from slipstream.engine.grammars import EngineGrammars, make_grammars
from slipstream.engine.recovery import Recovery
from slipstream.engine.runners import Handle, build_runner
from slipstream.engine.step_log import Launch, StepLog
from slipstream.observe.trace import NoTracer, Tracer
from slipstream.runner.memory import MemoryPlan
from slipstream.runner.shapes import all_samples
from slipstream.scheduler import Scheduler, SchedulerConfig
from slipstream.scheduler.drafting import DraftPolicy

log = logging.getLogger("slipstream.engine")
# How long planning waits for masks while a step runs, as a share of the last one, so that constrained rows
# join the very next step; and an idle engine, before it looks for messages.
MASK_PATIENCE, IDLE_SECONDS = 0.25, 0.005
START_SECONDS = 0.02  # for a worker's start, before it looks for messages


class EngineCore:
    """Scheduler, executor and the steps in flight. executor: None builds the plan's runner in this process.
    Raises ValueError at construction for what cannot be honoured."""

    def __init__(self, plan: EnginePlan, executor: Executor | None = None) -> None:
        self._grammars = make_grammars(plan)
        if executor is None:
            executor = InlineExecutor(build_runner(plan))
        self._executor, self.memory = executor, executor.memory
        num_blocks = executor.memory.num_blocks
        self.scheduler = _make_scheduler(plan, num_blocks, self._grammars)
        self._recovery = Recovery(self.scheduler, executor)
        choices = dict(plan.choices)
        choices["executor"] = executor_choice(executor.backend)
        choices["linear"] = Choice(value=executor.linear_name, reason=executor.linear_reason, flag="--dtype")
        choices["kv_cache"] = _as_built(choices["kv_cache"], executor.memory)
        self.info = EngineInfo(
            # Block 0 is the null block: a request can have all but one.
            limits=ModelLimits(
                plan.spec.vocab_size, plan.max_model_len, plan.block_size, num_blocks - 1, plan.max_logprobs
            ),
            end_token_ids=plan.spec.end_token_ids,
            plan=plain(choices),
            vllm_0_31=plain(plan.vllm_0_31),
            worker_pid=executor.pid,
        )
        self._depth = plan.steps_in_flight
        self._flight: deque[tuple[Handle, Launch]] = deque()
        self._log = StepLog(plan.max_num_seqs)
        self._log.worker_pid = executor.pid
        self._planned_tokens = 0
        self._step_seconds = 0.0  # of the last step, on the device
        self._tracer: Tracer | NoTracer = Tracer(plan.args.trace) if plan.args.trace else NoTracer()
        for line in Explanation(choices=choices, vllm=plan.vllm_0_31).table(LOG_COLUMNS):
            log.info("%s", line)

    def add(self, requests: Sequence[EngineRequest]) -> None:
        for request in requests:
            if request.grammar:
                self._grammars.open(request)
            else:
                self.scheduler.add(request)

    def abort(self, keys: Sequence[int]) -> None:
        self.scheduler.abort(keys)
        self._recovery.ended(keys)

    @property
    def has_work(self) -> bool:
        work = bool(self._flight) or self.scheduler.has_work or self._grammars.num_opening > 0
        return work or not self._executor.up

    @property
    def ears(self) -> tuple[int, ...]:
        """Descriptors that become readable where check() is due, while there is no work."""
        return self._executor.ears

    def check(self) -> None:
        """To be called a few times a second, and after ears have become readable."""
        error = self._executor.check()
        if error is not None and self._executor.up and not self._flight:
            self._recovery.lost(error)

    def step(self) -> EngineOutputs | None:
        """Fill the pipeline, then wait for the oldest step. None where nothing was in flight and nothing
        could be scheduled, and while a worker starts. Raises what breaks the engine."""
        if not self._executor.up:
            self._executor.tend(START_SECONDS)
            return self._drain()
        self._await_masks()
        begin = time.perf_counter()
        while len(self._flight) < self._depth and self._submit():
            pass
        host = time.perf_counter() - begin
        if not self._flight:
            outputs = self._drain()
            if outputs is None:
                self._grammars.wait(IDLE_SECONDS)
            return outputs
        handle, launch = self._flight[0]  # Ctrl-C may end the wait: the step is still in flight then
        try:
            result = handle.wait()
        except Exception as error:
            self._flight.popleft()
            self._recovery.failed(error, [handle for handle, _ in self._flight])
            self._flight.clear()
            return self._drain()
        self._flight.popleft()
        begin = time.perf_counter()
        self._step_seconds = self._log.duration(handle.event)
        outputs = self.scheduler.apply(result, self._step_seconds)
        end = time.perf_counter()
        self._recovery.applied(outputs)
        outputs.stats.steps_in_flight = len(self._flight)
        started = self._log.add(launch, handle.event, begin, end)
        self._log.tell(outputs.stats, host + end - begin, len(outputs.tokens))
        if not self.has_work:
            self._log.rest()
        self._tracer.span("device", "step", started, handle.event.end, step=handle.step)
        self._tracer.span("output", "apply", begin, end, step=handle.step)
        return outputs

    def _await_masks(self) -> None:
        """Requests whose grammars are compiled go to the scheduler; masks are waited for a little where the
        device has work meanwhile."""
        if self._grammars.busy and self._flight and not self._flight[-1][0].done():
            self._grammars.wait(MASK_PATIENCE * self._step_seconds)
        for request, error in self._grammars.take_opened():
            if error is None:
                self.scheduler.add(request)
            else:
                self.scheduler.refuse(request, error)

    def _drain(self) -> EngineOutputs | None:
        """News without a step: of requests, or that a worker has gone or come."""
        self._log.rest()
        before, self._log.worker_pid = self._log.worker_pid, self._executor.pid
        self._log.worker_restarts = self._executor.restarts
        outputs = self.scheduler.drain(always=before != self._executor.pid)
        if outputs is not None:
            self._recovery.ended(outputs.keys.tolist())
            self._log.fill(outputs.stats)
        return outputs

    def look(self) -> EngineOutputs:
        """What the rows do and what the last steps took: outputs that hold a snapshot and no news."""
        outputs = self.scheduler.look(self._log.table(time.perf_counter()))
        self._log.fill(outputs.stats)
        return outputs

    def _submit(self) -> bool:
        begin = time.perf_counter()
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        middle = time.perf_counter()
        starved = not self._flight or self._flight[-1][0].done()
        handle = self._executor.step(plan)
        end = time.perf_counter()
        lanes = len(plan.lane_row)
        if plan.lanes_changed:
            self._planned_tokens = int(plan.lane_query_len.sum()) + plan.draft_room
        launch = Launch(plan.step, lanes, self._planned_tokens, begin, middle, end, starved)
        self._flight.append((handle, launch))
        facts = {"step": plan.step, "lanes": lanes, "changed": plan.lanes_changed}
        self._tracer.span("scheduler", "schedule", begin, middle, **facts)
        self._tracer.span("runner", "submit", middle, end, **facts)
        return True

    def close(self) -> None:
        """Wait for the steps in flight, end who computes, write the trace."""
        while self._flight:
            handle, _ = self._flight.popleft()
            try:
                handle.wait()
            except Exception as error:  # nobody waits for its news any more
                log.warning("step %d failed while the engine was closed: %s", handle.step, str(error))
        self._executor.close()
        self._grammars.shut_down()
        self._tracer.close()


def _make_scheduler(plan: EnginePlan, num_blocks: int, grammars: EngineGrammars) -> Scheduler:
    drafts, lookahead, drafting, ahead, uneven = 0, 0, None, 1, False
    if plan.speculation is not None:
        drafts, lookahead = plan.speculation.num_speculative_tokens, plan.speculation.lookahead
        uneven = plan.speculation.uneven and plan.model_runner == "v2"
        drafting = DraftPolicy(drafts, all_samples(plan.max_num_seqs, drafts), uneven)
        # Bounds run ahead by all drafts of the steps in flight.
        ahead += -(-(1 + drafts) * plan.steps_in_flight // plan.block_size)
    config = SchedulerConfig(
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        block_size=plan.block_size,
        num_blocks=num_blocks,
        policy=plan.args.scheduling_policy,
        enable_prefix_caching=plan.args.enable_prefix_caching,
        tokens_per_step=1 + drafts,
        lookahead=lookahead,
        grant_ahead=ahead,
        uneven_drafts=uneven,
    )
    return Scheduler(config, drafting, grammars)


def _as_built(planned: Choice, memory: MemoryPlan) -> Choice:
    """The KV cache with the blocks there are, and where memory went."""
    value = {**planned.value, "num_blocks": memory.num_blocks}
    return dataclasses.replace(planned, value=value, reason=f"{planned.reason}; {memory.describe()}")
