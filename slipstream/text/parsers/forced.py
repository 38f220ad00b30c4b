"""Calls that grammar has forced: nothing but JSON is in the text."""

from __future__ import annotations

from slipstream.text.parsers.json_calls import CallList
from slipstream.text.parsers.protocol import Arguments, CallStart, Machine


class ForcedListParser(Machine):
    """[{"name": ..., "parameters": {...}}, ...] of tool_choice "required"."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = CallList()

    def _in_text(self) -> bool:
        events, used = self._calls.feed(self._rest)
        self._rest = self._rest[used:]
        for event in events:
            self._emit(event)
        return used > 0

    def _finish(self, cut: bool) -> None:
        self._rest = ""


class ForcedCallParser(Machine):
    """The arguments of the one tool that tool_choice names."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def _in_text(self) -> bool:
        if not self._called:
            self._rest = self._rest.lstrip()
            if not self._rest:
                return False
            self._emit(CallStart(self._name))
        self._emit(Arguments(self._rest))
        self._rest = ""
        return True

    def _finish(self, cut: bool) -> None:
        self._rest = ""
