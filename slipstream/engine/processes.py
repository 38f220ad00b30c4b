"""What every process of ours needs: to be started, to talk over pipes, to be watched, to end with its parent.

Messages are a length, a kind (one byte) and a body. Pipes, because they measured fastest of what wakes a
sleeping reader: a message of a step and its answer of 3 KB take 22 us, 33 by a socket, 65 by shared memory
with an eventfd, 180 by zmq (2 cores, virtual machine).
"""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap
import os
import select
import signal
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from slipstream.engine.faults import LOOK_SECONDS
from slipstream.observe.log import ROOT

LENGTH = struct.Struct("<Q")
_HEAD = struct.Struct("<QB")
_PIECE = 1 << 16  # what a pipe holds
_PR_SET_PDEATHSIG = 1  # prctl(2)
_QUIET_NICE = 5  # a quarter of the processor, where others compute on all of it


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


class Closed(Exception):
    """The other end of a pipe has gone."""


class Sender:
    """The writing end of a pipe. waiting: called now and then while the pipe is full, which it stays where
    the reader is stopped; it raises what ends the wait. Without it, send() waits."""

    def __init__(self, fileno: int, waiting: Callable[[], None] | None = None) -> None:
        self.fileno = fileno
        self._waiting = waiting
        self._poll = select.poll()
        self._poll.register(fileno, select.POLLOUT)
        os.set_blocking(fileno, waiting is None)

    def send(self, kind: int, body: bytes = b"") -> None:
        """Raises Closed."""
        data: bytes | memoryview = _HEAD.pack(len(body), kind) + body
        while data:
            try:
                data = memoryview(data)[os.write(self.fileno, data) :]
            except BlockingIOError:
                if self._waiting is not None and not self._poll.poll(1000 * LOOK_SECONDS):
                    self._waiting()
            except BrokenPipeError:
                raise Closed from None

    def close(self) -> None:
        os.close(self.fileno)


class Receiver:
    """The reading end of a pipe."""

    def __init__(self, fileno: int) -> None:
        self.fileno = fileno
        self._poll = select.poll()
        self._poll.register(fileno, select.POLLIN)
        self._data = bytearray()
        self._whole: deque[tuple[int, bytes]] = deque()

    def receive(self, timeout: float | None = None) -> tuple[int, bytes] | None:
        """Kind and body of the next message; None after timeout seconds. Raises Closed."""
        while not self._whole:
            if timeout is not None and not self._poll.poll(1000 * timeout):
                return None
            piece = os.read(self.fileno, _PIECE)
            if not piece:
                raise Closed
            self._take(piece)
        return self._whole.popleft()

    def _take(self, piece: bytes) -> None:
        data = self._data
        data += piece
        begin, head = 0, _HEAD.size
        while len(data) >= begin + head:
            length, kind = _HEAD.unpack_from(data, begin)
            end = begin + head + length
            if len(data) < end:
                break
            self._whole.append((kind, bytes(data[begin + head : end])))
            begin = end
        del data[:begin]

    def close(self) -> None:
        os.close(self.fileno)


def spawn(
    module: str, *words: str, filenos: tuple[int, ...], keep: tuple[int, ...] = ()
) -> subprocess.Popen[bytes]:
    """A fresh interpreter that imports from where this one does, but not this one's main module. It inherits
    the descriptors, whose numbers come before the words, and keeps others open without knowing of them."""
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*filter(None, sys.path), root])}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *map(str, filenos), *words],
        pass_fds=filenos + keep, stdin=subprocess.DEVNULL, env=environment,
    )  # fmt: skip


def hung_up(fileno: int) -> bool:
    """Whether nobody holds the other end of a pipe or socket any more."""
    poll = select.poll()
    poll.register(fileno, 0)
    return bool(poll.poll(0))


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and its threads so far, from Linux' /proc/PID/stat (proc(5)); 0 once it has
    gone."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")


def log_level() -> str | None:
    """What our loggers are set to here; None where nobody listens."""
    root = logging.getLogger(ROOT)
    return logging.getLevelName(root.getEffectiveLevel()) if root.hasHandlers() else None


def end_with_parent(fileno: int, tidy_up: Callable[[], None] | None = None) -> None:
    """End at once when the other end of a pipe or socket closes, whatever this process is doing."""

    def watch() -> None:
        poll = select.poll()
        poll.register(fileno, 0)
        poll.poll()
        if tidy_up is not None:
            tidy_up()
        os._exit(1)

    threading.Thread(target=watch, name="slipstream-parent", daemon=True).start()


def die_with_parent_thread() -> None:
    """Linux ends this process with the thread that started it, also while it is stopped."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def import_quietly(modules: tuple[str, ...]) -> None:
    """Import at a low priority, as a spare does beside who computes. What the thread starts keeps its
    priority; this process does not: on Linux it is a thread's."""

    def work() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _QUIET_NICE)
        for module in modules:
            __import__(module)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def keep_for_good() -> None:
    """Nothing made so far will ever be garbage: the collector need not walk through it between steps."""
    gc.collect()
    gc.freeze()
