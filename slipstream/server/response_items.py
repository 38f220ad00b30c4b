"""The output of a response, item by item, and the events that tell of it: built the same way whether or not
anybody streams."""

from __future__ import annotations

import codecs
import copy
import re
import uuid
from collections.abc import Iterator
from typing import Any

from slipstream.server.answers import TokenLogprob
from slipstream.server.assistant import CallDelta, Said, Thoughts
from slipstream.text.parsers.reasoning import CLOSE, OPEN

Event = dict[str, Any]
Item = dict[str, Any]


_BEFORE_THOUGHTS = re.compile(rf"\s*{OPEN}")
_AFTER_THOUGHTS = re.compile(rf"\s*(?:{OPEN}\s*)?{CLOSE}")


class _Tokens:
    """Tokens of an answer whose text no item has had yet, to find those of an item's text. Between the texts
    of items stands what the readers of thoughts and calls have dropped."""

    def __init__(self) -> None:
        self._text = ""
        self._tokens: list[tuple[int, int, TokenLogprob]] = []  # with where its characters begin and end
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def add(self, scores: list[TokenLogprob]) -> None:
        for score in scores:
            own = bytes(score["bytes"])
            start = len(self._text)
            self._text += self._decode(own)
            # One that ends inside a character is a part of the character that comes next.
            self._tokens.append((start, max(len(self._text), start + bool(own)), score))

    def take(self, text: str, markup: re.Pattern[str] | None, newest: bool) -> list[TokenLogprob]:
        """The tokens of a text, which leave, as does everything before it. markup: what may stand before it;
        None where it goes on. newest: no other text of the answer is known to follow."""
        if not self._tokens:
            return []
        start = self._start(text, markup, newest)
        found = [(start, start + len(text))] if start >= 0 else self._words(text)
        if not found:
            if markup is not None:
                return []
            found = [(0, len(self._text))]
        covered = bytearray(len(self._text))
        for first, end in found:
            covered[first:end] = b"\1" * (end - first)
        taken = [score for first, end, score in self._tokens if any(covered[max(first, 0) : end])]
        self._leave(found[-1][1], shared=False)
        return taken

    def skip(self, text: str, markup: re.Pattern[str] | None) -> None:
        """A text whose tokens are not asked for leaves, and everything before it. A token that goes on behind
        it stays."""
        start = self._start(text, markup, False)
        if start >= 0:
            self._leave(start + len(text), shared=True)

    def _start(self, text: str, markup: re.Pattern[str] | None, newest: bool) -> int:
        """Where a text begins; -1: nowhere as it is."""
        if markup is None:
            return self._text.find(text)
        tags = markup.match(self._text)
        if tags is None and self._text.startswith(text):
            return 0
        if tags is not None and not text.startswith(tags[0]):
            return self._text.find(text, tags.end())
        return self._text.rfind(text) if newest else self._text.find(text)

    def _words(self, text: str) -> list[tuple[int, int]]:
        """Where the words of a text stand that has lost something between them."""
        found: list[tuple[int, int]] = []
        end = 0
        for word in text.split():
            start = self._text.find(word, end)
            if start < 0:
                break
            end = start + len(word)
            found.append((start, end))
        return found

    def _leave(self, end: int, shared: bool) -> None:
        """What stands before a place leaves; shared: but for a token that goes on behind it."""
        self._text = self._text[end:]
        self._tokens = [
            (first - end, last - end, score)
            for first, last, score in self._tokens
            if first >= end or (shared and last > end)
        ]


class Items:
    """items: what has been said so far; the last one may still be open. Every method that adds yields the
    events of it, without sequence numbers."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._open = False
        self._tokens = _Tokens()

    def add(self, said: Said, scores: list[TokenLogprob]) -> Iterator[Event]:
        self._tokens.add(scores)
        for place, part in enumerate(said.parts, 1):
            if isinstance(part, Thoughts):
                yield from self._add_text("reasoning", part.text)
            elif isinstance(part, str):
                yield from self._add_text("message", part, newest=place == len(said.parts))
            else:
                yield from self._add_call(part)

    def end(self, status: str) -> Iterator[Event]:
        """Close what is open. An answer that says nothing is an empty message."""
        if not self.items:
            yield from self._begin(_message())
        yield from self._close(status)

    def _add_text(self, kind: str, text: str, newest: bool = True) -> Iterator[Event]:
        begins = not (self._open and self.items[-1]["type"] == kind)
        if begins:
            yield from self._close()
            yield from self._begin(_message() if kind == "message" else _reasoning())
        part = self.items[-1]["content"][0]
        part["text"] += text
        if kind == "reasoning":
            self._tokens.skip(text, _BEFORE_THOUGHTS if begins else None)
            yield self._event("response.reasoning_text.delta", content_index=0, delta=text)
            return
        scores = self._tokens.take(text, _AFTER_THOUGHTS if begins else None, newest)
        part["logprobs"] += scores
        yield self._event("response.output_text.delta", content_index=0, delta=text, logprobs=scores)

    def _add_call(self, call: CallDelta) -> Iterator[Event]:
        if "id" in call:
            yield from self._close()
            yield from self._begin(_call(call["id"], call["function"]["name"]))
        arguments = call["function"]["arguments"]
        if arguments:
            self.items[-1]["arguments"] += arguments
            yield self._event("response.function_call_arguments.delta", delta=arguments)

    def _begin(self, item: Item) -> Iterator[Event]:
        self.items.append(item)
        self._open = True
        empty = {**item, "content": []} if "content" in item else dict(item)
        yield {
            "type": "response.output_item.added",
            "output_index": len(self.items) - 1,
            "item": empty,
        }
        if "content" in item:
            part = copy.deepcopy(item["content"][0])
            yield self._event("response.content_part.added", content_index=0, part=part)

    def _close(self, status: str = "completed") -> Iterator[Event]:
        if not self._open:
            return
        self._open = False
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            yield self._event(
                "response.function_call_arguments.done", name=item["name"], arguments=item["arguments"]
            )
        else:
            part = item["content"][0]
            if item["type"] == "message":
                scores = {"logprobs": part["logprobs"]}
                yield self._event("response.output_text.done", content_index=0, text=part["text"], **scores)
            else:
                yield self._event("response.reasoning_text.done", content_index=0, text=part["text"])
            yield self._event("response.content_part.done", content_index=0, part=part)
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _event(self, kind: str, **fields: Any) -> Event:
        """About the last item."""
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}


def _message() -> Item:
    text = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "status": "in_progress",
        "content": [text],
    }


def _reasoning() -> Item:
    return {
        "id": f"rs_{uuid.uuid4().hex}",
        "type": "reasoning",
        "status": "in_progress",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": ""}],
    }


def _call(call_id: str, name: str) -> Item:
    return {
        "id": f"fc_{uuid.uuid4().hex}",
        "type": "function_call",
        "status": "in_progress",
        "call_id": call_id,
        "name": name,
        "arguments": "",
    }
