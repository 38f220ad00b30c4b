"""The compute stream: work runs in the order it was submitted; nobody waits but the one who reads a result.

On a CPU a worker thread executes, so that the host really plans the next step while this one runs.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, ClassVar, Protocol

import torch


class Ticket(Protocol):
    """Whatever a buffer's reuse has to wait for."""

    def wait(self) -> Any: ...


class Event(Protocol):
    """The end of one piece of submitted work. begin and end: time.perf_counter() seconds, for traces."""

    @property
    def begin(self) -> float: ...

    @property
    def end(self) -> float: ...

    def wait(self) -> Any:
        """Blocks until the work is done; returns its value or raises what it raised."""
        ...

    def done(self) -> bool: ...


class Stream(Protocol):
    """An in-order queue of device work."""

    def submit(self, work: Callable[[], Any]) -> Event: ...

    def close(self) -> None: ...


class CpuEvent:
    """Set by the worker thread. begin and end are time.perf_counter() seconds of the work itself."""

    __slots__ = ("_done", "_value", "begin", "end")

    def __init__(self) -> None:
        # A lock held until the work is done costs a tenth of a threading.Event.
        self._done = threading.Lock()
        self._done.acquire()
        self._value: Any = None
        self.begin = self.end = 0.0

    def finish(self, value: Any, begin: float) -> None:
        self._value = value
        self.begin, self.end = begin, time.perf_counter()
        self._done.release()

    def wait(self) -> Any:
        with self._done:
            value = self._value
        if isinstance(value, BaseException):
            raise value
        return value

    def done(self) -> bool:
        return not self._done.locked()


class _Worker:
    """A thread that executes in order, under inference mode. It goes with the process."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[tuple[Callable[[], Any], CpuEvent]] = SimpleQueue()
        self.process = os.getpid()
        threading.Thread(target=self._run, name="slipstream-device", daemon=True).start()

    @torch.inference_mode()
    def _run(self) -> None:
        while True:
            work, event = self.queue.get()
            begin = time.perf_counter()
            try:
                value = work()
            except Exception as error:  # carried to whoever waits for this step
                value = error
            event.finish(value, begin)
            # Dropped before the next wait: a parked worker must not keep a step's tensors alive.
            del work, event, value


class CpuStream:
    """Work for the one thread that computes in this process, in order.

    Torch keeps a team of OpenMP threads for every thread that computes. Two teams outnumber the cores, and
    then all of them sleep where they would spin: products take twice as long. So engines share a thread.
    """

    _worker: ClassVar[_Worker | None] = None
    _making = threading.Lock()

    def __init__(self) -> None:
        with self._making:
            worker = CpuStream._worker
            if worker is None or worker.process != os.getpid():  # threads do not survive a fork
                worker = CpuStream._worker = _Worker()
        self._queue = worker.queue

    def submit(self, work: Callable[[], Any]) -> CpuEvent:
        event = CpuEvent()
        self._queue.put((work, event))
        return event

    def close(self) -> None:
        """Waits for what was submitted."""
        self.submit(_nothing).wait()


def _nothing() -> None:
    """The end of a queue."""


class CudaEvent:
    """Recorded after the work's last kernel."""

    __slots__ = ("_event", "_value", "begin", "end")

    def __init__(self, value: Any, event: torch.cuda.Event, begin: float) -> None:
        # When the host began to launch and when it saw the end; the device's own times come from a profiler.
        self.begin, self.end = begin, 0.0
        self._value, self._event = value, event

    def wait(self) -> Any:
        self._event.synchronize()
        self.end = self.end or time.perf_counter()
        return self._value

    def done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]


class CudaStream:
    """A CUDA stream: the caller's thread launches, the device executes in order. Work that is not a mere
    launch of graphs sets inference mode itself."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._index = self._stream.device_index
        self._ids = (self._stream.stream_id, self._index, self._stream.device_type)

    def submit(self, work: Callable[[], Any]) -> CudaEvent:
        begin = time.perf_counter()
        # What torch.cuda.stream() does, without its 15 us of looking devices up.
        before = torch._C._cuda_getCurrentStream(self._index)
        torch._C._cuda_setStream(*self._ids)
        try:
            value = work()
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        finally:
            torch._C._cuda_setStream(*before)
        return CudaEvent(value, event, begin)

    def close(self) -> None:
        self._stream.synchronize()
