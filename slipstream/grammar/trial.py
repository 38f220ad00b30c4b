"""Tries a request's grammar out in a process that ends with its time and its memory.

What compiles grammars is not ours: a text of three kilobytes may keep it busy for ever, or take all the
memory there is, and no thread can be ended. So a front end has a process beside it (python -m
slipstream.grammar.trial) which reads the vocabulary once and makes a copy of itself, by fork(2), for each
grammar. The kernel ends a copy that takes longer or more than it may.

Messages are JSON with their length before it. A copy answers on a pipe of its own: its process id, a length,
a line of JSON, then the mask of an answer's first token.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from struct import Struct
from typing import NoReturn, Protocol

import numpy as np
import tokenizers

from slipstream.config.structured_outputs import FLAG, StructuredOutputsConfig
from slipstream.contracts.errors import BadRequest, EngineError, QueueTimeoutError
from slipstream.contracts.step import mask_words
from slipstream.contracts.structured_outputs import StructuredOutputsParams
from slipstream.grammar.compiler import WORKERS, open_library
from slipstream.grammar.form import constraint_text, first_line
from slipstream.grammar.library import Library
from slipstream.grammar.recent import Recent
from slipstream.text.tokenizer import Tokenizer

Array = np.ndarray

KEPT_ANSWERS = 256
# What a copy may take beside what it begins with.
MOST_BYTES = 1 << 30
START_SECONDS = 120.0
STUCK_SECONDS = 30.0  # without taking a message, or beginning with it
# A copy lives so much longer than who waits for it, and kills it: what it lacked is then known.
GRACE_SECONDS = 1.0
TOO_LARGE = f"cannot be compiled within {MOST_BYTES >> 20} MiB of memory"
# A message's length; that and seconds, beside a descriptor; a copy's process id.
_LENGTH, _ASKED, _PID = Struct("<Q"), Struct("<Qd"), Struct("<i")
_PIECE = 1 << 16
_sharing = threading.Lock()
_shared: weakref.WeakValueDictionary[bytes, Trials] = weakref.WeakValueDictionary()


class Spawn(Protocol):
    """Starts a module as a process that inherits descriptors, see engine/processes.py."""

    def __call__(self, module: str, *words: str, filenos: tuple[int, ...]) -> subprocess.Popen[bytes]: ...


def share_trials(
    backend: str, tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int], spawn: Spawn
) -> Trials:
    """Those of all front ends here with this vocabulary; see open_library."""
    setup = json.dumps({
        "backend": backend, "tokenizer": tokenizer.to_json(), "special_tokens": tokenizer.special_tokens,
        "vocab_size": vocab_size, "ends": [*ends, *tokenizer.end_token_ids],
    }).encode()  # fmt: skip
    with _sharing:
        found = _shared.get(setup)
        if found is None:
            found = _shared[setup] = Trials(setup, vocab_size, spawn)
        return found


class Trials:
    """One process and what it said last, for any thread. setup: as share_trials makes it."""

    def __init__(self, setup: bytes, vocab_size: int, spawn: Spawn) -> None:
        self._setup, self._vocab_size, self._spawn = setup, vocab_size, spawn
        self._kept: Recent[bytes, tuple[str, bytes]] = Recent(KEPT_ANSWERS)
        self._turns = threading.Semaphore(WORKERS)
        self._talking = threading.Lock()
        self._process: _Process | None = None

    def begin(self) -> None:
        """Start the process, which takes a second or two. Raises ValueError where it cannot read the
        vocabulary, EngineError where it does not start."""
        try:
            with self._talking:
                self._running()
        except _Gone as error:
            raise EngineError(f"grammars cannot be tried: {error}") from None

    def check(self, params: StructuredOutputsParams, config: StructuredOutputsConfig) -> tuple[str, Array]:
        """The grammar's text, and which tokens an answer may begin with, bool [vocab_size]. Raises BadRequest
        for what can't be compiled, allows nothing, or takes longer or more than it may; QueueTimeoutError
        where as many as may be tried at once have been for so long."""
        text, mask = self._check(params, config)
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        return text, bits[: self._vocab_size] != 0

    def _check(self, params: StructuredOutputsParams, config: StructuredOutputsConfig) -> tuple[str, bytes]:
        # A user's text in parsers that are not ours: whatever they raise is about that text.
        try:
            text = constraint_text(params)
            value = params.choice if params.kind == "choice" else True if params.json_object else text
            asked = json.dumps([{params.kind: value, "thoughts": params.thoughts}, asdict(config)]).encode()
        except BadRequest:
            raise
        except Exception as error:
            raise params.wrong(first_line(str(error))) from None
        known = self._kept.get(asked)
        if known is not None:
            return known
        try:
            found = self._try(asked, config.compile_timeout)
        except TimeoutError:
            limit = f"takes longer to compile than {config.compile_timeout:g} s ({FLAG})"
            raise params.wrong(limit) from None
        except MemoryError:
            raise params.wrong(TOO_LARGE) from None
        except ValueError as error:
            raise params.wrong(str(error)) from None
        self._kept.put(asked, found)
        return found

    def _try(self, asked: bytes, seconds: float) -> tuple[str, bytes]:
        """Raises ValueError with what is wrong, MemoryError, TimeoutError, QueueTimeoutError, and EngineError
        for what is no fault of the grammar."""
        if not self._turns.acquire(timeout=seconds):
            raise QueueTimeoutError(seconds)
        try:
            answer = self._ask(asked, seconds)
        except _Gone:  # once more: another process takes its place
            try:
                answer = self._ask(asked, seconds)
            except _Gone as error:
                raise EngineError(f"grammars cannot be tried: {error}") from None
        finally:
            self._turns.release()
        head, _, mask = answer.partition(b"\n")
        told = json.loads(head)
        if told["wrong"]:
            raise ValueError(told["wrong"])
        return told["text"], mask

    def _ask(self, asked: bytes, seconds: float) -> bytes:
        with self._talking:
            process = self._running()
        return process.ask(asked, seconds)

    def _running(self) -> _Process:
        if self._process is None or self._process.gone:
            self._process = None  # whose end need not wait for the next one's start
            self._process = _Process(self._setup, self._spawn)
        return self._process


class _Gone(Exception):
    """The process that should answer cannot any more."""


class _Process:
    """The parent's side of one. It ends when nobody refers to it any more. gone: no answers will come."""

    def __init__(self, setup: bytes, spawn: Spawn) -> None:
        """Returns when it has read the vocabulary. Raises ValueError where it can't, _Gone."""
        self.gone = False
        self._sending = threading.Lock()
        try:
            self._channel, theirs = socket.socketpair()
            with theirs:
                self._popen = spawn(__name__, filenos=(theirs.fileno(),))
        except OSError as error:
            raise _Gone(str(error)) from None
        self._end = weakref.finalize(self, _end, self._channel, self._popen)
        self._channel.settimeout(START_SECONDS)
        try:
            self._channel.sendall(_message(setup))
            ready = _receive(self._channel)
        except OSError:
            ready = None
        if ready is None:
            self._end()
            raise _Gone("the process that does it did not start")
        if wrong := json.loads(ready):
            self._end()
            raise ValueError(wrong)

    def ask(self, asked: bytes, seconds: float) -> bytes:
        """The answer. Raises _Gone, TimeoutError, and MemoryError where the copy has ended without one."""
        try:
            reading, writing = os.pipe()
        except OSError as error:
            raise _Gone(str(error)) from None
        with open(reading, "rb", buffering=0):
            self._send(asked, seconds, writing)
            try:
                begun = _read(reading, _PID.size, time.monotonic() + STUCK_SECONDS)
            except TimeoutError:
                begun = None
            if begun is None:
                self._give_up()
                raise _Gone("the process that does it has gone")
            deadline = time.monotonic() + seconds
            try:
                head = _read(reading, _LENGTH.size, deadline)
                answer = head and _read(reading, _LENGTH.unpack(head)[0], deadline)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(_PID.unpack(begun)[0], signal.SIGKILL)
                raise
        if not answer:
            raise MemoryError
        return answer

    def _send(self, asked: bytes, seconds: float, writing: int) -> None:
        """writing: the pipe's end for the answer, which is closed here."""
        try:
            with self._sending:
                self._channel.settimeout(STUCK_SECONDS)
                socket.send_fds(self._channel, [_ASKED.pack(len(asked), seconds)], [writing])
                self._channel.sendall(asked)
        except OSError as error:
            self._give_up()
            raise _Gone(str(error)) from None
        except BaseException:  # half of a message may have gone
            self._give_up()
            raise
        finally:
            os.close(writing)

    def _give_up(self) -> None:
        """Others that wait for it see it end. Its channel is closed when nobody has it any more."""
        self.gone = True
        self._popen.kill()


