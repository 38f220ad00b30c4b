"""What a GGUF file's metadata and tensor names mean: the ModelSpec, and Hugging Face's names for the
tensors."""

from __future__ import annotations

import math
from collections import Counter

from slipstream.config.model import ModelSpec, RopeSpec
from slipstream.loading.gguf_file import GGUFFile

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_FILE_DTYPES = {"F32": "float32", "F16": "float16"}
_PLAIN_KINDS = ("F32", "F16", "BF16")
# llama.cpp's converter turns llama3 scaling into a tensor: what each frequency is divided by.
ROPE_FACTORS = "rope_freqs.weight"
# llama.cpp multiplies YaRN's own attention factor by these, or bends it; and its defaults of the betas.
_YARN_PLAIN = {
    "attn_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0,
}  # fmt: skip
_BETA_FAST, _BETA_SLOW = 32.0, 1.0
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


def read_gguf_spec(file: GGUFFile) -> ModelSpec:
    """Raises ValueError that names the file and what is missing or unsupported."""
    arch = file.need("general.architecture")
    if arch not in _ARCHITECTURES:
        raise file.unsupported(f"general.architecture {arch!r}", _ARCHITECTURES)
    kinds = {name: file.quantisation(name) for name in file.tensors}
    if lacking := {"token_embd.weight", "blk.0.attn_q.weight"} - kinds.keys():
        raise ValueError(f"{file.path}: weights missing: {', '.join(sorted(lacking))}")
    hidden, heads = file.need(f"{arch}.embedding_length"), file.need(f"{arch}.attention.head_count")
    layers = file.need(f"{arch}.block_count")
    head_dim = file.get(f"{arch}.attention.key_length", hidden // heads)
    ends = (file.get("tokenizer.ggml.eos_token_id"), file.get("tokenizer.ggml.eot_token_id"))
    return ModelSpec(
        architecture=_ARCHITECTURES[arch],
        vocab_size=file.tensors["token_embd.weight"].shape[0],
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
        qkv_bias="blk.0.attn_q.bias" in kinds,
        o_bias="blk.0.attn_output.bias" in kinds,
        mlp_bias="blk.0.ffn_up.bias" in kinds,
        qk_norm="blk.0.attn_q_norm.weight" in kinds,
        tie_word_embeddings="output.weight" not in kinds,
        bos_token_id=file.get("tokenizer.ggml.bos_token_id"),
        end_token_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        dtype=_FILE_DTYPES.get(kinds["blk.0.attn_q.weight"], "bfloat16"),
        quantization=_quantization(file, kinds),
    )


def _quantization(file: GGUFFile, kinds: dict[str, str]) -> str:
    """Quantised types, the one of most weights first."""
    weights: Counter[str] = Counter()
    for name, kind in kinds.items():
        weights[kind] += math.prod(file.tensors[name].shape)
    return " ".join(kind for kind, _ in weights.most_common() if kind not in _PLAIN_KINDS) or "none"


def interleaved_modules(file: GGUFFile, spec: ModelSpec) -> dict[str, int]:
    """Module -> heads, for those whose rows llama.cpp stores in pairs because it rotates neighbours."""
    if file.need("general.architecture") not in ("llama", "mistral"):
        return {}
    return {"self_attn.q_proj": spec.num_heads, "self_attn.k_proj": spec.num_kv_heads}


def hf_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; unknown names are kept, to be
    reported."""
    *prefix, module, kind = name.split(".") if "." in name else ("", name)
    known = _MODULES.get(module)
    if known is None or len(prefix) not in (0, 2):
        return name
    return f"model.layers.{prefix[1]}.{known}.{kind}" if prefix else f"{known}.{kind}"


def _rope(file: GGUFFile, arch: str, head_dim: int) -> RopeSpec:
    turning = file.get(f"{arch}.rope.dimension_count", head_dim)
    if turning != head_dim:
        raise file.unsupported(f"{arch}.rope.dimension_count {turning}", [f"{head_dim}, the head size"])
    scaling = f"{arch}.rope.scaling."
    kind = file.get(scaling + "type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise file.unsupported(f"{scaling}type {kind!r}", ("none", "linear", "yarn"))
    if kind == "yarn":
        for name, plain in _YARN_PLAIN.items():
            if (value := file.get(scaling + name, plain)) not in (plain, -1.0):  # -1: as the model has it
                raise file.unsupported(f"{scaling}{name} {value}", [f"{plain}"])
    trained = file.need(f"{arch}.context_length")
    divisors = file.array(ROPE_FACTORS).tolist() if ROPE_FACTORS in file.tensors else ()
    return RopeSpec(
        theta=_decimal(file.get(f"{arch}.rope.freq_base", 10000.0)),
        rotary_dim=turning,
        kind="default" if kind == "none" else kind,
        factor=_decimal(file.need(scaling + "factor")) if kind != "none" else 1.0,
        original_max_position=file.get(scaling + "original_context_length", trained),
        beta_fast=_decimal(file.get(scaling + "yarn_beta_fast", _BETA_FAST)),
        beta_slow=_decimal(file.get(scaling + "yarn_beta_slow", _BETA_SLOW)),
        divisors=tuple(divisors),
    )


def _decimal(value: float) -> float:
    """The decimal number that a float32 stands for: 9.99999974e-06 is 1e-05."""
    return float(f"{value:.7g}")
