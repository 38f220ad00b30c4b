"""Hermes and Qwen: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, once a call."""

from __future__ import annotations

from typing import ClassVar

from slipstream.text.parsers.json_calls import CallObject
from slipstream.text.parsers.protocol import NO_SCHEMAS, Machine, Schemas, find_first, open_length

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_LITTER = " \t\r\n}])"


class HermesParser(Machine):
    """What stands between the tags and is no call is content, without the tags."""

    example: ClassVar[str] = '<tool_call>\n{"name": "NAME", "arguments": {...}}\n</tool_call>'

    def __init__(self, schemas: Schemas = NO_SCHEMAS) -> None:
        super().__init__(schemas)
        self._call = CallObject()
        self._nonsense = ""

    def _in_text(self) -> bool:
        marker = self._say_until((OPEN, CLOSE))
        if marker == OPEN:
            self._call, self._state = CallObject(), self._in_call
        return marker is not None

    def _in_call(self) -> bool:
        events, used = self._call.feed(self._rest)
        self._rest = self._rest[used:]
        for event in events:
            self._emit(event)
        if self._call.done:
            whole = self._call.started and not self._call.broken
            self._state = self._after_object if whole else self._after_nonsense
        return self._call.done

    def _after_object(self) -> bool:
        """The tag that closes; some models forget it, others close a bracket too many."""
        self._rest = self._rest.lstrip(_LITTER)
        if CLOSE.startswith(self._rest) and self._rest != CLOSE:
            return False
        self._rest = self._rest.removeprefix(CLOSE)
        self._state = self._in_text
        return True

    def _after_nonsense(self) -> bool:
        place, marker = find_first(self._rest, (OPEN, CLOSE))
        if marker is None:
            place = len(self._rest) - open_length(self._rest, (OPEN, CLOSE))
        self._nonsense += self._rest[:place]
        self._rest = self._rest[place:]
        if marker is not None:
            self._end_nonsense()
            self._state = self._in_text
        return marker is not None

    def _end_nonsense(self) -> None:
        """Content, unless it is the rest of a call that has been given."""
        if not self._call.started:
            self._say(self._call.raw + self._nonsense)
        self._nonsense = ""

    def _finish(self, cut: bool) -> None:
        if self._state == self._after_nonsense:
            self._nonsense += self._rest
            self._end_nonsense()
        elif self._state == self._in_text:
            self._say_held(cut)
