"""Bodies of the endpoints. Ranges come from contracts/limits.py; a field that is not here is refused by
name."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field

from slipstream.contracts.errors import BadRequest
from slipstream.contracts.limits import NUMBERS, SERVER_NUMBERS, Number
from slipstream.contracts.sampling_params import SamplingParams
from slipstream.contracts.structured_outputs import StructuredOutputsParams
from slipstream.server.constraints import ResponseFormat, StructuredOutputs, one_constraint
from slipstream.server.tool_schema import FewTools, Tool, ToolCall, ToolChoice

_RULES = {rule.field: rule for rule in NUMBERS + SERVER_NUMBERS}


class _OneError(FailFast):
    """A list of a million wrong items gives one error, not a million. Hashable, as members of a union must
    be."""

    def __hash__(self) -> int:
        return id(self)


ONE_ERROR = _OneError()
MAX_TURNS = 4096  # of a conversation: they are rendered on the event loop
Ids = Annotated[list[int], ONE_ERROR]
Texts = Annotated[list[str], ONE_ERROR]
Prompt = str | Texts | Ids | Annotated[list[Ids], ONE_ERROR]


def number(field: str, default: Any = None) -> Any:
    """A numeric field whose documented range is the one that limits.py checks (there, so that texts are the
    same)."""
    rule: Number = _RULES[field]
    low = "exclusiveMinimum" if rule.low_open else "minimum"
    return Field(default, json_schema_extra={low: rule.low, "maximum": rule.high})


class Body(BaseModel):
    """Strict: no value is turned into another type, no unknown field is passed over."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    model: str | None = Field(None, description="the served model's name; null means it")


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = Field(None, description="end with a chunk that has no choices, only usage")
    continuous_usage_stats: bool | None = Field(None, description="usage so far in every chunk")
    include_obfuscation: Literal[False] | None = None


class Harmless(BaseModel):
    """Fields of OpenAI's that change nothing about the answer here: taken, and not used."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class Refused(BaseModel):
    """Fields of vLLM's that name what there is none of here: they may say so."""

    use_beam_search: Literal[False] | None = None
    length_penalty: None = None
    logits_processors: None = None
    vllm_xargs: None = None
    kv_transfer_params: None = None
    mm_processor_kwargs: None = None


class SamplingBody(Body, Harmless, Refused):
    """What every endpoint that generates takes. null always means the default. prompt_field: what holds the
    prompt."""

    prompt_field: ClassVar[str] = "prompt"
    min_tokens: int | None = number("min_tokens")
    temperature: float | None = number("temperature")
    top_p: float | None = number("top_p")
    top_k: int | None = number("top_k")
    min_p: float | None = number("min_p")
    presence_penalty: float | None = number("presence_penalty")
    frequency_penalty: float | None = number("frequency_penalty")
    repetition_penalty: float | None = number("repetition_penalty")
    seed: int | None = number("seed")
    stop: str | Texts | None = None
    stop_token_ids: Ids | None = None
    bad_words: Texts | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = Field(None, description="token id (as a string) to bias")
    allowed_token_ids: Ids | None = None
    stream: bool | None = None
    priority: int | None = number("priority")
    request_id: str | None = Field(None, min_length=1, max_length=256)
    cache_salt: str | None = Field(None, min_length=1, max_length=256)

    def sampling(self, **changes: Any) -> SamplingParams:
        """The sampler's parameters: fields of the same name, then changes. Raises BadRequest."""
        given = {name: getattr(self, name) for name in _SHARED if getattr(self, name, None) is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = {_token_id(key): bias for key, bias in self.logit_bias.items()}
        return SamplingParams(**(given | changes))

    def check_numbers(self) -> None:
        """Ranges of the server's own fields. Raises BadRequest."""
        for rule in SERVER_NUMBERS:
            if rule.field in type(self).model_fields:
                rule.check(getattr(self, rule.field))


class GenerateBody(SamplingBody):
    """What completions and chat share."""

    n: int | None = number("n")
    max_tokens: int | None = number("max_tokens")
    prompt_logprobs: int | None = number("prompt_logprobs")
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = number("truncate_prompt_tokens")
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = Field(None, description='logprobs say "token_id:5"')
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    def constraint(self) -> StructuredOutputsParams | None:
        """Raises BadRequest."""
        return one_constraint(self.structured_outputs, self.response_format)

    def check_options(self) -> None:
        """Ranges, and options that contradict each other. Raises BadRequest."""
        self.check_numbers()
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options", self.stream_options.model_dump(), "needs stream=true")
        if self.stream and self.prompt_logprobs is not None:
            raise BadRequest("prompt_logprobs", self.prompt_logprobs, "is not available with stream=true")
        if self.return_tokens_as_token_ids and not self.scored:
            raise BadRequest("return_tokens_as_token_ids", True, "needs logprobs")

    @property
    def scored(self) -> bool:
        """Whether logprobs are asked for."""
        return getattr(self, "logprobs", None) not in (None, False)


_SHARED = tuple(
    {field.name for field in fields(SamplingParams)} & set(GenerateBody.model_fields)
    - {"logit_bias", "structured_outputs"}
)


def _token_id(key: str) -> int:
    digits = key.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) < 20):
        raise BadRequest("logit_bias", key, "keys must be token ids")
    return int(key)


