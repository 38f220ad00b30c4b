"""Calls written as JSON objects with a name and arguments, read while they are written."""

from __future__ import annotations

import json
from enum import Enum, auto

from slipstream.text.parsers.protocol import Arguments, CallStart, Event, mended

_CLOSES = {"{": "}", "[": "]"}
_PLAIN = frozenset("0123456789+-.eEtrufalsn")  # of numbers, true, false and null
_SPACE = frozenset(" \t\r\n")
_ARGUMENT_KEYS = ("arguments", "parameters")
_OTHER_KEYS = ("name", "type", "id")


class JsonValue:
    """Finds where a JSON value ends. done: it has ended; broken: it ended where no value can."""

    def __init__(self) -> None:
        self.done = self.broken = False
        self._open: list[str] = []  # the characters that will close what is open
        self._in_string = self._escaped = self._begun = False

    def feed(self, text: str) -> int:
        """How many characters belong to the value; those before its first one are counted too."""
        for place, char in enumerate(text):
            if not self._take(char):
                return place
            if self.done:
                return place + 1
        return len(text)

    def _take(self, char: str) -> bool:
        """False where char is not part of the value, which then has ended."""
        if self._in_string:
            if char == '"' and not self._escaped:
                self._in_string, self.done = False, not self._open
            self._escaped = char == "\\" and not self._escaped
            return True
        if char == '"' or char in _CLOSES:
            return self._begin(char)
        if self._open and char == self._open[-1]:
            self._open.pop()
            self.done = not self._open
            return True
        if char in _SPACE and (self._open or not self._begun):
            return True
        if char in _PLAIN or (self._open and char in ",:"):
            self._begun = True
            return True
        self.done, self.broken = True, bool(self._open) or not self._begun
        return False

    def _begin(self, char: str) -> bool:
        if self._begun and not self._open:  # a second value, right after a number or a word
            self.done = self.broken = True
            return False
        self._begun = True
        if char == '"':
            self._in_string = True
        else:
            self._open.append(_CLOSES[char])
        return True


class _At(Enum):
    OPEN = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA = auto()


class CallObject:
    """Reads {"name": ..., "arguments": {...}}, keys in any order, "parameters" for "arguments".

    done: it has ended, as a call where started is True, else as something that is none: raw holds all that
    was read then. broken: it ended where JSON cannot, after its start. bare: nothing but the object itself
    says that it is a call, so it must have arguments, and no key that calls do not have.
    """

    def __init__(self, bare: bool = False) -> None:
        self.done = self.started = self.broken = False
        self.raw = ""
        self._bare = bare
        self._at = _At.OPEN
        self._value = JsonValue()
        self._text = ""  # of the key or the value that is being read
        self._key = ""
        self._name: str | None = None
        self._early: str | None = None  # arguments that came before the name
        self._streams = False
        self._events: list[Event] = []

    def feed(self, text: str) -> tuple[list[Event], int]:
        """Events, and how many characters were used: fewer than all once it is done."""
        place = 0
        while place < len(text) and not self.done:
            used = self._step(text[place:])
            if not self.started:
                self.raw += text[place : place + used]
            place += used
        events, self._events = self._events, []
        return events, place

    def _step(self, text: str) -> int:
        """Consume something of the text."""
        if self._at in (_At.KEY, _At.VALUE):
            return self._in_value(text)
        char = text[0]
        if char in _SPACE:
            return 1
        follow = {(_At.OPEN, "{"): _At.KEY, (_At.COLON, ":"): _At.VALUE, (_At.COMMA, ","): _At.KEY}
        if (self._at, char) in follow:
            self._at = follow[self._at, char]
            self._value, self._text = JsonValue(), ""
            return 1
        self._finish()
        return int(char == "}" and self._at == _At.COMMA)

    def _in_value(self, text: str) -> int:
        if self._at == _At.KEY and not self._text.strip() and text[0] == "}":  # an object without keys
            self._finish()
            return 1
        used = self._value.feed(text)
        self._add(text[:used])
        if self._value.done:
            if self._value.broken:
                self._finish()
            elif self._at == _At.KEY:
                self._end_key()
            else:
                self._end_value()
        return used

    def _add(self, piece: str) -> None:
        """More of a key or value. An object of arguments goes out as it comes."""
        if self._streams:
            self._events.append(Arguments(piece))
            return
        self._text += piece
        if self._at == _At.VALUE and self._key in _ARGUMENT_KEYS and self._name and not self.started:
            value = self._text.lstrip()
            if value.startswith("{"):
                self._streams = True
                self._start(value)

    def _end_key(self) -> None:
        key = _string(self._text)
        if key is None or (self._bare and key not in _OTHER_KEYS + _ARGUMENT_KEYS):
            self._finish()
            return
        self._key, self._at = key, _At.COLON

    def _end_value(self) -> None:
        self._at, self._streams = _At.COMMA, False
        text = self._text.strip()
        if self._key == "name" and self._name is None:
            self._name = _string(text)
            if not self._name:
                self._finish()
        elif self._key in _ARGUMENT_KEYS and not self.started:
            inner = _string(text)  # some models write the arguments as a string that holds JSON
            self._early = "{}" if text == "null" else text if inner is None else inner
        if self._early is not None and self._name and not self.started:
            self._start(self._early)

    def _start(self, arguments: str) -> None:
        assert self._name is not None
        self.started, self.raw = True, ""
        self._events += [CallStart(self._name), Arguments(arguments)]

    def _finish(self) -> None:
        self.done = True
        self.broken = self.started and self._at != _At.COMMA
        if self._name and not (self.started or self._bare) and self._at == _At.COMMA:
            self._start("{}")


class CallList:
    """Reads [{...}, {...}], each a CallObject. done: at its end, or where it is no list of calls."""

    def __init__(self) -> None:
        self.done = False
        self._object: CallObject | None = None
        self._begun = False

    def feed(self, text: str) -> tuple[list[Event], int]:
        """Events, and how many characters were used."""
        events: list[Event] = []
        place = 0
        while place < len(text) and not self.done:
            if self._object is not None:
                found, used = self._object.feed(text[place:])
                events += found
                place += used
                if self._object.done:
                    self.done = not self._object.started
                    self._object = None
                continue
            char = text[place]
            if char == "{" and self._begun:
                self._object = CallObject()
                continue
            known = char in _SPACE or char in (",]" if self._begun else "[")
            self.done = char == "]" or not known
            self._begun |= char == "["
            place += int(known)
        return events, place


def _string(text: str) -> str | None:
    """The string that a JSON text holds, None where it holds something else, which may be nested deep."""
    if not text.lstrip().startswith('"'):
        return None
    try:
        return mended(json.loads(text, strict=False))
    except ValueError:
        return None
