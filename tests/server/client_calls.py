"""The recorded list of calls that clients make, each with what OpenAI's API reference promises of the answer.

A call is a function of a Target; its name tells what is asked. SMOL are run on SmolLM2, where words count,
TINY on a tiny random model, SCRIPTED on an engine that says what the call needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import litellm
from langchain_openai import ChatOpenAI
from langchain_openai import OpenAI as LangChainOpenAI
from openai import APIStatusError, OpenAI

COUNT: list[Any] = [{"role": "user", "content": "Count from 1 to 10."}]
WEEK = "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday. Monday, Tuesday,"
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TOOL_REPLY = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@dataclass
class Target:
    """A server and its clients. set_reply: what the scripted engine says next."""

    url: str
    model: str
    openai: OpenAI
    set_reply: Callable[[str], None]

    def lite(self, **more: Any) -> dict[str, Any]:
        return {"model": f"openai/{self.model}", "api_base": f"{self.url}/v1", "api_key": "none", **more}

    def chat(self, **more: Any) -> ChatOpenAI:
        return ChatOpenAI(base_url=f"{self.url}/v1", api_key="none", model=self.model, max_retries=0, **more)

    def text(self, **more: Any) -> LangChainOpenAI:
        return LangChainOpenAI(
            base_url=f"{self.url}/v1", api_key="none", model=self.model, max_retries=0, **more
        )


Call = Callable[[Target], None]
SMOL: list[Call] = []
TINY: list[Call] = []
SCRIPTED: list[Call] = []


def smol(call: Call) -> Call:
    SMOL.append(call)
    return call


def tiny(call: Call) -> Call:
    TINY.append(call)
    return call


def scripted(call: Call) -> Call:
    SCRIPTED.append(call)
    return call


def refusal(ask: Callable[[], Any]) -> Any:
    """The error of a call that must be refused."""
    try:
        ask()
    except (APIStatusError, litellm.exceptions.APIError, litellm.exceptions.BadRequestError) as error:
        return error
    raise AssertionError("was not refused")
