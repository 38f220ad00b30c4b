"""Reads what an assistant says: thoughts, content and calls of tools, as they come. Chat and responses build
their answers from it."""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass, field
from typing import NotRequired

from typing_extensions import TypedDict

from slipstream.server.tools import ToolUse
from slipstream.text.parsers.protocol import Arguments, CallStart, Event
from slipstream.text.parsers.reasoning import ThinkParser

_LETTERS = string.ascii_letters + string.digits


class FunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


class CalledFunction(TypedDict):
    name: str
    arguments: str


class Call(TypedDict):
    id: str
    type: str
    function: CalledFunction


class CallDelta(TypedDict):
    """id, type and the function's name come in a call's first piece only."""

    index: int
    id: NotRequired[str]
    type: NotRequired[str]
    function: FunctionDelta


@dataclass(frozen=True, slots=True)
class Thoughts:
    text: str


Part = Thoughts | str | CallDelta  # a plain string is content


@dataclass(slots=True)
class Said:
    """A piece of what one choice says: its parts in their order."""

    parts: list[Part] = field(default_factory=list)

    @property
    def thoughts(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Thoughts))

    @property
    def content(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> list[CallDelta]:
        return [part for part in self.parts if isinstance(part, dict)]


class Assistant:
    """One choice. thinker: None where thoughts are not told apart. called: a tool has been called."""

    def __init__(self, tools: ToolUse, thinker: ThinkParser | None) -> None:
        self._thinker = thinker
        self._parser = None if tools.parser is None else tools.parser()
        self._parallel = tools.parallel
        self._short_ids = tools.short_ids
        self._num_calls = 0
        self._skipping = False
        self.thoughts = ""

    @property
    def called(self) -> bool:
        return self._num_calls > 0

    @property
    def marked(self) -> bool:
        """Whether thoughts or calls have been said, so that an answer may have no content."""
        return self.called or bool(self.thoughts)

    def feed(self, text: str, finish_reason: str | None) -> Said:
        """What this text releases; all of it where there is a reason to finish."""
        ended = finish_reason is not None
        thoughts, rest = "", text
        if self._thinker is not None:
            thoughts, rest = self._thinker.feed(text)
            if ended:
                last_thoughts, last = self._thinker.end()
                thoughts, rest = thoughts + last_thoughts, rest + last
        self.thoughts += thoughts
        said = Said([Thoughts(thoughts)] if thoughts else [])
        if self._parser is None:
            said.parts += [rest] if rest else []
            return said
        events = self._parser.feed(rest)
        if ended:
            events += self._parser.end(cut=finish_reason == "length")
        for event in events:
            self._add(said.parts, event)
        return said

    def finish(self, reason: str | None) -> str | None:
        """OpenAI's word for the reason: a finished answer that calls tools ended for them."""
        return "tool_calls" if reason == "stop" and self.called else reason

    def _add(self, parts: list[Part], event: Event) -> None:
        if isinstance(event, CallStart):
            self._skipping = self.called and not self._parallel
            if not self._skipping:
                self._num_calls += 1
                parts.append(
                    {
                        "index": self._num_calls - 1,
                        "id": self._call_id(),
                        "type": "function",
                        "function": {"name": event.name, "arguments": ""},
                    }
                )
        elif not isinstance(event, Arguments):
            parts.append(event)
        elif not self._skipping:
            if not (parts and isinstance(parts[-1], dict)):
                parts.append({"index": self._num_calls - 1, "function": {"arguments": ""}})
            parts[-1]["function"]["arguments"] += event.text  # type: ignore[index]

    def _call_id(self) -> str:
        if self._short_ids:
            return "".join(secrets.choice(_LETTERS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


def whole_calls(deltas: list[CallDelta]) -> list[Call]:
    """The calls of an answer that was read at once, each in one piece."""
    return [
        {
            "id": delta["id"],
            "type": delta["type"],
            "function": {"name": delta["function"]["name"], "arguments": delta["function"]["arguments"]},
        }
        for delta in deltas
    ]
