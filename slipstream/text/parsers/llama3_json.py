"""Llama 3: {"name": ..., "parameters": {...}}, at the start of a line; several apart by semicolons."""

from __future__ import annotations

from typing import ClassVar

from slipstream.text.parsers.json_calls import CallObject
from slipstream.text.parsers.protocol import NO_SCHEMAS, Machine, Schemas

TAG = "<|python_tag|>"


class Llama3JsonParser(Machine):
    """An object that is no call is content. TAG, a special token, may stand before a call."""

    special_tokens: ClassVar[bool] = True
    example: ClassVar[str] = '{"name": "NAME", "parameters": {...}}'

    def __init__(self, schemas: Schemas = NO_SCHEMAS) -> None:
        super().__init__(schemas)
        self._call = CallObject(bare=True)

    def _in_text(self) -> bool:
        """At the start of a line."""
        if not self._said:
            self._say(self._rest[: len(self._rest) - len(self._rest.lstrip())])
            self._rest = self._rest.lstrip()
        if self._rest.startswith(TAG):
            self._rest = self._rest.removeprefix(TAG)
        elif self._rest.startswith("{"):
            self._call, self._state = CallObject(bare=True), self._in_call
        elif TAG.startswith(self._rest):
            return False
        else:
            self._state = self._in_line
        return True

    def _in_line(self) -> bool:
        marker = self._say_until(("\n", TAG))
        if marker is not None:
            self._say(marker.removeprefix(TAG))
            self._state = self._in_text
        return marker is not None

    def _in_call(self) -> bool:
        events, used = self._call.feed(self._rest)
        self._rest = self._rest[used:]
        for event in events:
            self._emit(event)
        if self._call.done and self._call.started:
            self._state = self._between
        elif self._call.done:
            self._say(self._call.raw)
            self._state = self._in_line
        return self._call.done

    def _between(self) -> bool:
        self._rest = self._rest.lstrip(" \t\r\n;,")
        self._state = self._in_text if self._rest else self._between
        return bool(self._rest)

    def _finish(self, cut: bool) -> None:
        if self._state in (self._in_text, self._in_line):
            self._say_held(cut)
        elif self._state == self._in_call and not self._call.started and not cut:
            self._say(self._call.raw)
