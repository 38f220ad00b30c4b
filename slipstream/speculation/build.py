"""From the plan to the drafter that it names, and no other."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, cast

import torch

from slipstream.config.plan import EnginePlan
from slipstream.config.speculation import SpeculationError, SpeculativeConfig
from slipstream.models.base import Model
from slipstream.speculation.draft_model import load_draft_model
from slipstream.speculation.eagle import load_eagle
from slipstream.speculation.eagle3 import load_eagle3
from slipstream.speculation.medusa import load_medusa
from slipstream.speculation.mlp_speculator import load_mlp_speculator
from slipstream.speculation.ngram import Ngram
from slipstream.speculation.protocol import Drafter
from slipstream.speculation.suffix import Suffix
from slipstream.speculation.target import Target

# Method -> (path, target) -> drafter, of those with weights.
LOADERS: dict[str, Callable[[str, Target], Drafter]] = {
    "draft_model": load_draft_model,
    "eagle": load_eagle,
    "eagle3": load_eagle3,
    "medusa": load_medusa,
    "mlp_speculator": load_mlp_speculator,
}
METHODS = ("admit", "propose")
ATTRIBUTES = ("name", "columns", "layers", "aux_layers", "num_bytes")


def build_drafter(plan: EnginePlan, model: Model, device: torch.device) -> Drafter | None:
    """None where the plan has no speculation. Raises SpeculationError, which names the key, where the
    drafter's files or class do not fit."""
    config = plan.speculation
    if config is None:
        return None
    if config.method == "ngram":
        return Ngram(
            lookup_min=config.prompt_lookup_min,
            lookup_max=config.prompt_lookup_max,
            num_drafts=config.num_speculative_tokens,
        )
    if config.method == "suffix":
        return Suffix(
            max_tree_depth=config.suffix_decoding_max_tree_depth,
            max_cached_requests=config.suffix_decoding_max_cached_requests,
            max_spec_factor=config.suffix_decoding_max_spec_factor,
            min_token_prob=config.suffix_decoding_min_token_prob,
            num_drafts=config.num_speculative_tokens,
            max_model_len=plan.max_model_len,
            device=device,
        )
    target = _target(plan, config, model, device)
    if config.method == "custom_class":
        return custom_drafter(config, target)
    try:
        return LOADERS[config.method](config.model, target)
    except (ValueError, OSError) as error:
        raise SpeculationError("model", config.model, str(error)) from None


def _target(plan: EnginePlan, config: SpeculativeConfig, model: Model, device: torch.device) -> Target:
    return Target(
        model=model,
        spec=plan.spec,
        max_model_len=plan.max_model_len,
        num_drafts=config.num_speculative_tokens,
        dtype=getattr(torch, plan.dtype),
        device=device,
        fused=plan.attention_backend != "torch" and plan.compile_mode == "none",
        batch_invariant=plan.batch_invariant,
        load_format=plan.args.load_format,
        seed=plan.args.seed,
    )


def custom_drafter(config: SpeculativeConfig, target: Target) -> Drafter:
    """An object of the class that config.model names, made with (target, config)."""
    module, _, name = config.model.rpartition(".")
    try:
        kind: Any = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise SpeculationError("model", config.model, f"cannot be imported: {error}") from None
    if not isinstance(kind, type) or not all(callable(getattr(kind, each, None)) for each in METHODS):
        rule = f"is no Drafter's class: it needs {' and '.join(METHODS)}"
        raise SpeculationError("model", config.model, rule)
    made = kind(target, config)
    missing = [each for each in ATTRIBUTES if not hasattr(made, each)]
    if missing:
        raise SpeculationError("model", config.model, f"is no Drafter: it has no {', '.join(missing)}")
    return cast(Drafter, made)
