"""A process that tries grammars, whose library does what a regex says, for tests: python -m faulty_trial."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from slipstream.grammar import trial


class Library:
    def text(self, params: Any, config: Any) -> str:
        return str(params.regex)

    def compile(self, text: str) -> Any:
        match text.split():
            case ["slow", seconds]:
                time.sleep(float(seconds))
            case ["hungry"]:
                bytearray(2 * trial.MOST_BYTES)
            case ["hungrier"]:  # in a language that ends where it finds no memory
                os.abort()
            case ["wrong"]:
                raise ValueError("is wrong")
        return lambda: self

    def fill(self, mask: Any) -> None:
        mask[0] = 5


def try_out(library: Library, words: int, asked: bytes) -> bytes:
    """Of one, half an answer with the length of a whole one."""
    answer = whole(library, words, asked)
    return Half(answer) if b"broken off" in asked else answer


class Half(bytes):
    """Says that it is longer than it is."""

    def __len__(self) -> int:
        return 1000 + super().__len__()

    def __radd__(self, before: bytes) -> bytes:
        return before + bytes(self[:])


def open_library(backend: str, *_: Any) -> Library:
    if backend == "bad":
        raise ValueError("this vocabulary is none")
    if backend == "ends":
        os._exit(1)
    return Library()


whole = trial._try


if __name__ == "__main__":
    trial.open_library, trial._try = open_library, try_out
    sys.exit(trial.main())
