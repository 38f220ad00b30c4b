"""What readers of text give, and the part that all of them share: what may turn out to be markup waits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol


@dataclass(frozen=True, slots=True)
class CallStart:
    """The model calls a tool: what follows belongs to this call until the next one starts."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the JSON text of the arguments of the call that started last."""

    text: str


Event = str | CallStart | Arguments  # a plain string is content, for people to read
Schemas = Mapping[str, Mapping[str, Any]]  # JSON schema of the arguments, by the tool's name

NO_SCHEMAS: Schemas = {}
MAX_DEPTH = 128  # of arguments: far less than what Python can recurse, wherever it is called


class ToolParser(Protocol):
    """Reads one answer. Pieces of any size give the same events, when joined; markup is never among them.

    special_tokens: whether the markup is made of special tokens, which must then be in the text. example: a
    call as the model is to write it.
    """

    special_tokens: ClassVar[bool]
    example: ClassVar[str]

    def feed(self, text: str) -> list[Event]:
        """What is certain with this text."""
        ...

    def end(self, cut: bool) -> list[Event]:
        """The rest. cut: the answer's length ended it, so a call that is open stays incomplete."""
        ...


class Machine(ABC):
    """A ToolParser made of states. A state consumes from the front of _rest and returns True, or returns
    False where it must see more text.

    White space of the content waits too: beside a call it is the markup's, unless content follows.
    """

    special_tokens: ClassVar[bool] = False
    example: ClassVar[str] = ""

    def __init__(self, schemas: Schemas = NO_SCHEMAS) -> None:
        self._schemas = schemas
        self._rest = ""
        self._events: list[Event] = []
        self._state: Callable[[], bool] = self._in_text
        self._space = ""
        self._said = self._called = False

    def feed(self, text: str) -> list[Event]:
        self._rest += text
        while self._rest and self._state():
            continue
        return self._take()

    def end(self, cut: bool) -> list[Event]:
        self._finish(cut)
        if not self._called:
            self._emit(self._space)
        return self._take()

    @abstractmethod
    def _in_text(self) -> bool:
        """The state in which everything begins."""

    @abstractmethod
    def _finish(self, cut: bool) -> None:
        """Deal with _rest: no text follows."""

    def _take(self) -> list[Event]:
        events, self._events = joined(self._events), []
        return events

    def _emit(self, event: Event) -> None:
        self._called |= isinstance(event, CallStart)
        self._events.append(event)

    def _say(self, text: str) -> None:
        """Content."""
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if self._called and not self._said:
            shown = shown.lstrip()
        if shown:
            self._said = True
            self._emit(shown)

    def _say_until(self, markers: Sequence[str]) -> str | None:
        """The first marker in _rest, consumed with the content before it. None: all is content but what may
        begin a marker."""
        place, marker = find_first(self._rest, markers)
        if marker is None:
            place = len(self._rest) - open_length(self._rest, markers)
        self._say(self._rest[:place])
        self._rest = self._rest[place + len(marker or "") :]
        return marker

    def _say_held(self, cut: bool) -> None:
        """What may have begun a marker is content; where the length cut an answer with calls, it was one."""
        if not (cut and self._called):
            self._say(self._rest)

    def _skip_space(self) -> bool:
        """True where something else follows."""
        self._rest = self._rest.lstrip()
        return bool(self._rest)


def mended(text: str) -> str:
    """Text with U+FFFD for each lone half of a surrogate pair, which JSON's escapes can write."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def too_deep(value: Any) -> bool:
    """Whether lists and objects are nested more than MAX_DEPTH levels deep."""
    level = [value]
    for _ in range(MAX_DEPTH):
        parents = [item for item in level if isinstance(item, dict | list)]
        level = [item for one in parents for item in (one.values() if isinstance(one, dict) else one)]
    return any(isinstance(item, dict | list) for item in level)


def find_first(text: str, markers: Iterable[str]) -> tuple[int, str | None]:
    """(place, marker) of the marker that begins first; of those that begin together, the longest."""
    found = [(place, -len(marker), marker) for marker in markers if (place := text.find(marker)) >= 0]
    place, _, marker = min(found, default=(-1, 0, None))
    return place, marker


def open_length(text: str, markers: Iterable[str]) -> int:
    """Characters at the end of text that may be the beginning of a marker."""
    return max(
        (
            length
            for marker in markers
            for length in range(1, min(len(marker), len(text) + 1))
            if text.endswith(marker[:length])
        ),
        default=0,
    )


def joined(events: Iterable[Event]) -> list[Event]:
    """Neighbours of one kind as one, without empty ones."""
    out: list[Event] = []
    for event in events:
        if event == "":
            continue
        if isinstance(event, str) and out and isinstance(out[-1], str):
            out[-1] += event
        elif isinstance(event, Arguments) and out and isinstance(out[-1], Arguments):
            out[-1] = Arguments(out[-1].text + event.text)
        else:
            out.append(event)
    return out
