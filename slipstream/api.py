"""The public names in one place. `import slipstream` gives the same ones and loads them when first used."""

from slipstream.config.args import EngineArgs
from slipstream.contracts.sampling_params import RequestOutputKind, SamplingParams
from slipstream.contracts.structured_outputs import StructuredOutputsParams
from slipstream.engine.async_llm import AsyncLLM
from slipstream.engine.input_processor import TextPrompt, TokensPrompt
from slipstream.engine.llm import LLM
from slipstream.engine.outputs import CompletionOutput, Logprob, RequestOutput
from slipstream.errors import BadRequest, EngineDeadError, EngineError

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
]
