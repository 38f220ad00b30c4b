"""Engine flags: names, defaults and meaning follow vLLM. resolve() (resolve.py) turns them into an
EnginePlan."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs:
    """What a user may set, as `LLM(...)` arguments or `slipstream serve` flags. None means: resolve()
    chooses."""

    model: str = field(metadata={"help": "a Hugging Face folder or a GGUF file"})
    tokenizer: str | None = field(
        default=None, metadata={"help": "tokenizer folder or file, if not the model's own"}
    )
    skip_tokenizer_init: bool = field(default=False, metadata={"help": "take and give token ids only"})
    load_format: str = field(
        default="auto", metadata={"help": "auto, safetensors, gguf or dummy (random weights)"}
    )
    dtype: str = field(default="auto", metadata={"help": "auto, float32, bfloat16 or float16"})
    device: str = field(default="auto", metadata={"help": "auto, cpu or cuda"})
    seed: int = field(default=0, metadata={"help": "seed of dummy weights and of unseeded requests"})
    max_model_len: int | None = field(
        default=None, metadata={"help": "most tokens of a request, prompt and output"}
    )
    max_num_seqs: int | None = field(
        default=None, metadata={"help": "rows of the table: requests that run at once"}
    )
    max_num_batched_tokens: int | None = field(
        default=None, metadata={"help": "most tokens computed in one step"}
    )
    block_size: int = field(default=16, metadata={"help": "tokens of a KV block"})
    gpu_memory_utilization: float = field(
        default=0.9, metadata={"help": "share of device memory the engine may use"}
    )
    kv_cache_memory_bytes: int | None = field(default=None, metadata={"help": "size of the KV pool in bytes"})
    num_gpu_blocks_override: int | None = field(
        default=None, metadata={"help": "number of KV blocks, instead of sizing"}
    )
    enable_prefix_caching: bool = field(default=True, metadata={"help": "reuse KV blocks of equal prefixes"})
    model_runner: str = field(default="auto", metadata={"help": "auto, v1 or v2; auto is v2"})
    async_scheduling: bool | None = field(
        default=None, metadata={"help": "plan step N+1 while step N runs (default: on for v2, off for v1)"}
    )
    max_steps_in_flight: int | None = field(
        default=None, metadata={"help": "steps in flight with async scheduling"}
    )
    scheduling_policy: str = field(default="fcfs", metadata={"help": "fcfs or priority"})
    enforce_eager: bool = field(default=False, metadata={"help": "never use CUDA graphs"})
    cuda_graph_sizes: list[int] | None = field(
        default=None, metadata={"help": "decoding rows that a CUDA graph is captured for, one graph each"}
    )
    attention_backend: str = field(default="auto", metadata={"help": "auto, triton, flash or torch"})
    kv_cache_dtype: str = field(
        default="auto", metadata={"help": "auto (what layers compute in), fp8 or fp8_e4m3 (the same)"}
    )
    batch_invariant: bool = field(
        default=False, metadata={"help": "a request's numbers are the same, bit for bit, in any batch"}
    )
    compilation_config: str | dict[str, Any] | None = field(
        default=None, metadata={"help": 'JSON object: {"mode": "none"} or {"mode": "stock_torch_compile"}'}
    )
    speculative_config: str | dict[str, Any] | None = field(
        default=None,
        metadata={"help": 'JSON object such as {"method": "ngram", "num_speculative_tokens": 8}'},
    )
    structured_outputs_config: str | dict[str, Any] | None = field(
        default=None, metadata={"help": 'JSON object such as {"disable_any_whitespace": true}'}
    )
    max_logprobs: int = field(
        default=20, metadata={"help": "most logprobs a request may ask; -1: the vocabulary"}
    )
    distributed_executor_backend: str | None = field(
        default=None,
        metadata={"help": "mp: a worker process computes; uni: the engine's own (default: mp, uni in LLM)"},
    )
    spare_processes: bool = field(
        default=True, metadata={"help": "keep a worker and an engine ready that wait to take over"}
    )
    engine_progress_timeout: float = field(
        default=30.0,
        metadata={"help": "seconds without progress after which another process takes over; 0: never"},
    )
    max_engine_restarts: int = field(
        default=3,
        metadata={"help": "engines or workers that may be lost in a row without a token made; 0: no other"},
    )
    served_model_name: list[str] | str | None = field(
        default=None, metadata={"help": "names of the model in the HTTP API; answers give the first"}
    )
    chat_template: str | None = field(default=None, metadata={"help": "file or text of a chat template"})
    trace: str | None = field(
        default=None, metadata={"help": "write a Chrome trace of every step to this file"}
    )

    def describe(self) -> dict[str, Any]:
        """Field name to value, for logs and errors."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def flag_name(field_name: str) -> str:
    """The flag of a field."""
    return "--" + field_name.replace("_", "-")
