"""Reads what will be asked for next while the caller works: several threads, a bounded lead."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import torch

Tensor = torch.Tensor
Read = Callable[[str], Tensor]


class ReadAhead:
    """In a with block, a function from name to tensor: read's own results and errors.

    read is called from `threads` threads at once, in the order of sizes (name -> bytes). What was begun and
    not yet asked for stays within `window` bytes, or is one tensor. A name that is asked for before its turn,
    or again, is read by the caller: the order matters for speed only.
    """

    def __init__(self, read: Read, sizes: Mapping[str, int], *, window: int, threads: int) -> None:
        self._read, self._sizes, self._window = read, sizes, window
        self._waiting = dict.fromkeys(sizes)
        self._begun: set[str] = set()
        self._results: dict[str, Tensor | Exception] = {}
        self._ahead = 0
        self._changed = threading.Condition()
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(threads)]

    def __enter__(self) -> Read:
        for thread in self._threads:
            thread.start()
        return self._take

    def __exit__(self, *_error: object) -> None:
        with self._changed:
            self._waiting.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._results.clear()

    def _take(self, name: str) -> Tensor:
        with self._changed:
            if name in self._begun:
                self._changed.wait_for(lambda: name in self._results)
                self._begun.remove(name)
                self._ahead -= self._sizes[name]
                result: Tensor | Exception | None = self._results.pop(name)
            else:
                self._waiting.pop(name, None)
                result = None
            self._changed.notify_all()
        if isinstance(result, Exception):
            raise result
        return self._read(name) if result is None else result

    def _work(self) -> None:
        while (name := self._next()) is not None:
            try:
                result: Tensor | Exception = self._read(name)
            except Exception as error:  # raised where the name is asked for
                result = error
            with self._changed:
                self._results[name] = result
                self._changed.notify_all()
            # Taken by its reader: a thread that waits for room must not keep it alive.
            del result

    def _next(self) -> str | None:
        """The next name, once there is room for it; None at the end."""
        with self._changed:
            self._changed.wait_for(self._has_room)
            name = next(iter(self._waiting), None)
            if name is not None:
                del self._waiting[name]
                self._begun.add(name)
                self._ahead += self._sizes[name]
            return name

    def _has_room(self) -> bool:
        name = next(iter(self._waiting), None)
        return name is None or not self._begun or self._ahead + self._sizes[name] <= self._window
