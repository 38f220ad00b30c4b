"""The frozen plan of an engine: every choice with its reason. resolve() makes it once; nothing re-decides
later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from slipstream.config.args import EngineArgs
from slipstream.config.model import ModelSpec
from slipstream.config.speculation import SpeculativeConfig

# "flash": Triton's, with FlashAttention 3 for long steps.
AttentionName = Literal["triton", "flash", "torch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A decision: its value, why, and the flag that changes it (empty where none does)."""

    value: Any
    reason: str
    flag: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """What runs. Numbers are final, strings have no "auto" left.

    model_runner: whose step() runs. device: "cpu" or "cuda". dtype: torch's name of the weights' type.
    steps_in_flight: 1 is synchronous, as v1 always is.
    num_blocks: None until the memory plan sized the pool (runner/memory.py), else fixed by a flag.
    attention_backend: whose kernels attend. kv_cache_dtype: torch's name of a type, or "fp8" (float8_e4m3).
    batch_invariant: one choice of tiles for any batch. compile_mode: "none" or "stock_torch_compile", for the
    model's forward. graph_sizes: decoding lanes of each CUDA graph, ascending; empty: every step is eager.
    token_buckets: tokens of each graph of a mixed step, ascending; empty with graph_sizes.
    speculation: None where every step gives one token a row.
    choices: decision name -> Choice, in the order that `slipstream explain` prints. vllm_0_31: decision name
    -> what vLLM 0.31.0 would choose.
    """

    args: EngineArgs
    spec: ModelSpec
    model_runner: Literal["v1", "v2"]
    device: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    steps_in_flight: int
    num_blocks: int | None
    max_logprobs: int
    attention_backend: AttentionName
    kv_cache_dtype: str
    batch_invariant: bool
    compile_mode: str
    graph_sizes: tuple[int, ...]
    token_buckets: tuple[int, ...]
    speculation: SpeculativeConfig | None
    choices: dict[str, Choice]
    vllm_0_31: dict[str, Choice]
