"""Slipstream: an LLM inference engine whose runner never waits for the CPU.

    from slipstream import LLM, SamplingParams

Names are loaded when first used; torch and transformers only when a model is.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.api import (
        LLM,
        AsyncLLM,
        BadRequest,
        CompletionOutput,
        EngineArgs,
        EngineDeadError,
        EngineError,
        Logprob,
        RequestOutput,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
        TextPrompt,
        TokensPrompt,
    )

    __version__: str

__all__ = [
    "LLM",
    "AsyncLLM",
    "BadRequest",
    "CompletionOutput",
    "EngineArgs",
    "EngineDeadError",
    "EngineError",
    "Logprob",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from slipstream.observe.version import package_version

        return package_version()
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("slipstream.api"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