class CompletionBody(GenerateBody):
    """POST /v1/completions."""

    prompt: Prompt
    logprobs: int | None = number("logprobs")
    best_of: int | None = number("best_of")
    suffix: None = Field(None, description="not supported: must be null")

    def params(self) -> SamplingParams:
        """Raises BadRequest."""
        self.check_options()
        if self.best_of not in (None, self.n or 1):
            raise BadRequest("best_of", self.best_of, f"is not supported: must be null or n={self.n or 1}")
        prompt_logprobs = self.prompt_logprobs
        if self.echo and self.logprobs is not None and prompt_logprobs is None:
            prompt_logprobs = self.logprobs
        return self.sampling(
            logprobs=self.logprobs, prompt_logprobs=prompt_logprobs, structured_outputs=self.constraint()
        )


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A turn. Fields typed None are those that OpenAI's client sends back empty with an earlier answer."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], ONE_ERROR] | None = None
    name: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_calls: Annotated[list[ToolCall], ONE_ERROR] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    def turn(self, index: int) -> dict[str, Any]:
        """As chat templates take it. Raises BadRequest."""
        turn: dict[str, Any] = {"role": self.role, "content": self.text(index)}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if getattr(self, name) is not None:
                turn[name] = getattr(self, name)
        if self.tool_calls:
            if self.role != "assistant":
                raise BadRequest(f"messages.{index}.tool_calls", self.role, "only role assistant calls tools")
            paths = (f"messages.{index}.tool_calls.{place}" for place in range(len(self.tool_calls)))
            turn["tool_calls"] = [call.turn(path) for call, path in zip(self.tool_calls, paths, strict=True)]
        return turn

    def text(self, index: int) -> str:
        """Content as one string. Raises BadRequest where a turn that needs content has none."""
        if self.content is None:
            if self.role != "assistant":
                raise BadRequest(f"messages.{index}.content", None, f"must be text for role {self.role}")
            return ""
        return (
            self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        )


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
_SET_BY_FIELDS = {"messages", "tools", "add_generation_prompt", "continue_final_message"}


class TemplateOptions(BaseModel):
    """How the chat template renders turns; chat and /tokenize share it."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    def kwargs(self) -> dict[str, Any]:
        """Further names for the template."""
        return dict(self.chat_template_kwargs or {})

    def check_template(self) -> None:
        """Raises BadRequest."""
        if self.continue_final_message and self.add_generation_prompt:
            raise BadRequest(
                "continue_final_message", True, "must be false unless add_generation_prompt is false"
            )
        for name in _SET_BY_FIELDS & set(self.chat_template_kwargs or ()):
            raise BadRequest("chat_template_kwargs", name, "must not set what the request's own fields set")


Messages = Annotated[list[Message], ONE_ERROR, Field(min_length=1, max_length=MAX_TURNS)]


class ChatBody(GenerateBody, TemplateOptions):
    """POST /v1/chat/completions."""

    prompt_field = "messages"
    messages: Messages
    documents: Annotated[list[dict[str, Any]], ONE_ERROR, Field(max_length=MAX_TURNS)] | None = None
    max_completion_tokens: int | None = number("max_completion_tokens")
    logprobs: bool | None = None
    top_logprobs: int | None = number("top_logprobs")
    tools: Annotated[list[Tool], ONE_ERROR, FewTools] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = Field(None, description="false: reasoning_content is left out")
    reasoning_effort: Effort | None = Field(None, description="given to the chat template; none: no thinking")
    modalities: list[Literal["text"]] | None = None

    def kwargs(self) -> dict[str, Any]:
        effort = self.reasoning_effort
        told: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
        told |= {"enable_thinking": False} if effort == "none" else {}
        return told | super().kwargs() | ({"documents": self.documents} if self.documents else {})

    def params(self) -> SamplingParams:
        """Raises BadRequest."""
        self.check_options()
        if self.top_logprobs is not None and not self.logprobs:
            raise BadRequest("top_logprobs", self.top_logprobs, "needs logprobs=true")
        limit = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return self.sampling(
            logprobs=(self.top_logprobs or 0) if self.logprobs else None, max_tokens=limit,
            structured_outputs=self.constraint(),
        )


class TokenizeBody(Body, TemplateOptions):
    """POST /tokenize: a prompt, or messages as chat would render them."""

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(None, description="null: true for a prompt, false for messages")
    return_token_strs: bool | None = None

    def check_source(self) -> None:
        """Raises BadRequest unless there is exactly one of prompt and messages."""
        if (self.prompt is None) == (self.messages is None):
            raise BadRequest("prompt", self.prompt, "exactly one of prompt and messages must be given")


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: Ids
