"""Bytes of files to tensors on a device through pinned buffers, from many threads at once.

Mapping the file and copying from there costs a page fault every 4 KiB and a hidden copy by the driver; a read
into pinned memory costs neither.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Tensor = torch.Tensor

# Large enough that a read and a copy run at full speed; every thread has BUFFERS of them.
BUFFER_BYTES = 16 << 20
BUFFERS = 2
# Those of safetensors' types that weights may have.
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies: bytes begin to end of the file."""

    path: Path
    begin: int
    end: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The weights of a safetensors file that safe_open accepts. Tensors of other types are left out. Format:
    https://github.com/huggingface/safetensors#format."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(size))
    header.pop("__metadata__", None)
    start = 8 + size
    return {
        name: StoredTensor(
            path,
            start + entry["data_offsets"][0],
            start + entry["data_offsets"][1],
            DTYPES[entry["dtype"]],
            tuple(entry["shape"]),
        )
        for name, entry in header.items()
        if entry["dtype"] in DTYPES
    }


class StagedReader:
    """Everything goes to the stream that is current where the reader is made, so that whoever uses a tensor
    there, or frees it, is in order with its copy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._own = threading.local()
        self._files: dict[Path, int] = {}
        self._opening = threading.Lock()

    @torch.inference_mode()
    def read(self, stored: StoredTensor) -> Tensor:
        """The tensor on the device, its copy perhaps still under way. Raises OSError, ValueError for a file
        that ends too soon."""
        file, size = self._open(stored.path), stored.end - stored.begin
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            target = torch.empty(size, dtype=torch.uint8, device=self._device)
            for start in range(0, size, BUFFER_BYTES):
                piece = target[start : start + BUFFER_BYTES]
                buffer = next(self._buffers())
                buffer.wait()
                _fill(file, buffer.bytes[: len(piece)], stored.begin + start, stored.path)
                piece.copy_(buffer.host[: len(piece)], non_blocking=True)
                buffer.mark(self._stream)
        return target.view(stored.dtype).view(stored.shape)

    def close(self) -> None:
        """Nobody may be reading."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _open(self, path: Path) -> int:
        with self._opening:
            if path not in self._files:
                self._files[path] = os.open(path, os.O_RDONLY)
            return self._files[path]

    def _buffers(self) -> Iterator[_Buffer]:
        """This thread's, in turn."""
        if not hasattr(self._own, "turn"):
            pinned = self._stream is not None
            self._own.turn = itertools.cycle([_Buffer(pinned) for _ in range(BUFFERS)])
        turn: Iterator[_Buffer] = self._own.turn
        return turn


class _Buffer:
    """Pinned memory and the end of the last copy out of it. On a CPU copies end at once."""

    def __init__(self, pinned: bool) -> None:
        self.host = torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=pinned)
        self.bytes = self.host.numpy().data
        self._copied = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()

    def mark(self, stream: torch.cuda.Stream | None) -> None:
        if self._copied is not None:
            self._copied.record(stream)


def _fill(file: int, target: memoryview, offset: int, path: Path) -> None:
    done = 0
    while done < len(target):
        count = os.preadv(file, [target[done:]], offset + done)
        if count == 0:
            raise ValueError(f"{path} ends at byte {offset + done}, before its last tensor does")
        done += count
