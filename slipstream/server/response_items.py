"""The output of a response, item by item, and the events that tell of it: built the same way whether or not
anybody streams."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Iterator
from typing import Any

from slipstream.server.answers import TokenLogprob
from slipstream.server.assistant import CallDelta, Said, Thoughts

Event = dict[str, Any]
Item = dict[str, Any]


class Items:
    """items: what has been said so far; the last one may still be open. Every method that adds yields the
    events of it, without sequence numbers."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._open = False
        self._scores: list[TokenLogprob] = []  # of the text that comes next

    def add(self, said: Said, scores: list[TokenLogprob]) -> Iterator[Event]:
        self._scores += scores
        for part in said.parts:
            if isinstance(part, Thoughts):
                yield from self._add_text("reasoning", part.text)
            elif isinstance(part, str):
                yield from self._add_text("message", part)
            else:
                yield from self._add_call(part)

    def end(self, status: str) -> Iterator[Event]:
        """Close what is open. An answer that says nothing is an empty message."""
        if not self.items:
            yield from self._begin(_message())
        yield from self._close(status)

    def _add_text(self, kind: str, text: str) -> Iterator[Event]:
        if not (self._open and self.items[-1]["type"] == kind):
            yield from self._close()
            yield from self._begin(_message() if kind == "message" else _reasoning())
        part = self.items[-1]["content"][0]
        part["text"] += text
        if kind == "reasoning":
            yield self._event("response.reasoning_text.delta", content_index=0, delta=text)
            return
        scores, self._scores = self._scores, []
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
                part["logprobs"] += self._scores
                self._scores = []
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
