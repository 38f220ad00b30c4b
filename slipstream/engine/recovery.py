"""What an engine does about steps that failed: everybody is put back, and goes on with what is left."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from slipstream.contracts.errors import WorkerLostError
from slipstream.contracts.outputs import EngineOutputs
from slipstream.engine.executor import Executor
from slipstream.engine.runners import Handle, lacked_memory
from slipstream.engine.suspects import Suspects
from slipstream.observe.log import get_logger
from slipstream.scheduler import Scheduler

log = get_logger(__name__)
CONVICTED = "the process that computes was lost again and again when it computed this request"
NO_MEMORY = "there is too little memory for the steps of this request, small as they are now"
LEAST_TOKENS = 2  # of every row in a step, where memory lacks


class Recovery:
    """One engine's; its thread calls it."""

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self._scheduler, self._executor = scheduler, executor
        self._suspects = Suspects(scheduler.waiting)
        self._short = 0  # steps in a row that lacked memory

    def applied(self, outputs: EngineOutputs) -> None:
        """To be called after each step that did not fail."""
        self._short = 0
        if len(outputs.tokens):
            self._executor.made_token()
        self._suspects.applied(outputs)

    def ended(self, keys: Iterable[int]) -> None:
        """To be called with those that ended outside of a step."""
        self._suspects.ended(keys)

    def failed(self, error: Exception, later: Iterable[Handle]) -> None:
        """The oldest step failed; later: those in flight after it. Raises what cannot be helped."""
        if isinstance(error, WorkerLostError):
            self.lost(error)
        elif lacked_memory(error):
            for handle in later:
                try:
                    handle.wait()
                except Exception as other:
                    if not lacked_memory(other):
                        return self.failed(other, ())
            self._shrink(error)
        else:
            raise error

    def lost(self, error: WorkerLostError) -> None:
        """The worker is lost, and with it what the device held. Raises CrashLoopError."""
        idle = not self._scheduler.has_work
        steps = self._scheduler.put_all_back(keep=False)
        convicted = self._suspects.lost(key for keys in steps for key in keys)
        if convicted is not None:
            log.error("a request ends workers; it fails", key=convicted, reason=str(error))
            self._scheduler.fail([convicted], f"{CONVICTED}: {error}")
        self._executor.replace(error, idle, convicted is not None)

    def _shrink(self, error: Exception) -> None:
        """Steps of half as many tokens; where they are small already, who was in this one fails at the second
        try. Rows and blocks are as they were: what is put back finds its prefix."""
        keys = self._scheduler.put_all_back(keep=True)[0]
        self._executor.free_caches()
        self._short += 1
        config = self._scheduler.config
        tokens = config.max_num_batched_tokens
        fewer = min(tokens, max(tokens // 2, LEAST_TOKENS * config.max_num_seqs))
        log.warning("a step lacked memory", reason=str(error), tokens_a_step=tokens, now=fewer)
        if fewer < tokens:
            self._scheduler.config = dataclasses.replace(config, max_num_batched_tokens=fewer)
        elif self._short > 1:
            self._scheduler.fail(keys, NO_MEMORY)
