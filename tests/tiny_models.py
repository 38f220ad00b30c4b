"""Tiny random models of each family, made and saved by transformers, which is also what tests compare
with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
# transformers' rope_parameters of every scaling, around a trained length of 64 positions.
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}


def make_tiny_model(
    folder: Path, family: str, *, rope: str | dict[str, Any] | None = None, vocab_size: int = 256,
    tie: bool = False, seed: int = 0, **overrides: Any,
) -> Path:
    """Saves a model of 2 layers, hidden size 64, 4 heads and 2 KV heads in folder and returns it.

    rope: a name in ROPES or transformers' rope_parameters. overrides: fields of the family's config;
    max_shard_size is passed to save_pretrained. Weights are random and larger than usual, so that logits are
    far from flat.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    max_shard_size = overrides.pop("max_shard_size", "5GB")
    parameters = dict(ROPES[rope] if isinstance(rope, str) else rope or ROPES["default"])
    parameters.setdefault("rope_theta", 10000.0)
    config = AutoConfig.for_model(family, **{
        "vocab_size": vocab_size, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "rope_parameters": parameters, "tie_word_embeddings": tie, "initializer_range": 0.2,
        "bos_token_id": 1, "eos_token_id": 2, **({"sliding_window": None} if family == "mistral" else {}),
        **({"head_dim": 32} if family == "qwen3" else {}), **overrides,
    })
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Fresh biases are nought and norms are one; neither would show a fault.
            if name.endswith((".bias", "norm.weight")):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder
