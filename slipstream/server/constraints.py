"""response_format, text.format and structured_outputs: bodies, and what the engine is asked for them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from slipstream.contracts.errors import BadRequest
from slipstream.contracts.limits import MAX_CHOICES
from slipstream.contracts.structured_outputs import FIELD, StructuredOutputsParams

Kind = Literal["text", "json_object", "json_schema"]
# Few, and of any kind here: StructuredOutputsParams says once what is wrong with them.
Few = Annotated[list[Any], Field(max_length=MAX_CHOICES)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class JsonSchema(_Strict):
    """strict is always so: a schema is kept, or refused where it can't be."""

    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Strict):
    """As chat and completions have it. structures and triggers: of a structural tag."""

    type: Kind | Literal["structural_tag"]
    json_schema: JsonSchema | None = None
    structures: Few | None = None
    triggers: Few | None = None

    def constraint(self) -> StructuredOutputsParams | None:
        """None for plain text. Raises BadRequest."""
        origin = "response_format"
        for name, kinds in (
            ("json_schema", ("json_schema",)),
            ("structures", ("structural_tag",)),
            ("triggers", ("structural_tag",)),
        ):
            value = getattr(self, name)
            if (value is not None) != (self.type in kinds):
                limit = f"type {self.type} has none" if value is not None else f"type {self.type} needs it"
                raise BadRequest(f"{origin}.{name}", "..." if value else value, limit)
        if self.type == "structural_tag":
            tag = self.model_dump_json(include={"structures", "triggers"})
            return StructuredOutputsParams(structural_tag=tag, origin=origin)
        if self.json_schema is not None:
            schema = self.json_schema.schema_
            return StructuredOutputsParams(json=schema or {}, origin=f"{origin}.json_schema.schema")
        return any_object(origin) if self.type == "json_object" else None


class TextFormat(_Strict):
    """As responses have it: the fields of a schema beside its type."""

    type: Kind
    name: str | None = Field(None, min_length=1, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    def constraint(self) -> StructuredOutputsParams | None:
        """None for plain text. Raises BadRequest."""
        origin = "text.format"
        if self.type == "json_schema":
            if self.name is None or self.schema_ is None:
                raise BadRequest(origin, self.name, "type json_schema needs name and schema")
            return StructuredOutputsParams(json=self.schema_, origin=f"{origin}.schema")
        if self.schema_ is not None:
            raise BadRequest(f"{origin}.schema", "...", f"type {self.type} has none")
        return any_object(origin) if self.type == "json_object" else None


class StructuredOutputs(_Strict):
    """As vLLM has it: one of these."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: Few | None = None
    grammar: str | None = Field(None, description="EBNF or Lark")
    json_object: bool | None = None
    structural_tag: str | None = None

    def constraint(self) -> StructuredOutputsParams:
        """Raises BadRequest."""
        return StructuredOutputsParams(**self.model_dump(by_alias=True))


def any_object(origin: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(json_object=True, origin=origin)


def one_constraint(
    structured: StructuredOutputs | None, answer: ResponseFormat | None
) -> StructuredOutputsParams | None:
    """What constrains an answer. Raises BadRequest for two constraints."""
    asked = None if answer is None else answer.constraint()
    if structured is None:
        return asked
    if asked is not None:
        raise BadRequest(FIELD, "...", "must not be given beside response_format")
    return structured.constraint()
