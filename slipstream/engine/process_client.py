"""The engine behind a socket: starts its process, talks to it, notices its end."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
from collections.abc import Sequence

import zmq

from slipstream.config.args import EngineArgs
from slipstream.config.executor import MP
from slipstream.contracts.errors import CrashLoopError, EngineDeadError, EngineError
from slipstream.contracts.outputs import EngineOutputs
from slipstream.contracts.request import EngineRequest
from slipstream.engine import wire
from slipstream.engine.client import EngineInfo
from slipstream.engine.processes import LENGTH, Counter, cpu_seconds, hung_up, log_level, spawn
from slipstream.observe.log import current_format

_LAST_WORDS_MS = 300  # a message may still be on its way when the process has ended
_CLOSE_SECONDS = 20.0  # for the steps in flight and the trace
_EXIT_SECONDS = 2.0  # for a process that has hung up to be gone
MODULE = "slipstream.engine.engine_process"


class ProcessClient:
    """An EngineClient. add and abort belong to one thread, receive to one thread; close to any once both are
    done. The engine ends with this process, however that ends.

    Raises what the engine raised where it cannot start: ValueError with its text, else EngineError. wait:
    False leaves the process waiting for begin(), after which receive() is to be called until `ready`, and
    nothing else; what cannot start is an EngineDeadError then. spare: it gets ready quietly meanwhile.
    """

    info: EngineInfo

    def __init__(self, args: EngineArgs, wait: bool = True, spare: bool = False) -> None:
        # Only this user may enter: whoever can connect could run requests.
        self._folder = tempfile.TemporaryDirectory(prefix="slipstream-")
        self._context = zmq.Context()
        self._to_engine = self._context.socket(zmq.PUSH)
        self._from_engine = self._context.socket(zmq.PULL)
        for end in (self._to_engine, self._from_engine):
            end.set_hwm(0)
        # The sender connects: then its queue exists before, and outlives, the other side, and no send waits.
        self._to_engine.connect(wire.address(self._folder.name, "in"))
        self._from_engine.bind(wire.address(self._folder.name, "out"))
        self._lifeline, theirs = socket.socketpair()
        self._counter = Counter(os.memfd_create("progress"))
        words = [args.distributed_executor_backend or MP] * spare
        with theirs:
            self._process = spawn(MODULE, *words, filenos=(theirs.fileno(), self._counter.fileno))
        self._poller = zmq.Poller()
        self._poller.register(self._from_engine, zmq.POLLIN)
        self._poller.register(self._lifeline.fileno(), zmq.POLLIN)
        self._outputs = wire.decoder(EngineOutputs)
        self._closed = self.ready = False
        if wait:
            try:
                self.begin(args)
                self._wait_until_ready()
            except BaseException:
                self._lifeline.close()  # an engine that still loads does not listen
                self.close()
                raise

    def begin(self, args: EngineArgs) -> None:
        """The engine starts."""
        start = wire.encode(wire.Start(args, self._folder.name, log_level(), current_format()))
        with contextlib.suppress(OSError):  # receive() says how it ended
            self._lifeline.sendall(LENGTH.pack(len(start)) + start)

    def _wait_until_ready(self) -> None:
        message = self._next(None)
        assert message is not None
        kind, body = message
        if kind == wire.FAILED:
            failure: wire.Failure = wire.decoder(wire.Failure)(body)
            raise ValueError(failure.text) if failure.users else EngineError(failure.text)
        self._greet(body)

    def _greet(self, body: bytes) -> None:
        self.info = wire.decoder(EngineInfo)(body)
        self.ready = True

    @property
    def progress(self) -> int:
        """Messages taken, steps made and looks at its worker so far, whatever the engine does now; 0 once
        closed."""
        return 0 if self._closed else self._counter.value

    @property
    def cpu_seconds(self) -> float:
        """CPU time of the process and its threads so far."""
        return cpu_seconds(self.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Nothing is left of the process, nor of its workers."""
        return self._process.poll() is not None and hung_up(self._lifeline.fileno())

    def kill(self) -> None:
        """End the process whatever it does; close() tidies up."""
        self._process.kill()

    def add(self, requests: Sequence[EngineRequest]) -> None:
        self._to_engine.send_multipart((wire.ADD, wire.encode(requests)))

    def abort(self, keys: Sequence[int]) -> None:
        if keys:
            self._to_engine.send_multipart((wire.ABORT, wire.encode(keys)))

    def look(self) -> None:
        """Ask for a snapshot; it comes in outputs that have no other news. May be called where add is."""
        self._to_engine.send_multipart((wire.LOOK, b""))

    def receive(self, timeout: float | None = None) -> EngineOutputs | None:
        """Raises EngineDeadError with what is known of the cause."""
        message = self._next(timeout)
        if message is None:
            return None
        kind, body = message
        if kind == wire.FAILED:
            failure: wire.Failure = wire.decoder(wire.Failure)(body)
            kind_of_end = CrashLoopError if failure.hopeless else EngineDeadError
            raise kind_of_end(f"the engine failed: {failure.text}")
        if kind == wire.READY:
            self._greet(body)
            return None
        outputs: EngineOutputs = self._outputs(body)
        return outputs

    def filenos(self) -> tuple[int, ...]:
        """Descriptors that become readable when receive(0) may have news. They tell of changes only: after
        each, receive until None."""
        return int(self._from_engine.get(zmq.FD)), self._lifeline.fileno()

    def _next(self, timeout: float | None) -> Sequence[bytes] | None:
        if self._closed:
            raise EngineDeadError("the engine was shut down")
        ready = dict(self._poller.poll(None if timeout is None else int(timeout * 1000)))
        if self._from_engine in ready or (ready and self._from_engine.poll(_LAST_WORDS_MS)):
            message: list[bytes] = self._from_engine.recv_multipart()
            return message
        if not ready:
            return None
        try:
            code = self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            raise EngineDeadError("the engine process hung up") from None
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        raise EngineDeadError(f"the engine process ended {how}")

    def close(self) -> None:
        """Let the engine finish its steps and write its trace; then nothing of it is left."""
        if self._closed:
            return
        self._closed = True
        self._to_engine.send_multipart((wire.CLOSE, b""))
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._lifeline.close()
        self._counter.close()
        self._context.destroy(linger=0)
        self._folder.cleanup()
