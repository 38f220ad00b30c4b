"""Mistral: [TOOL_CALLS] before a list of JSON objects, or, since version 11 of its tokenizer, before each
call: [TOOL_CALLS]name{...} or [TOOL_CALLS]name[CALL_ID]id[ARGS]{...}."""

from __future__ import annotations

from typing import ClassVar

from slipstream.text.parsers.json_calls import CallList, CallObject, JsonValue
from slipstream.text.parsers.protocol import (
    NO_SCHEMAS,
    Arguments,
    CallStart,
    Machine,
    Schemas,
    find_first,
    open_length,
)

TAG, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class MistralParser(Machine):
    """Content comes before the first call only; what stands between calls is dropped."""

    special_tokens: ClassVar[bool] = True
    example: ClassVar[str] = "[TOOL_CALLS]NAME{...}"

    def __init__(self, schemas: Schemas = NO_SCHEMAS) -> None:
        super().__init__(schemas)
        self._calls: CallList | CallObject = CallList()
        self._value = JsonValue()

    def _in_text(self) -> bool:
        marker = self._say_until((TAG,))
        if marker is not None:
            self._state = self._after_tag
        return marker is not None

    def _after_tag(self) -> bool:
        if not self._skip_space() or (self._rest != TAG and TAG.startswith(self._rest)):
            return False
        if self._rest.startswith(TAG):
            self._rest = self._rest.removeprefix(TAG)
        elif self._rest[0] in "[{":
            self._calls = CallList() if self._rest[0] == "[" else CallObject()
            self._state = self._in_objects
        else:
            self._state = self._in_name
        return True

    def _in_objects(self) -> bool:
        events, used = self._calls.feed(self._rest)
        self._rest = self._rest[used:]
        for event in events:
            self._emit(event)
        if self._calls.done:
            self._state = self._between
        return self._calls.done

    def _in_name(self) -> bool:
        place, marker = find_first(self._rest, (ARGS, CALL_ID, TAG, "{"))
        if marker is None:
            return False
        name = self._rest[:place].strip()
        if marker == CALL_ID:
            place, marker = find_first(self._rest, (ARGS, TAG, "{"))
            if marker is None:
                return False
        self._rest = self._rest[place:] if marker in (TAG, "{") else self._rest[place + len(marker) :]
        if name and marker != TAG:
            self._emit(CallStart(name))
            self._value, self._state = JsonValue(), self._in_arguments
        else:
            self._state = self._between
        return True

    def _in_arguments(self) -> bool:
        used = self._value.feed(self._rest)
        self._emit(Arguments(self._rest[:used]))
        self._rest = self._rest[used:]
        if self._value.done:
            self._state = self._between
        return self._value.done

    def _between(self) -> bool:
        place, marker = find_first(self._rest, (TAG,))
        if marker is None:
            self._rest = self._rest[len(self._rest) - open_length(self._rest, (TAG,)) :]
            return False
        self._rest = self._rest[place + len(TAG) :]
        self._state = self._after_tag
        return True

    def _finish(self, cut: bool) -> None:
        if self._state == self._in_text or (self._state == self._in_name and not cut):
            self._say_held(cut)
