"""The GGUF container: metadata, and tensors as float32 arrays. No torch, so that the front end may read it
too.

The gguf package dequantises. Its reader makes several arrays for every string of a vocabulary and takes
seconds to open a file; this one takes a fraction of a second. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray

QUANTISATIONS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# Value types by number; 8 is a string and 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """shape: rows first, as numpy and torch have it. type: ggml's number. offset: bytes into the data
    section."""

    shape: tuple[int, ...]
    type: int
    offset: int


class GGUFFile:
    """metadata: every field by key. tensors: by GGUF name. Raises ValueError where the file is damaged."""

    def __init__(self, path: Path) -> None:
        if not is_gguf(path):
            raise ValueError(f"{path} is not a GGUF file")
        self.path = path
        self._bytes = np.memmap(path, np.uint8, "r")
        cursor = _Cursor(self._bytes.data, at=len(_MAGIC))
        try:
            self.metadata, self.tensors = _read_header(cursor)
        except (struct.error, UnicodeDecodeError, KeyError, IndexError) as error:
            raise ValueError(f"{path} is a damaged GGUF file: {error!r}") from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        alignment = self.get("general.alignment", _DEFAULT_ALIGNMENT)
        self._data_start = -(-cursor.at // alignment) * alignment

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(key, default)

    def need(self, key: str) -> Any:
        if key not in self.metadata:
            raise ValueError(f"{self.path}: the metadata field {key!r} is missing")
        return self.metadata[key]

    def unsupported(self, what: str, known: Iterable[str]) -> ValueError:
        return ValueError(f"{self.path}: {what} is not supported, must be one of {', '.join(known)}")

    def quantisation(self, name: str) -> str:
        """ggml's name of a tensor's type. Raises ValueError for one that is not supported."""
        from gguf import GGMLQuantizationType

        number = self.tensors[name].type
        known = {member.value: member.name for member in GGMLQuantizationType}
        kind = known.get(number, str(number))
        if kind not in QUANTISATIONS:
            raise self.unsupported(f"{name}: type {kind}", QUANTISATIONS)
        return kind

    def array(self, name: str) -> Array:
        """The tensor, float32, dequantised; a copy that may be written."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

        info = self.tensors[name]
        kind = GGMLQuantizationType[self.quantisation(name)]
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        row_bytes = info.shape[-1] // block_size * block_bytes
        begin = self._data_start + info.offset
        stored = self._bytes[begin : begin + math.prod(info.shape[:-1]) * row_bytes]
        if len(stored) != math.prod(info.shape[:-1]) * row_bytes or info.shape[-1] % block_size:
            raise ValueError(f"{self.path} is a damaged GGUF file: {name} is cut short")
        return np.array(dequantize(stored.reshape(*info.shape[:-1], row_bytes), kind), np.float32)


def is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


@functools.lru_cache(maxsize=1)
def open_gguf(path: Path) -> GGUFFile:
    """The last file stays open: spec, weights and tokenizer come from one."""
    return GGUFFile(path)


class _Cursor:
    def __init__(self, buffer: memoryview, at: int) -> None:
        self._buffer = buffer
        self.at = at

    def scalars(self, code: str, count: int = 1) -> tuple[Any, ...]:
        layout = f"<{count}{code}"
        values = struct.unpack_from(layout, self._buffer, self.at)
        self.at += struct.calcsize(layout)
        return values

    def string(self) -> str:
        (length,) = struct.unpack_from("<Q", self._buffer, self.at)
        begin, self.at = self.at + 8, self.at + 8 + length
        if self.at > len(self._buffer):
            raise IndexError("a string runs past the end")
        return str(self._buffer[begin : self.at], "utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalars(_SCALARS[kind])[0]
        item, count = *self.scalars("I"), *self.scalars("Q")
        if item in _SCALARS:
            return list(self.scalars(_SCALARS[item], count))
        return [self.value(item) for _ in range(count)]


def _read_header(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    (version, tensor_count, field_count) = *cursor.scalars("I"), *cursor.scalars("Q", 2)
    if version not in _VERSIONS:
        raise ValueError(f"GGUF version {version} is not supported, must be 2 or 3, little-endian")
    metadata = {}
    for _ in range(field_count):
        key = cursor.string()
        metadata[key] = cursor.value(*cursor.scalars("I"))
    tensors = {}
    for _ in range(tensor_count):
        name = cursor.string()
        shape = tuple(reversed(cursor.scalars("Q", *cursor.scalars("I"))))
        tensors[name] = TensorInfo(shape, *cursor.scalars("I"), *cursor.scalars("Q"))
    return metadata, tensors
