"""config.json and generation_config.json of a Hugging Face folder, as a ModelSpec.

Reads what transformers 4 wrote (rope_scaling, rope_theta, torch_dtype) and what transformers 5 writes
(rope_parameters, dtype). Whatever would change the maths and is not supported is a ValueError that names it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from slipstream.config.model import ModelSpec, RopeSpec

Config = dict[str, Any]
Windows = tuple[int | None, ...]

_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
_ROPE_BETAS = ("beta_fast", "beta_slow")
_ROPE_OPTIONS = ("attention_factor", "mscale", "mscale_all_dim", "truncate", *_ROPE_BETAS)
_DEFAULT_WINDOW = 4096  # transformers', where config.json does not speak of it; null is none
# The families whose attention_bias transformers reads; it covers q, k, v and o.
_ATTENTION_BIAS = ("LlamaForCausalLM", "Qwen3ForCausalLM")
_DTYPES = ("float32", "bfloat16", "float16")


def read_hf_spec(folder: Path) -> ModelSpec:
    """Raises ValueError that names the file and the field."""
    file = folder / "config.json"
    config = read_json(file)
    generation_file = folder / "generation_config.json"
    generation = read_json(generation_file) if generation_file.exists() else {}
    return _checked_spec(file, config, generation)


def read_layer_spec(file: Path, config: Config) -> ModelSpec:
    """Of a drafter whose layers are Llama's, whatever its config calls the whole. file: for the text of a
    ValueError, which names the field too."""
    return _checked_spec(file, {**config, "architectures": ["LlamaForCausalLM"]}, {})


def _checked_spec(file: Path, config: Config, generation: Config) -> ModelSpec:
    try:
        return _spec(config, generation)
    except KeyError as missing:
        raise ValueError(f"{file}: the field {missing} is missing") from None
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    except TypeError as error:
        raise ValueError(f"{file}: a field has a value of the wrong kind: {error}") from None


def read_json(file: Path) -> Config:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{file} does not exist: not a Hugging Face model folder") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} must hold a JSON object")
    return config


def _spec(config: Config, generation: Config) -> ModelSpec:
    architecture = _architecture(config)
    _refuse_unsupported(config)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = _rope(config, head_dim)
    bias = bool(config.get("attention_bias", False)) and architecture in _ATTENTION_BIAS
    return ModelSpec(
        architecture=architecture,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        rope=rope,
        max_model_len=_max_model_len(config, rope),
        windows=_windows(architecture, config),
        qkv_bias=bias or architecture == "Qwen2ForCausalLM",
        o_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)) and architecture == "LlamaForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        bos_token_id=_first(generation.get("bos_token_id"), config.get("bos_token_id")),
        end_token_ids=_end_ids(generation, config),
        dtype=_dtype(config),
    )


def _architecture(config: Config) -> str:
    # Imported here: the registry loads torch, and a spec can be read without it.
    from slipstream.models.registry import MODELS

    names = config.get("architectures") or []
    for name in names:
        if name in MODELS:
            return str(name)
    named = ", ".join(names) or f"model_type {config.get('model_type')!r}"
    raise ValueError(f"architectures: {named} is not supported, must be one of {', '.join(sorted(MODELS))}")


def _refuse_unsupported(config: Config) -> None:
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ValueError(f"quantization_config: quant_method {method!r} is not supported in safetensors")
    act = config.get("hidden_act", "silu")
    if act != "silu":
        raise ValueError(f"hidden_act: {act!r} is not supported, must be 'silu'")


def _rope(config: Config, head_dim: int) -> RopeSpec:
    given: Config = config.get("rope_scaling") or config.get("rope_parameters") or {}
    nested = ", ".join(key for key, value in given.items() if isinstance(value, dict))
    if nested:
        raise ValueError(f"rope_parameters: one set for each layer type ({nested}) is not supported")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in _ROPE_KEYS:
        known = ", ".join(_ROPE_KEYS)
        raise ValueError(f"rope_scaling: type {kind!r} is not supported, must be one of {known}")
    if given.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) not in (1.0, None):
        raise ValueError("partial_rotary_factor: heads that turn only in part are not supported")
    missing = [key for key in _ROPE_KEYS[kind] if given.get(key) is None]
    if missing:
        raise ValueError(f"rope_scaling: type {kind!r} needs {', '.join(missing)}")
    theta: Any = given.get("rope_theta", config.get("rope_theta", 10000.0))
    trained = config["max_position_embeddings"]
    if kind in ("llama3", "yarn"):
        stated = given.get("original_max_position_embeddings") or trained
        trained = config.get("original_max_position_embeddings") or stated
    wanted = (*_ROPE_KEYS[kind], *(_ROPE_OPTIONS if kind == "yarn" else ()))
    options = {key: given[key] for key in wanted if given.get(key) is not None}
    for key in _ROPE_BETAS:
        if not options.get(key, True):
            del options[key]  # transformers takes 0 for the default
    for key, value in options.items():
        if key != "truncate" and (type(value) not in (int, float) or not 0 <= value < math.inf):
            raise ValueError(f"rope_scaling: {key}={value!r}: must be a number, at least 0")
    return RopeSpec(
        theta=float(theta), rotary_dim=head_dim, kind=kind, original_max_position=trained, **options
    )


def _max_model_len(config: Config, rope: RopeSpec) -> int:
    """As vLLM derives it: the trained length times the factor, except where llama3 states the long one
    itself."""
    longest = int(config["max_position_embeddings"])
    if rope.kind in ("linear", "dynamic"):
        return int(longest * rope.factor)
    return int(rope.original_max_position * rope.factor) if rope.kind == "yarn" else longest


def _windows(architecture: str, config: Config) -> Windows:
    """By layer_types. Without: of Mistral every layer; of Qwen, and only under use_sliding_window, those from
    max_window_layers on. Llama: never."""
    layers: int = config["num_hidden_layers"]
    size: int | None = config.get("sliding_window", _DEFAULT_WINDOW)
    mistral = architecture == "MistralForCausalLM"
    wanted = mistral or (architecture != "LlamaForCausalLM" and config.get("use_sliding_window"))
    if not wanted or size is None:
        return (None,) * layers
    first = 0 if mistral else config.get("max_window_layers", 28)
    default = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    types = config.get("layer_types") or default
    if not set(types) <= {"full_attention", "sliding_attention"} or len(types) != layers:
        raise ValueError(f"layer_types: must be {layers} of full_attention or sliding_attention")
    return tuple(size if kind == "sliding_attention" else None for kind in types)


def _end_ids(generation: Config, config: Config) -> tuple[int, ...]:
    """Every id that ends a text, in either file; those that generation_config.json names come first."""
    found: list[int] = []
    for source in (generation.get("eos_token_id"), config.get("eos_token_id")):
        found += source if isinstance(source, list) else [] if source is None else [source]
    return tuple(dict.fromkeys(found))


def _dtype(config: Config) -> str:
    """transformers writes none where the weights are float32."""
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"dtype: {name!r} is not supported, must be one of {', '.join(_DTYPES)}")
    return name


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)
