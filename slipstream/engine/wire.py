"""Messages between a front end and its engine process: a kind and a msgpack body; arrays travel as
[dtype, shape, bytes]."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from slipstream.config.args import EngineArgs

# To the engine.
ADD = b"add"  # list[EngineRequest]
ABORT = b"abort"  # list[int], keys
LOOK = b"look"  # nothing; the answer is OUTPUTS with a snapshot
CLOSE = b"close"  # nothing
# From the engine.
READY = b"ready"  # EngineInfo
OUTPUTS = b"outputs"  # EngineOutputs
FAILED = b"failed"  # Failure, then nothing more


@dataclass(frozen=True, slots=True)
class Start:
    """What an engine process is told first. folder: where the sockets are; log_level: None is silent;
    log_format: one of observe.log's."""

    args: EngineArgs
    folder: str
    log_level: str | None
    log_format: str


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an engine or a worker could not start, or ended. users: what was asked of it cannot be honoured;
    memory: a step found too little of it, and others may follow; hopeless: another one would end likewise."""

    users: bool
    text: str
    memory: bool = False
    hopeless: bool = False


def address(folder: str, name: str) -> str:
    """zmq's name of the socket "in" (to the engine) or "out"."""
    return f"ipc://{folder}/{name}"


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be sent")


def _array(kind: type, value: Any, memory: Callable[[bytes], Any] = bytes) -> Any:
    if kind is not np.ndarray:
        raise TypeError(f"{kind.__name__} cannot be received")
    dtype, shape, data = value
    return np.frombuffer(memory(data), dtype).reshape(shape)


encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode


def decoder(kind: Any, writable: bool = False) -> Any:
    """A function from bytes to an object of this type. Its arrays are read-only unless they shall be
    writable, which torch wants of what it looks at."""
    hook = functools.partial(_array, memory=bytearray) if writable else _array
    return msgspec.msgpack.Decoder(kind, dec_hook=hook).decode
