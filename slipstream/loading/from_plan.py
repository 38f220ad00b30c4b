"""What every runner starts from: the model of an EnginePlan and the attention backend it chose."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slipstream.attention.paged_flash import PagedFlashAttention
from slipstream.attention.paged_torch import PagedTorchAttention
from slipstream.attention.paged_triton import PagedTritonAttention
from slipstream.attention.protocol import AttentionBackend, LayerAttention
from slipstream.config.plan import EnginePlan
from slipstream.loading.kv_scales import read_kv_scales
from slipstream.loading.load import load_model
from slipstream.models.base import Model
from slipstream.models.compiled import CompiledModel


def load_planned(plan: EnginePlan, device: torch.device) -> Model:
    """Raises ValueError where the files do not fit the plan."""
    model: Model = load_model(
        plan.args.model,
        plan.spec,
        dtype=getattr(torch, plan.dtype),
        device=device,
        load_format=plan.args.load_format,
        seed=plan.args.seed,
        fused=plan.attention_backend != "torch" and plan.compile_mode == "none",
        batch_invariant=plan.batch_invariant,
    )
    return model if plan.compile_mode == "none" else CompiledModel(model)


def make_attention(
    plan: EnginePlan, model: Model, device: torch.device, more: Sequence[LayerAttention] = ()
) -> AttentionBackend:
    """The KV pool is not there yet. more: layers that follow the model's, a drafter's. Raises ValueError for
    scales of the KV cache that cannot be used."""
    layers = (*model.attention, *more)
    if plan.attention_backend == "torch":
        return PagedTorchAttention(layers, plan.block_size, model.activation_dtype, device)
    if plan.attention_backend == "flash":
        return PagedFlashAttention(
            layers,
            plan.block_size,
            model.activation_dtype,
            device,
            max_lanes=plan.max_num_seqs,
            max_len=plan.max_model_len,
        )
    float8, stored = plan.kv_cache_dtype == "fp8", plan.args.load_format != "dummy"
    scales = read_kv_scales(plan.args.model, plan.spec.num_layers) if float8 and stored else ()
    return PagedTritonAttention(
        layers,
        plan.block_size,
        model.activation_dtype,
        device,
        max_lanes=plan.max_num_seqs,
        kv_dtype=torch.float8_e4m3fn if float8 else None,
        kv_scales=(*scales, *((1.0, 1.0) for _ in more)) if scales else (),
        batch_invariant=plan.batch_invariant,
    )
