"""GGUF files: metadata as a ModelSpec, tensors dequantised by the gguf package and named as Hugging Face
names them.

llama.cpp stores the q and k rows of Llama-family models interleaved, for rotation of neighbours; they are put
back.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from slipstream.config.model import ModelSpec, RopeSpec
from slipstream.loading.sources import Shapes

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

Tensor = torch.Tensor

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_INTERLEAVED = ("llama", "mistral")
_QUANTISATIONS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")
_FILE_DTYPES = {"F32": "float32", "F16": "float16"}
_ROPE_FACTORS = "rope_freqs.weight"
_MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFFile:
    """Metadata by key, tensors by their GGUF name."""

    def __init__(self, path: Path, reader: GGUFReader) -> None:
        self.path = path
        self._reader = reader
        self.tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in reader.tensors}

    def get(self, key: str, default: Any = None) -> Any:
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ValueError(f"{self.path}: the metadata field {key!r} is missing")
        return value


def is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


@functools.lru_cache(maxsize=1)
def open_gguf(path: Path) -> GGUFFile:
    """Parsing a header takes up to seconds (a string a token), so spec, weights and tokenizer share the last
    one."""
    from gguf import GGUFReader

    try:
        return GGUFFile(path, GGUFReader(path))
    except (ValueError, IndexError, KeyError) as error:
        raise ValueError(f"{path} is not a readable GGUF file: {error}") from error


def read_gguf_spec(file: GGUFFile) -> ModelSpec:
    """Raises ValueError that names the file and what is missing or unsupported."""
    arch = file.need("general.architecture")
    if arch not in _ARCHITECTURES:
        raise _unsupported(file, f"general.architecture {arch!r}", _ARCHITECTURES)
    _refuse_quantisations(file)
    hidden, heads = file.need(f"{arch}.embedding_length"), file.need(f"{arch}.attention.head_count")
    layers = file.need(f"{arch}.block_count")
    head_dim = file.get(f"{arch}.attention.key_length", hidden // heads)
    ends = (file.get("tokenizer.ggml.eos_token_id"), file.get("tokenizer.ggml.eot_token_id"))
    return ModelSpec(
        architecture=_ARCHITECTURES[arch],
        vocab_size=int(file.tensors["token_embd.weight"].shape[-1]),
        hidden_size=hidden,
        intermediate_size=file.need(f"{arch}.feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=file.get(f"{arch}.attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=_decimal(file.need(f"{arch}.attention.layer_norm_rms_epsilon")),
        rope=_rope(file, arch, head_dim),
        max_model_len=file.need(f"{arch}.context_length"),
        windows=(file.get(f"{arch}.attention.sliding_window") or None,) * layers,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        tie_word_embeddings="output.weight" not in file.tensors,
        bos_token_id=file.get("tokenizer.ggml.bos_token_id"),
        end_token_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        dtype=_FILE_DTYPES.get(file.tensors["blk.0.attn_q.weight"].tensor_type.name, "bfloat16"),
    )


class GGUFSource:
    """See sources.WeightSource."""

    def __init__(self, file: GGUFFile, spec: ModelSpec) -> None:
        self._file = file
        self._interleaved = file.need("general.architecture") in _INTERLEAVED
        self._heads = {"attn_q": spec.num_heads, "attn_k": spec.num_kv_heads}
        self._stored = {hf_name(name): name for name in file.tensors if name != _ROPE_FACTORS}
        self.shapes: Shapes = {
            name: tuple(int(size) for size in reversed(file.tensors[stored].shape))
            for name, stored in self._stored.items()
        }

    def get(self, name: str) -> Tensor:
        stored = self._stored[name]
        values = dequantise(self._file.tensors[stored])
        module = stored.split(".")[-2]
        if self._interleaved and module in self._heads:
            values = uninterleave(values, self._heads[module])
        return torch.from_numpy(values)


def dequantise(tensor: ReaderTensor) -> np.ndarray:
    """float32, in the tensor's own shape, a copy that may be written."""
    from gguf import dequantize

    shape = tuple(reversed(tensor.shape))
    return np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32).reshape(shape)


def uninterleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows 0, 1, 2, ... of a head hold pairs (0, D/2), (1, D/2 + 1), ...: back to halves. [heads * D,
    ...]."""
    split = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(rows.shape)


def hf_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; unknown names are kept, to be
    reported."""
    *prefix, module, kind = name.split(".")
    known = _MODULES.get(module)
    if known is None:
        return name
    return f"model.layers.{prefix[1]}.{known}.{kind}" if prefix else f"{known}.{kind}"


def _refuse_quantisations(file: GGUFFile) -> None:
    for tensor in file.tensors.values():
        if tensor.tensor_type.name not in _QUANTISATIONS:
            raise _unsupported(file, f"{tensor.name}: type {tensor.tensor_type.name}", _QUANTISATIONS)


def _unsupported(file: GGUFFile, what: str, known: Iterable[str]) -> ValueError:
    return ValueError(f"{file.path}: {what} is not supported, must be one of {', '.join(known)}")


def _rope(file: GGUFFile, arch: str, head_dim: int) -> RopeSpec:
    turning = file.get(f"{arch}.rope.dimension_count", head_dim)
    if turning != head_dim:
        raise _unsupported(file, f"{arch}.rope.dimension_count {turning}", [f"{head_dim}, the head size"])
    scaling = f"{arch}.rope.scaling."
    kind = file.get(scaling + "type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise _unsupported(file, f"{scaling}type {kind!r}", ("none", "linear", "yarn"))
    trained = file.need(f"{arch}.context_length")
    factors = file.tensors.get(_ROPE_FACTORS)
    return RopeSpec(
        theta=_decimal(file.get(f"{arch}.rope.freq_base", 10000.0)),
        rotary_dim=turning,
        kind="default" if kind == "none" else kind,
        factor=_decimal(file.need(scaling + "factor")) if kind != "none" else 1.0,
        original_max_position=file.get(scaling + "original_context_length", trained),
        divisors=() if factors is None else tuple(dequantise(factors).tolist()),
    )


def _decimal(value: float) -> float:
    """The decimal number that a float32 stands for: 9.99999974e-06 is 1e-05."""
    return float(f"{value:.7g}")
