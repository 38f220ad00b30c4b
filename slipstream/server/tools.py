"""What a request's tools and tool_choice mean: what the template shows, how the answer is read, what grammar
must force."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.contracts.errors import BadRequest
from slipstream.contracts.structured_outputs import StructuredOutputsParams
from slipstream.server.options import ServerOptions
from slipstream.server.tool_schema import NamedChoice, Tool, ToolChoice
from slipstream.text.parsers.forced import ForcedCallParser, ForcedListParser
from slipstream.text.parsers.protocol import ToolParser
from slipstream.text.parsers.registry import TOOL_PARSERS


@dataclass(frozen=True, slots=True)
class ToolUse:
    """shown: tools for the chat template. parser: makes a reader for each choice; None where no calls are
    read. forced: the grammar of a forced call. special_tokens: the text must keep them. parallel: False
    keeps the first call only. short_ids: call ids of nine letters, as Mistral's templates want. example: how
    a call is written, for templates that do not say it."""

    shown: list[dict[str, Any]] = field(default_factory=list)
    parser: Callable[[], ToolParser] | None = None
    forced: StructuredOutputsParams | None = None
    special_tokens: bool = False
    parallel: bool = True
    short_ids: bool = False
    example: str = ""

    def told(self, turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The turns for a template without a place for tools: a system turn says which there are."""
        listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in self.shown)
        text = f"You can call these functions:\n{listed}"
        if self.example:
            text += f"\nTo call one, answer only with:\n{self.example}"
        if turns and turns[0]["role"] == "system":
            return [{**turns[0], "content": f"{turns[0]['content']}\n\n{text}"}, *turns[1:]]
        return [{"role": "system", "content": text}, *turns]


NO_TOOLS = ToolUse()


def plan_tools(
    options: ServerOptions, tools: Sequence[Tool], choice: ToolChoice | None, parallel: bool
) -> ToolUse:
    """Raises BadRequest for tools and choices that contradict each other or the server's flags."""
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise BadRequest("tools", names, "must not have two of one name")
    if not tools:
        if choice not in (None, "none"):
            raise BadRequest("tool_choice", _shown(choice), "needs tools")
        return NO_TOOLS
    if choice == "none":
        return NO_TOOLS
    shown = [tool.model_dump(exclude_none=True) for tool in tools]
    short = options.tool_call_parser == "mistral"
    if isinstance(choice, NamedChoice):
        name = choice.function.name
        if name not in names:
            raise BadRequest("tool_choice.function.name", name, "must be the name of one of the tools")
        schema = tools[names.index(name)].function.parameters or {"type": "object"}
        forced = StructuredOutputsParams(json=schema, origin="tools")
        return ToolUse(shown, lambda: ForcedCallParser(name), forced, False, parallel, short)
    if choice == "required":
        forced = StructuredOutputsParams(json=list_schema(tools, parallel), origin="tools")
        return ToolUse(shown, ForcedListParser, forced, False, parallel, short)
    if options.tool_call_parser is None or not options.enable_auto_tool_choice:
        limit = "needs a server with --enable-auto-tool-choice and --tool-call-parser"
        raise BadRequest("tool_choice", choice or "auto", limit)
    schemas = {tool.function.name: tool.function.parameters or {} for tool in tools}
    parser = TOOL_PARSERS[options.tool_call_parser]
    return ToolUse(
        shown, lambda: parser(schemas), None, parser.special_tokens, parallel, short, parser.example
    )


def list_schema(tools: Sequence[Tool], parallel: bool) -> dict[str, Any]:
    """JSON schema of [{"name": ..., "parameters": {...}}, ...], at least one call. Each tool's schema is kept
    whole under $defs, so that its own references hold."""
    kinds = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                "parameters": {"$ref": f"#/$defs/tool_{place}"},
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for place, tool in enumerate(tools)
    ]
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": kinds}}
    definitions = {
        f"tool_{place}": _moved(tool.function.parameters or {"type": "object"}, f"#/$defs/tool_{place}")
        for place, tool in enumerate(tools)
    }
    return schema | ({} if parallel else {"maxItems": 1}) | {"$defs": definitions}


def _moved(schema: Any, root: str) -> Any:
    """The schema with its references to itself pointing to where it stands now."""
    if isinstance(schema, list):
        return [_moved(part, root) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: root + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, root)
        for key, value in schema.items()
    }


def _shown(choice: ToolChoice | None) -> Any:
    return choice.model_dump() if isinstance(choice, NamedChoice) else choice
