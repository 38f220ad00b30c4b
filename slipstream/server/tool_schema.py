"""Tools and calls of tools, as chat bodies hold them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from slipstream.contracts.errors import BadRequest
from slipstream.text.parsers.protocol import MAX_DEPTH, too_deep

MAX_TOOLS = 128
FewTools = Field(max_length=MAX_TOOLS)
# Markup around a name must not be part of it.
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:/-]{1,128}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Function(_Strict):
    """parameters: a JSON schema; null takes none. strict: taken; only forced calls are held to the schema."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Strict):
    type: Literal["function"]
    function: Function


class NamedFunction(_Strict):
    name: Name


class NamedChoice(_Strict):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


class CalledFunction(_Strict):
    """arguments: JSON text."""

    name: str
    arguments: str


class ToolCall(_Strict):
    """A call that an earlier answer made. index: where a client kept it of a stream."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None

    def turn(self, field: str) -> dict[str, Any]:
        """As chat templates take it: with the arguments as an object. Raises BadRequest that names the
        field."""
        arguments = parse_arguments(f"{field}.function.arguments", self.function.arguments)
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


def parse_arguments(field: str, text: str) -> dict[str, Any]:
    """The object that a call's arguments are the text of; empty text is an empty one. Raises BadRequest that
    names the field."""
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict) or too_deep(arguments):
        limit = f"must be the text of a JSON object, nested at most {MAX_DEPTH} levels deep"
        raise BadRequest(field, text, limit)
    return arguments
