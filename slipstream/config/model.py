"""The architecture of a model as plain numbers, read from config.json or a GGUF header by loading/."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary embedding. kind is the scaling rule; the numbers are those of Hugging Face's rope_scaling, where
    used.

    theta: base; rotary_dim: dimensions of a head that turn; original_max_position: trained length, for
    llama3, yarn and dynamic scaling. divisors: a number for each of the rotary_dim / 2 frequencies to be
    divided by, where a GGUF file states its scaling so.
    """

    theta: float
    rotary_dim: int
    kind: Literal["default", "linear", "dynamic", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A dense decoder. windows: sliding-window size of each layer, None for full attention; end_token_ids:
    from generation_config.json and config.json; max_model_len: the most positions the model was made for;
    quantization: ggml's names of the quantised types that weights are stored in, or "none"."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeSpec
    max_model_len: int
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    end_token_ids: tuple[int, ...] = ()
    dtype: str = "bfloat16"
    quantization: str = "none"
