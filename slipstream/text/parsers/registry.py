"""The parsers by the names of --tool-call-parser and --reasoning-parser."""

from __future__ import annotations

from collections.abc import Callable

from slipstream.text.parsers.hermes import HermesParser
from slipstream.text.parsers.llama3_json import Llama3JsonParser
from slipstream.text.parsers.mistral import MistralParser
from slipstream.text.parsers.protocol import Machine
from slipstream.text.parsers.qwen3_coder import Qwen3CoderParser
from slipstream.text.parsers.reasoning import ThinkParser, deepseek_r1, qwen3

TOOL_PARSERS: dict[str, type[Machine]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "qwen3_coder": Qwen3CoderParser,
}
# From the end of the rendered prompt to a reader of one answer.
REASONING_PARSERS: dict[str, Callable[[str], ThinkParser]] = {"deepseek_r1": deepseek_r1, "qwen3": qwen3}
