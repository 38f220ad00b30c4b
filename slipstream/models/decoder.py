"""The wiring that Llama, Mistral, Qwen2 and Qwen3 share: a pre-norm decoder with rotary positions and a gated
MLP.

They differ in what the spec says (biases, windows, head sizes) and in the names of their weights, which are
data. Legend: T tokens, N those whose logits are wanted, H hidden, D head size, Y query and key heads
together, V vocabulary.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields

import torch

from slipstream.attention.protocol import Attend, LayerAttention
from slipstream.config.model import ModelSpec
from slipstream.layers.embedding import Embedding
from slipstream.layers.linear import Linear
from slipstream.layers.rotary import Rotary
from slipstream.models.base import Weight
from slipstream.models.maths import Maths, Sized

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class WeightNames:
    """Modules as stored; those of a layer follow the prefix. A linear made of several modules joins their
    rows."""

    embed: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    lm_head: str = "lm_head"
    layer: str = "model.layers.{}."
    attention_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    o: tuple[str, ...] = ("self_attn.o_proj",)
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: tuple[str, ...] = ("mlp.down_proj",)
    head_norms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Layer:
    """One block's maths, ready to call."""

    attention_norm: Sized
    qkv: Linear
    heads: Sized
    o: Linear
    mlp_norm: Sized
    gate_up: Linear
    down: Linear

    def parts(self) -> list[Sized]:
        """All that keeps weights."""
        return [getattr(self, field.name) for field in fields(self)]


def layers_attention(spec: ModelSpec) -> tuple[LayerAttention, ...]:
    """What each layer's attention is, for a backend."""
    return tuple(
        LayerAttention(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.head_dim**-0.5, window)
        for window in spec.windows
    )


def make_layer(
    maths: Maths,
    rotary: Rotary,
    names: WeightNames,
    spec: ModelSpec,
    prefix: str,
    weight: Weight,
    attention_norm: Sized,
) -> Layer:
    """One block of the weights that begin with prefix. Its first norm is given: drafters put others there."""

    def linear(modules: tuple[str, ...], bias: bool) -> Linear:
        joined = torch.cat([weight(f"{prefix}{module}.weight") for module in modules])
        biases = torch.cat([weight(f"{prefix}{module}.bias") for module in modules]) if bias else None
        return maths.linear(joined, biases)

    def heads() -> Sized:
        norm_YD = None
        counts = (spec.num_heads, spec.num_kv_heads)
        if spec.qk_norm:
            rows = [weight(f"{prefix}{module}.weight")[None] for module in names.head_norms]
            norm_YD = torch.cat([row.expand(count, -1) for row, count in zip(rows, counts, strict=True)])
        return maths.heads(*counts, spec.head_dim, norm_YD, spec.rms_norm_eps, rotary)

    return Layer(
        attention_norm=attention_norm,
        qkv=linear(names.qkv, spec.qkv_bias),
        heads=heads(),
        o=linear(names.o, spec.o_bias),
        mlp_norm=maths.norm(weight(f"{prefix}{names.mlp_norm}.weight"), spec.rms_norm_eps),
        gate_up=linear(names.gate_up, spec.mlp_bias),
        down=linear(names.down, spec.mlp_bias),
    )


