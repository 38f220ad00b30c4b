"""What constrains the text of an answer. Names and meaning follow vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from slipstream.contracts.errors import BadRequest

FIELD = "structured_outputs"


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """Exactly one constraint. Raises BadRequest that names the field.

    json: a JSON schema, as an object or its text; regex, grammar (EBNF or Lark) and structural_tag: texts;
    choice: the texts of which one is the answer; json_object: any JSON object. origin: for errors, the field
    of a request that the constraint came from, where that is another one. thoughts: what may stand before the
    constrained text: "" nothing, "open" thoughts up to </think>, "optional" such from <think> on or nothing.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    origin: str = ""
    thoughts: Literal["", "open", "optional"] = ""

    def __post_init__(self) -> None:
        names = [field.name for field in fields(self) if field.name not in ("origin", "thoughts")]
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            raise BadRequest(self.origin or FIELD, given, f"must have exactly one of {', '.join(names)}")
        value, name = getattr(self, given[0]), self.origin or f"{FIELD}.{given[0]}"
        match given[0]:
            case "json_object":
                good, limit = value is True, "must be true"
            case "choice":
                texts = isinstance(value, list | tuple) and all(isinstance(one, str) for one in value)
                good, limit = texts and len(value) > 0, "must be a list of strings, at least one"
            case "json":
                good = isinstance(value, dict) or (isinstance(value, str) and bool(value.strip()))
                limit = "must be a JSON schema"
            case _:
                good, limit = isinstance(value, str) and bool(value), "must be a text that is not empty"
        if not good:
            raise BadRequest(name, value, limit)

    @property
    def kind(self) -> str:
        """The name of the constraint that is given."""
        return next(field.name for field in fields(self) if getattr(self, field.name) is not None)

    @property
    def field(self) -> str:
        """What errors call it."""
        return self.origin or f"{FIELD}.{self.kind}"

    def wrong(self, limit: str) -> BadRequest:
        """The error of a constraint that cannot be kept."""
        return BadRequest(self.field, getattr(self, self.kind), limit)
