"""The engine in a process of its own: python -m slipstream.engine.engine_process FD COUNTER.

FD is a socket to the ProcessClient that started it. It brings the Start message; then each side sees by its
end that the other one is gone. COUNTER is a memory file, in which the engine counts its progress.
"""

from __future__ import annotations

import gc
import mmap
import os
import shutil
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import zmq

from slipstream.contracts.outputs import EngineOutputs
from slipstream.contracts.request import EngineRequest
from slipstream.engine import wire
from slipstream.observe.log import setup

_LAST_WORDS_MS = 5000  # how long a message may wait for the parent once the process ends
_NO_MEMORY = "DefaultCPUAllocator: can't allocate memory"
LENGTH = struct.Struct("<Q")


class NotHonoured(Exception):
    """The flags ask for what this model or machine cannot do."""


class Counter:
    """A number that one process counts up and another one reads, in a memory file: no message, no wait.
    fileno: of the file; close() closes it too."""

    def __init__(self, fileno: int) -> None:
        self.fileno = fileno
        os.ftruncate(fileno, mmap.PAGESIZE)
        self._memory = mmap.mmap(fileno, mmap.PAGESIZE)
        self._words = memoryview(self._memory).cast("Q")

    def count(self) -> None:
        self._words[0] += 1

    @property
    def value(self) -> int:
        return self._words[0]

    def close(self) -> None:
        self._words.release()
        self._memory.close()
        os.close(self.fileno)


class Core(Protocol):
    """The part of EngineCore that the loop uses."""

    @property
    def has_work(self) -> bool: ...

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
    while True:
        if not core.has_work:
            inbox.poll()
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
        if core.has_work and (outputs := core.step()) is not None:
            outbox.send_multipart((wire.OUTPUTS, wire.encode(outputs)))
            progress()


def main() -> int:
    """Build the engine, say READY or FAILED, run."""
    # Ctrl-C reaches the whole terminal; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = socket.socket(fileno=int(sys.argv[1]))
    start = _receive_start(parent)
    threading.Thread(target=_end_with, args=(parent, Path(start.folder)), daemon=True).start()
    if start.log_level is not None:
        setup(start.log_level, start.log_format)
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for end in (inbox, outbox):
        end.set_hwm(0)
    inbox.bind(wire.address(start.folder, "in"))
    outbox.connect(wire.address(start.folder, "out"))
    try:
        _serve(start, inbox, outbox, Counter(int(sys.argv[2])))
        return 0
    except Exception as error:
        outbox.send_multipart((wire.FAILED, wire.encode(_failure(error))))
        return 1
    finally:
        context.destroy(linger=_LAST_WORDS_MS)


def _serve(
    start: wire.Start, inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes], counter: Counter
) -> None:
    # torch comes with these; the parent's socket is watched from before that.
    from slipstream.engine.core import EngineCore
    from slipstream.engine.plan import make_plan

    try:
        core = EngineCore(make_plan(start.args))
    except ValueError as error:
        raise NotHonoured(str(error)) from error
    # Nothing made so far will ever be garbage: the collector need not walk through it between steps.
    gc.collect()
    gc.freeze()
    outbox.send_multipart((wire.READY, wire.encode(core.info)))
    try:
        run(core, inbox, outbox, counter.count)
    finally:
        core.close()


def _failure(error: Exception) -> wire.Failure:
    if isinstance(error, NotHonoured):
        return wire.Failure(True, str(error))
    # Torch's error of a GPU is a class of its own; of a CPU it is a RuntimeError with this text.
    found = type(error).__name__ in ("OutOfMemoryError", "MemoryError") or _NO_MEMORY in str(error)
    return wire.Failure(False, "".join(traceback.format_exception(error)).strip(), found)


def _receive_start(parent: socket.socket) -> wire.Start:
    def exactly(count: int) -> bytes:
        data = parent.recv(count, socket.MSG_WAITALL)
        if len(data) < count:
            sys.exit("the parent process has gone")
        return data

    (length,) = LENGTH.unpack(exactly(LENGTH.size))
    start: wire.Start = wire.decoder(wire.Start)(exactly(length))
    return start


def _end_with(parent: socket.socket, folder: Path) -> None:
    """End at once when the parent does, whatever the engine is doing, and tidy up for it."""
    parent.recv(1)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