def _end(channel: socket.socket, popen: subprocess.Popen[bytes]) -> None:
    """It ends by itself when the channel closes; killed, it ends at once. Copies end with their time."""
    channel.close()
    popen.kill()
    popen.wait()


def _read(fileno: int, size: int, deadline: float) -> bytes | None:
    """So many bytes; None where the other end closes before. Raises TimeoutError."""
    data = bytearray()
    poll = select.poll()
    poll.register(fileno, select.POLLIN)
    while len(data) < size:
        if not poll.poll(1000 * max(deadline - time.monotonic(), 0.0)):
            raise TimeoutError
        piece = os.read(fileno, min(size - len(data), _PIECE))
        if not piece:
            if time.monotonic() >= deadline:  # its own clock ended it
                raise TimeoutError
            return None
        data += piece
    return bytes(data)


def _message(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def _receive(channel: socket.socket, length: int | None = None) -> bytes | None:
    """So many bytes, or a message; None where the other end has closed."""
    if length is None:
        head = _receive(channel, _LENGTH.size)
        return None if head is None else _receive(channel, *_LENGTH.unpack(head))
    data = bytearray()
    while len(data) < length:
        piece = channel.recv(min(length - len(data), _PIECE))
        if not piece:
            return None
        data += piece
    return bytes(data)


def main() -> None:
    """The process: reads the vocabulary, says so, and lets a copy answer whatever comes."""
    for number in (signal.SIGINT, signal.SIGTERM):  # its parent's to answer, whose end is its own
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how copies ended
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends them
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    channel = socket.socket(fileno=int(sys.argv[1]))
    with contextlib.suppress(ConnectionError), channel:  # its parent may end at any time
        setup = _receive(channel)
        if setup is None:
            return
        library, wrong = _open(**json.loads(setup))
        channel.sendall(_message(json.dumps(wrong).encode()))
        gc.freeze()
        while library is not None:
            head, filenos, _, _ = socket.recv_fds(channel, _ASKED.size, 1)
            if not head:
                return
            length, seconds = _ASKED.unpack(head)
            asked = _receive(channel, length)
            if asked is None:
                return
            if os.fork() == 0:
                channel.close()
                _answer(library, asked, filenos[0], seconds)
            os.close(filenos[0])


def _open(
    backend: str, tokenizer: str, special_tokens: dict[str, str], vocab_size: int, ends: list[int]
) -> tuple[tuple[Library, int] | None, str]:
    """The library and its words of a mask, or why there is none."""
    try:
        vocabulary = Tokenizer(tokenizers.Tokenizer.from_str(tokenizer), special_tokens, None, ends)
        return (open_library(backend, vocabulary, vocab_size, ends), mask_words(vocab_size)), ""
    except Exception as error:  # carried to who waits
        return None, first_line(str(error))


def _answer(library: tuple[Library, int], asked: bytes, fileno: int, seconds: float) -> NoReturn:
    """What a copy does, which ends: it says that it has begun, then the answer."""
    signal.setitimer(signal.ITIMER_REAL, seconds + GRACE_SECONDS)
    try:
        _limit_memory()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # last words of who lacks memory
        os.write(fileno, _PID.pack(os.getpid()))
        left = memoryview(_message(_try(*library, asked)))
        while left:
            left = left[os.write(fileno, left) :]
    finally:
        os._exit(0)


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MOST_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (min(most, hard) if hard >= 0 else most, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _try(library: Library, words: int, asked: bytes) -> bytes:
    """Raises MemoryError."""
    fields, config = json.loads(asked)
    mask, text, wrong = np.zeros(words, np.int32), "", ""
    try:
        text = library.text(StructuredOutputsParams(**fields), StructuredOutputsConfig(**config))
        library.compile(text)().fill(mask)
        if not mask.any():
            wrong = "allows no token"
    except MemoryError:
        raise
    except BadRequest as error:
        wrong = error.limit
    # A user's text in parsers that are not ours: whatever they raise is about that text.
    except Exception as error:
        wrong = first_line(str(error))
    return json.dumps({"text": text, "wrong": wrong}).encode() + b"\n" + mask.tobytes()


if __name__ == "__main__":
    main()
