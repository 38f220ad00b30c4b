"""From flags to an engine's core with the executor that they ask for."""

from __future__ import annotations

from collections.abc import Callable

from slipstream.config.args import EngineArgs
from slipstream.config.executor import UNI
from slipstream.engine.core import EngineCore
from slipstream.engine.worker import ProcessExecutor, Worker


def open_core(
    args: EngineArgs,
    beat: Callable[[], None],
    make: Callable[[bool], Worker] = Worker,
    worker: Worker | None = None,
) -> EngineCore:
    """beat, make, worker: ProcessExecutor's. Raises ValueError for what cannot be honoured, EngineError where
    the worker fails to start."""
    if args.distributed_executor_backend == UNI:
        # torch is loaded here, and in no engine whose worker computes.
        from slipstream.engine.plan import make_plan

        return EngineCore(make_plan(args))
    executor = ProcessExecutor(args, beat, make, worker)
    try:
        return EngineCore(executor.plan, executor)
    except BaseException:
        executor.close()
        raise
