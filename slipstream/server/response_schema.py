"""Bodies of /v1/responses, and their input as turns of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, model_validator
from pydantic import Tag as PydanticTag

from slipstream.contracts.errors import BadRequest
from slipstream.contracts.sampling_params import SamplingParams
from slipstream.server.constraints import TextFormat
from slipstream.server.schema import (
    MAX_TURNS,
    ONE_ERROR,
    Effort,
    Message,
    SamplingBody,
    TemplateOptions,
    TextPart,
    number,
)
from slipstream.server.tool_schema import (
    CalledFunction,
    FewTools,
    Function,
    Name,
    NamedChoice,
    NamedFunction,
    Tool,
    ToolCall,
    parse_arguments,
)

NOT_STORED = "responses are not stored here: send the earlier turns in input"
Status = Literal["in_progress", "completed", "incomplete"] | None


class _Item(BaseModel):
    """Clients send back what an answer held, with null for each field that it lacked: those are let go."""

    model_config = ConfigDict(extra="forbid", strict=True)

    id: str | None = None
    status: Status = None

    @model_validator(mode="before")
    @classmethod
    def without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: field for name, field in value.items() if field is not None}


class Text(_Item):
    type: Literal["input_text", "output_text", "reasoning_text", "summary_text", "text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: list[Any] | None = None


Texts = Annotated[list[Text], ONE_ERROR]


class MessageItem(_Item):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Texts


class CallItem(_Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class CallOutputItem(_Item):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Texts


class ReasoningItem(_Item):
    type: Literal["reasoning"]
    summary: Texts = Field(default_factory=list)
    content: Texts = Field(default_factory=list)


def _kind(value: Any) -> str:
    kind = value.get("type", "message") if isinstance(value, dict) else getattr(value, "type", "message")
    return f"dict[{kind if isinstance(kind, str) else type(kind).__name__}]"


# Tags look like pydantic's own names of a union's members: those are left out of a field's path.
Item = Annotated[
    Annotated[MessageItem, PydanticTag("dict[message]")]
    | Annotated[CallItem, PydanticTag("dict[function_call]")]
    | Annotated[CallOutputItem, PydanticTag("dict[function_call_output]")]
    | Annotated[ReasoningItem, PydanticTag("dict[reasoning]")],
    Discriminator(
        _kind,
        custom_error_type="item",
        custom_error_message="must be of type message, function_call, function_call_output or reasoning",
    ),
]


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ResponseTool(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def tool(self) -> Tool:
        fields = self.model_dump(exclude={"type"})
        return Tool(type="function", function=Function(**fields))


class ResponseNamedTool(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["function"]
    name: Name


class TextOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    format: TextFormat | None = None


class ReasoningOptions(BaseModel):
    """effort is given to the chat template. There are no summaries: thoughts are shown whole."""

    model_config = ConfigDict(extra="forbid", strict=True)

    effort: Effort | None = None
    summary: None = None


class ResponseStreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_obfuscation: Literal[False] | None = None


class ResponseBody(SamplingBody, TemplateOptions):
    """POST /v1/responses."""

    prompt_field = "input"
    input: Annotated[
        list[Item], ONE_ERROR, Field(min_length=1, max_length=MAX_TURNS), BeforeValidator(_as_items)
    ] = Field(description="a text, or items: messages, function calls and their outputs, reasoning")
    instructions: str | None = None
    max_output_tokens: int | None = number("max_output_tokens")
    top_logprobs: int | None = number("top_logprobs")
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = Field(
        None, description="reasoning is never encrypted, so there is nothing to add for it"
    )
    tools: Annotated[list[ResponseTool], ONE_ERROR, FewTools] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseNamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    stream_options: ResponseStreamOptions | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    previous_response_id: None = Field(None, description="not supported: nothing is stored")
    conversation: None = Field(None, description="not supported: nothing is stored")

    def kwargs(self) -> dict[str, Any]:
        effort = None if self.reasoning is None else self.reasoning.effort
        told = {} if effort is None else {"reasoning_effort": effort}
        return told | ({"enable_thinking": False} if effort == "none" else {}) | super().kwargs()

    @property
    def scored(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ())

    def params(self) -> SamplingParams:
        """Raises BadRequest."""
        self.check_numbers()
        if self.top_logprobs and not self.scored:
            limit = 'needs include=["message.output_text.logprobs"]'
            raise BadRequest("top_logprobs", self.top_logprobs, limit)
        told = None if self.text is None else self.text.format
        return self.sampling(
            logprobs=(self.top_logprobs or 0) if self.scored else None, max_tokens=self.max_output_tokens,
            structured_outputs=None if told is None else told.constraint(),
        )

    def text_options(self) -> dict[str, Any]:
        """As an answer repeats them."""
        told = None if self.text is None else self.text.format
        kept = {"type": "text"} if told is None else told.model_dump(by_alias=True, exclude_none=True)
        return {"format": kept}

    def chat_tools(self) -> list[Tool]:
        return [tool.tool() for tool in self.tools or ()]

    def chat_choice(self) -> NamedChoice | Literal["none", "auto", "required"] | None:
        choice = self.tool_choice
        if isinstance(choice, ResponseNamedTool):
            return NamedChoice(type="function", function=NamedFunction(name=choice.name))
        return choice

    def messages(self) -> list[Message]:
        """Instructions, then the input as turns: thoughts and calls belong to the assistant's turn."""
        turns: list[Message] = []
        if self.instructions is not None:
            turns.append(Message(role="system", content=self.instructions))
        thoughts = ""
        for place, item in enumerate(self.input):
            match item:
                case MessageItem():
                    kept = thoughts if item.role == "assistant" and thoughts else None
                    turns.append(
                        Message(role=item.role, content=_content(item.content), reasoning_content=kept)
                    )
                    thoughts = ""
                case ReasoningItem():
                    thoughts += _joined(item.content)
                case CallItem():
                    parse_arguments(f"input.{place}.arguments", item.arguments)
                    _add_call(turns, item, thoughts)
                    thoughts = ""
                case CallOutputItem():
                    turns.append(
                        Message(role="tool", content=_content(item.output), tool_call_id=item.call_id)
                    )
        return turns


def _add_call(turns: list[Message], item: CallItem, thoughts: str) -> None:
    """To the assistant's turn that is last, or to a new one."""
    call = ToolCall(id=item.call_id, function=CalledFunction(name=item.name, arguments=item.arguments))
    if thoughts or not turns or turns[-1].role != "assistant":
        turns.append(Message(role="assistant", reasoning_content=thoughts or None))
    turns[-1].tool_calls = [*(turns[-1].tool_calls or ()), call]


def _joined(parts: Sequence[Text]) -> str:
    return "".join(part.text for part in parts)


def _content(content: str | list[Text]) -> str | list[TextPart]:
    return (
        content if isinstance(content, str) else [TextPart(type="text", text=part.text) for part in content]
    )
