"""A worker: the runner in a process of its own, python -m slipstream.engine.worker_process PLANS RESULTS with
the words spare and thread, or without.

PLANS and RESULTS are pipes from and to the engine. The first message is the WorkerStart. spare: the worker
imports quietly until it comes, and touches no device. thread: the engine's thread that started it lives as
long as the engine does.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from queue import SimpleQueue

from slipstream.config.plan import EnginePlan
from slipstream.contracts.step import StepResult
from slipstream.engine import wire, worker_wire
from slipstream.engine.processes import (
    Closed,
    Receiver,
    Sender,
    die_with_parent_thread,
    end_with_parent,
    import_quietly,
    keep_for_good,
)
from slipstream.engine.runners import Built, Handle, Runner, build_runner, free_caches, lacked_memory
from slipstream.observe.log import setup

SPARE, THREAD = "spare", "thread"
# What a runner of any plan imports, and none of it touches a device.
MODULES = ("torch", "slipstream.engine.plan", "slipstream.runner.build", "slipstream.speculation.build")


@dataclass(frozen=True, slots=True)
class Failed:
    """The handle of a step that could not be launched."""

    error: Exception

    def wait(self) -> StepResult:
        raise self.error


def main() -> int:
    """Build the runner, say READY or FAILED, step."""
    # Ctrl-C reaches the whole terminal; the front end decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    receiver, sender = Receiver(int(sys.argv[1])), Sender(int(sys.argv[2]))
    end_with_parent(receiver.fileno)
    if THREAD in sys.argv:
        die_with_parent_thread()
    if SPARE in sys.argv:
        import_quietly(MODULES)
    try:
        return _work(receiver, sender)
    except Closed:
        return 1  # the engine has gone


def _work(receiver: Receiver, sender: Sender) -> int:
    message = receiver.receive()
    assert message is not None and message[0] == worker_wire.START
    start: worker_wire.WorkerStart = wire.decoder(worker_wire.WorkerStart)(message[1])
    if start.log_level is not None:
        setup(start.log_level, start.log_format)
    try:
        _serve(start, receiver, sender)
        return 0
    except Closed:
        raise
    except Exception as error:
        sender.send(worker_wire.FAILED, wire.encode(_failure(error, isinstance(error, _NotHonouredError))))
        return 1


class _NotHonouredError(Exception):
    """The flags ask for what this model or machine cannot do."""


def _serve(start: worker_wire.WorkerStart, receiver: Receiver, sender: Sender) -> None:
    try:
        plan = start.plan or _make_plan(start)
        built = build_runner(plan, start.memory)
    except ValueError as error:
        raise _NotHonouredError(str(error)) from error
    keep_for_good()
    ready = worker_wire.WorkerReady(plan, built.memory, built.linear_name, built.linear_reason)
    sender.send(worker_wire.READY, wire.encode(ready))
    _step(built, receiver, sender)


def _make_plan(start: worker_wire.WorkerStart) -> EnginePlan:
    from slipstream.engine.plan import make_plan  # torch comes with it

    assert start.args is not None
    return make_plan(start.args)


def _step(built: Built, receiver: Receiver, sender: Sender) -> None:
    """Launch plans as they come; another thread reads the results, so that no launch waits for one."""
    flight: SimpleQueue[tuple[Handle | Failed, float] | None] = SimpleQueue()
    answering = threading.Thread(target=_answer, args=(flight, sender), name="slipstream-results")
    answering.start()
    plans = worker_wire.PlanReader()
    while True:
        message = receiver.receive()
        assert message is not None
        kind, body = message
        if kind == worker_wire.PLAN:
            handle = _launch(built.runner, plans, body)
            flight.put((handle, time.perf_counter()))
            del handle
        elif kind == worker_wire.FREE:
            free_caches(built.runner)
        else:
            break
    flight.put(None)
    answering.join()
    built.runner.close()


def _launch(runner: Runner, plans: worker_wire.PlanReader, body: bytes) -> Handle | Failed:
    try:
        return runner.step(plans.read(body))
    except Exception as error:
        return Failed(error)


def _answer(flight: SimpleQueue[tuple[Handle | Failed, float] | None], sender: Sender) -> None:
    """Results in the order of the steps. A step that lacked memory is told, and others may follow; any other
    failure is the end of this process, whose state nobody knows any more."""
    while (step := flight.get()) is not None:
        handle, launched = step
        try:
            result = handle.wait()
            assert not isinstance(handle, Failed)
            body = worker_wire.write_result(result, launched, handle.event.begin, handle.event.end)
            sender.send(worker_wire.DONE, body)
        except Closed:
            return
        except Exception as error:
            failure = _failure(error, False, lacked_memory(error))
            sender.send(worker_wire.FAILED, wire.encode(failure))
            if not failure.memory:
                os._exit(1)
        # Dropped before the next wait: a parked thread must not keep a step's tensors alive.
        del step, handle


def _failure(error: Exception, users: bool, memory: bool = False) -> wire.Failure:
    text = str(error) if users else "".join(traceback.format_exception(error)).strip()
    return wire.Failure(users, text, memory)


if __name__ == "__main__":
    sys.exit(main())
