"""The engine in a process of its own: python -m slipstream.engine.engine_process FD COUNTER [mp|uni].

FD is a socket to the ProcessClient that started it. It brings the Start message; then each side sees by its
end that the other one is gone. COUNTER is a memory file, in which the engine counts its progress. A third
word makes it a spare for engines of this executor: it imports quietly, has a worker do so too, and waits.
"""

from __future__ import annotations

import functools
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Protocol

import zmq

from slipstream.config.executor import MP, UNI
from slipstream.contracts.errors import CrashLoopError
from slipstream.contracts.outputs import EngineOutputs
from slipstream.contracts.request import EngineRequest
from slipstream.engine import wire
from slipstream.engine.faults import LOOK_SECONDS
from slipstream.engine.processes import LENGTH, Counter, end_with_parent, import_quietly, keep_for_good
from slipstream.engine.worker import Worker
from slipstream.engine.worker_process import MODULES
from slipstream.observe.log import setup

_LAST_WORDS_MS = 5000  # how long a message may wait for the parent once the process ends
_IDLE_MS = 1000
_CORE = "slipstream.engine.open_core"
_SPARES_IMPORT = {MP: (_CORE,), UNI: (_CORE, *MODULES)}


class NotHonoured(Exception):
    """The flags ask for what this model or machine cannot do."""


class Core(Protocol):
    """The part of EngineCore that the loop uses."""

    @property
    def has_work(self) -> bool: ...

    @property
    def ears(self) -> tuple[int, ...]: ...

    def check(self) -> None: ...

    def add(self, requests: Sequence[EngineRequest]) -> None: ...

    def abort(self, keys: Sequence[int]) -> None: ...

    def step(self) -> EngineOutputs | None: ...

    def look(self) -> EngineOutputs: ...


def run(
    core: Core, inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes], progress: Callable[[], None]
) -> None:
    """Steps while there is work, waits for messages while there is none. Returns at a CLOSE message.
    progress: called after every message taken and step made."""
    requests, keys = wire.decoder(list[EngineRequest]), wire.decoder(list[int])
    due = 0.0
    while True:
        if not core.has_work:
            _wait(inbox, core.ears)
            due = 0.0
        while int(inbox.get(zmq.EVENTS)) & zmq.POLLIN:
            kind, body = inbox.recv_multipart()
            if kind == wire.ADD:
                core.add(requests(body))
            elif kind == wire.ABORT:
                core.abort(keys(body))
            elif kind == wire.LOOK:
                outbox.send_multipart((wire.OUTPUTS, wire.encode(core.look())))
            else:
                return
            progress()
        if (now := time.monotonic()) >= due:
            core.check()
            due = now + LOOK_SECONDS
        if core.has_work and (outputs := core.step()) is not None:
            outbox.send_multipart((wire.OUTPUTS, wire.encode(outputs)))
            progress()


def _wait(inbox: zmq.Socket[bytes], ears: tuple[int, ...]) -> None:
    """For a message, or for something to check."""
    poller = zmq.Poller()
    for end in (inbox, *ears):
        poller.register(end, zmq.POLLIN)
    poller.poll(_IDLE_MS)


def main() -> int:
    """Build the engine, say READY or FAILED, run."""
    # Ctrl-C reaches the whole terminal; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = socket.socket(fileno=int(sys.argv[1]))
    # The parent sees by this socket that engine and worker, and so what they took of the device, are gone.
    make = functools.partial(Worker, keep=(parent.fileno(),))
    worker = _get_ready(sys.argv[3], make) if len(sys.argv) > 3 else None
    start = _receive_start(parent)
    # Whatever the engine is doing, it ends when the parent does, and tidies up for it.
    end_with_parent(parent.fileno(), lambda: shutil.rmtree(start.folder, ignore_errors=True))
    if start.log_level is not None:
        setup(start.log_level, start.log_format)
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for end in (inbox, outbox):
        end.set_hwm(0)
    inbox.bind(wire.address(start.folder, "in"))
    outbox.connect(wire.address(start.folder, "out"))
    try:
        _serve(start, inbox, outbox, Counter(int(sys.argv[2])), make, worker)
        return 0
    except Exception as error:
        outbox.send_multipart((wire.FAILED, wire.encode(_failure(error))))
        return 1
    finally:
        context.destroy(linger=_LAST_WORDS_MS)


def _get_ready(backend: str, make: Callable[[bool], Worker]) -> Worker | None:
    worker = make(True) if backend == MP else None
    import_quietly(_SPARES_IMPORT[backend])
    return worker


def _serve(
    start: wire.Start, inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes], counter: Counter,
    make: Callable[[bool], Worker], worker: Worker | None,
) -> None:  # fmt: skip
    if worker is None and start.args.distributed_executor_backend != UNI:
        worker = make(False)  # it imports torch while this process imports the rest
    from slipstream.engine.open_core import open_core

    try:
        core = open_core(start.args, counter.count, make, worker)
    except ValueError as error:
        raise NotHonoured(str(error)) from error
    keep_for_good()
    outbox.send_multipart((wire.READY, wire.encode(core.info)))
    try:
        run(core, inbox, outbox, counter.count)
    finally:
        core.close()


def _failure(error: Exception) -> wire.Failure:
    if isinstance(error, NotHonoured | CrashLoopError):
        return wire.Failure(isinstance(error, NotHonoured), str(error), hopeless=True)
    return wire.Failure(False, "".join(traceback.format_exception(error)).strip())


def _receive_start(parent: socket.socket) -> wire.Start:
    def exactly(count: int) -> bytes:
        data = parent.recv(count, socket.MSG_WAITALL)
        if len(data) < count:
            sys.exit("the parent process has gone")
        return data

    (length,) = LENGTH.unpack(exactly(LENGTH.size))
    start: wire.Start = wire.decoder(wire.Start)(exactly(length))
    return start


if __name__ == "__main__":
    sys.exit(main())
