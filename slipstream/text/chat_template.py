"""Chat templates: Jinja source from the model, run in a sandbox with the same helpers as in transformers."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from slipstream.contracts.errors import BadRequest
from slipstream.text.tokenizer import Tokenizer

Message = Mapping[str, Any]

# Marks where the last message ends in the rendered text, so that a continued one can be cut there. The space
# at its end is as in transformers: where the template trims messages, text before the mark is trimmed too.
_CUT = "\ue000continue here\ue000 "


class ChatTemplate:
    """A compiled template. Raises ValueError for source that is no Jinja.

    special_tokens: bos_token and the like, which templates write themselves; so the rendered text is to be
    encoded with add_special_tokens=False. takes_tools, takes_documents: whether it has a place
    for them.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            parsed = environment.parse(source)
            self._content = _content_format(parsed)
            names = meta.find_undeclared_variables(parsed)
            self.takes_tools, self.takes_documents = "tools" in names, "documents" in names
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"chat_template: line {error.lineno}: {error.message}") from None
        self._special_tokens = dict(special_tokens)

    def __call__(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as text. Content may be OpenAI's list of text parts. continue_final_message leaves
        the last message open, for the model to go on. Raises BadRequest that names messages."""
        turns = [self._turn(message) for message in messages]
        if not turns:
            raise BadRequest("messages", [], "must hold at least one message")
        if continue_final_message:
            turns[-1]["content"] = _open_ended(turns[-1].get("content"))
        names = self._special_tokens | dict(template_kwargs or {})
        try:
            text = self._template.render(
                names | {"messages": turns, "tools": tools, "documents": names.get("documents"),
                         "add_generation_prompt": add_generation_prompt}
            )
        except Exception as error:  # whatever the model's template trips over, the request's data caused it
            raise BadRequest("messages", list(messages), f"the chat template refuses them: {error}") from None
        return _cut(text, messages) if continue_final_message else text

    def _turn(self, message: Message) -> dict[str, Any]:
        turn = {key: value for key, value in message.items() if value is not None}
        content = turn.get("content")
        if isinstance(content, list) and self._content == "text":
            turn["content"] = "\n".join(_part_text(part) for part in content)
        elif isinstance(content, str) and self._content == "parts":
            turn["content"] = [{"type": "text", "text": content}]
        return turn


def load_chat_template(given: str | None, tokenizer: Tokenizer) -> ChatTemplate | None:
    """given: the flag, a file or Jinja source; None takes the model's own. None where there is none."""
    source = tokenizer.chat_template if given is None else given
    if source is None:
        return None
    if given is not None and "{" not in given:
        try:
            source = Path(given).expanduser().read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"chat_template={given!r}: neither a template nor a file: {error}") from None
    return ChatTemplate(source, tokenizer.special_tokens)


def _part_text(part: Any) -> str:
    text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        raise BadRequest("messages", part, "content parts must be of type text")
    return text


def _open_ended(content: Any) -> Any:
    if isinstance(content, str):
        return content + _CUT
    if isinstance(content, list) and content:
        return [*content[:-1], {**content[-1], "text": _part_text(content[-1]) + _CUT}]
    raise BadRequest("messages", content, "the last message has no content to continue")


def _cut(text: str, messages: Sequence[Message]) -> str:
    at = text.rfind(_CUT.strip())
    if at < 0:
        raise BadRequest("messages", list(messages), "the chat template leaves out the message to continue")
    return text[:at] if text.startswith(_CUT, at) else text[:at].rstrip()


def _content_format(template: nodes.Template) -> Literal["text", "either", "parts"]:
    """What a template takes as a message's content: text; text or a list of parts; only a list. It takes a
    list where it loops over something called content, and text too where it tests whether something is a
    string."""

    def named(node: nodes.Node) -> bool:
        if isinstance(node, nodes.Getitem):
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        return getattr(node, "attr", getattr(node, "name", None)) == "content"

    if not any(named(loop.iter) for loop in template.find_all(nodes.For)):
        return "text"
    return "either" if any(test.name == "string" for test in template.find_all(nodes.Test)) else "parts"


class _Generation(Extension):
    """{% generation %} marks what training would learn; here it only renders."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it an instance's)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None,
    separators: tuple[str, str] | None = None, sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which models were not trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
