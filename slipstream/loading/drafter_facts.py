"""What a drafter's config.json says, for the plan: read without its weights, in any of the public layouts.

The layouts: a whole model (draft_model); the EAGLE authors' (a decoder's config with draft_vocab_size); the
speculators library's (transformer_layer_config, speculators_config); Medusa's; IBM's MLP speculator's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slipstream.config.json_flag import JsonFlag
from slipstream.config.speculation import NO_FACTS, WITH_WEIGHTS, DrafterFacts, SpeculationError, asked_method
from slipstream.loading.hf_config import Config, read_json


def read_drafter_facts(flag: JsonFlag) -> DrafterFacts:
    """flag: --speculative-config. Raises SpeculationError that names the key, ValueError for a flag that
    cannot be read."""
    asked = asked_method(flag)
    if asked is None or asked[0] not in WITH_WEIGHTS:
        return NO_FACTS
    method, model = asked[0], asked[1]["model"]
    try:
        return _of_model(model) if method == "draft_model" else _of_head(method, Path(model))
    except (ValueError, OSError) as error:
        raise SpeculationError("model", model, str(error)) from None


def _of_model(model: str) -> DrafterFacts:
    from slipstream.loading.load import read_spec

    spec = read_spec(model)
    width = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim
    return DrafterFacts(vocab_size=spec.vocab_size, kv_width=width)


def _of_head(method: str, folder: Path) -> DrafterFacts:
    config = read_json(folder / "config.json")
    layer = config.get("transformer_layer_config", config)
    proposals = config.get("speculators_config", {}).get("proposal_methods") or [{}]
    made_for = proposals[0].get("speculative_tokens")
    if method == "medusa":
        heads = _first(config, "medusa_num_heads", "num_heads")
        return DrafterFacts(
            vocab_size=config.get("vocab_size"),
            hidden_size=config.get("hidden_size"),
            num_tokens=heads,
            max_tokens=heads,
        )
    if method == "mlp_speculator":
        predicts = _first(config, "n_predict", "num_lookahead_tokens")
        return DrafterFacts(
            vocab_size=config.get("vocab_size"),
            hidden_size=_first(config, "input_hidden_dim", "emb_dim"),
            num_tokens=made_for or predicts,
            max_tokens=predicts,
        )
    heads = layer.get("num_attention_heads", 0)
    head_dim = layer.get("head_dim") or (layer["hidden_size"] // heads if heads else 0)
    layers = layer.get("num_hidden_layers", 1)
    return DrafterFacts(
        vocab_size=layer.get("vocab_size"),
        hidden_size=_first(config, "target_hidden_size", "hidden_size") or layer.get("hidden_size"),
        num_tokens=made_for,
        kv_width=2 * layers * (layer.get("num_key_value_heads") or heads) * head_dim,
    )


def _first(config: Config, *keys: str) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), None)