class Decoder:
    """See models/base.Model. How it computes is its maths' affair."""

    names = WeightNames()

    def __init__(self, spec: ModelSpec, weight: Weight, maths: Maths, device: torch.device) -> None:
        names, self._maths = self.names, maths
        self.activation_dtype = maths.activation_dtype
        self.linear_name, self.linear_reason = maths.name, maths.reason
        self.attention = layers_attention(spec)
        embed_VH = weight(names.embed + ".weight")
        self.embed = Embedding(embed_VH)
        self._rotary = Rotary(spec.rope, spec.max_model_len, device)
        prefixes = map(names.layer.format, range(spec.num_layers))
        layers = [self._layer(spec, prefix, weight) for prefix in prefixes]
        self._layers = list(enumerate(layers))
        self._final_norm = maths.norm(weight(names.final_norm + ".weight"), spec.rms_norm_eps)
        head_VH = embed_VH if spec.tie_word_embeddings else weight(names.lm_head + ".weight")
        self._lm_head = maths.linear(head_VH, None)
        shared = embed_VH.nbytes if spec.tie_word_embeddings and maths.shares_weights else 0
        parts = [part for layer in layers for part in layer.parts()]
        parts += [self.embed, self._final_norm, self._lm_head, self._rotary]
        self.num_bytes = sum(part.num_bytes for part in parts) - shared

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        return self.forward_aux(tokens_T, positions_T, attend, ())[0]

    def forward_aux(
        self, tokens_T: Tensor, positions_T: Tensor, attend: Attend, aux_layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        first_norm = self._layers[0][1].attention_norm
        step = self._maths.open(self.embed, self._rotary, first_norm, tokens_T, positions_T)
        aux_TX, wanted = None, []
        if aux_layers:
            width = self.embed.weight_VH.shape[1]
            aux_TX = tokens_T.new_empty(
                len(tokens_T), width * len(aux_layers), dtype=self.activation_dtype
            )
            wanted = list(zip(aux_layers, aux_TX.view(-1, len(aux_layers), width).unbind(1), strict=True))
        following = [layer.attention_norm for _, layer in self._layers[1:]]
        for (index, layer), next_norm in zip(self._layers, [*following, None], strict=True):
            for source, part_TH in wanted:
                if source == index:
                    step.save(part_TH)
            qkv_TN = step.project(layer.attention_norm, layer.qkv)
            step.add(layer.o, step.mix(index, layer.heads, qkv_TN, attend), layer.mlp_norm)
            step.add(layer.down, step.project_gated(layer.mlp_norm, layer.gate_up), next_norm)
        # The last layer's output; of of_each_kind's few layers, which mean nothing, any residual does.
        ran = dict(self._layers)
        for source, part_TH in wanted:
            if source not in ran:
                step.save(part_TH)
        return step.finish(self._final_norm), aux_TX

    def of_each_kind(self) -> Decoder:
        # A layer's kernels differ with what is before it, too: a step's beginning, or another layer.
        kept = {0, min(1, len(self._layers) - 1), *(self.attention.index(kind) for kind in self.attention)}
        short = copy.copy(self)
        short._layers = [self._layers[index] for index in sorted(kept)]
        return short

    def logits(self, hidden_NH: Tensor) -> Tensor:
        return self._maths.logits(self._lm_head, hidden_NH)

    def _layer(self, spec: ModelSpec, prefix: str, weight: Weight) -> Layer:
        first = self._maths.norm(weight(f"{prefix}{self.names.attention_norm}.weight"), spec.rms_norm_eps)
        return make_layer(self._maths, self._rotary, self.names, spec, prefix, weight, first)

    @classmethod
    def weight_shapes(cls, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        names, hidden, inner, head = cls.names, spec.hidden_size, spec.intermediate_size, spec.head_dim
        query, key = spec.num_heads * head, spec.num_kv_heads * head
        shapes: dict[str, tuple[int, ...]] = {names.embed + ".weight": (spec.vocab_size, hidden)}

        def linear(modules: tuple[str, ...], outputs: tuple[int, ...], inputs: int, bias: bool) -> None:
            for kind, tail in (("weight", (inputs,)), ("bias", ()))[: 1 + bias]:
                for module, output in zip(modules, outputs, strict=True):
                    shapes[f"{prefix}{module}.{kind}"] = (output, *tail)

        for prefix in map(names.layer.format, range(spec.num_layers)):
            shapes[f"{prefix}{names.attention_norm}.weight"] = (hidden,)
            linear(names.qkv, (query, key, key), hidden, spec.qkv_bias)
            shapes |= {f"{prefix}{module}.weight": (head,) for module in names.head_norms}
            linear(names.o, (hidden,), query, spec.o_bias)
            shapes[f"{prefix}{names.mlp_norm}.weight"] = (hidden,)
            linear(names.gate_up, (inner, inner), hidden, spec.mlp_bias)
            linear(names.down, (hidden,), inner, spec.mlp_bias)
        shapes[names.final_norm + ".weight"] = (hidden,)
        if not spec.tie_word_embeddings:
            shapes[names.lm_head + ".weight"] = (spec.vocab_size, hidden)
        return shapes
