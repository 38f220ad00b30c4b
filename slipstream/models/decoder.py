"""The wiring that Llama, Mistral, Qwen2 and Qwen3 share: a pre-norm decoder with rotary positions and a gated
MLP.

They differ in what the spec says (biases, windows, head sizes) and in the names of their weights, which are
data. Legend: T tokens, M rows of a linear, H hidden, D head size, Q query and key heads together, V
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F

from slipstream.attention.protocol import Attend, LayerAttention
from slipstream.config.model import ModelSpec
from slipstream.layers.activation import silu_and_mul
from slipstream.layers.embedding import Embedding
from slipstream.layers.linear import Linear, LinearBackend
from slipstream.layers.norm import HeadNorm, NoHeadNorm, RMSNorm
from slipstream.layers.rotary import Rotary, Turn, rotate
from slipstream.models.base import Weight

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

    attention_norm: RMSNorm
    qkv: Linear
    head_norm: HeadNorm | NoHeadNorm
    o: Linear
    mlp_norm: RMSNorm
    gate_up: Linear
    down: Linear


class Decoder:
    """See models/base.Model. The residual is float32 throughout."""

    names = WeightNames()

    def __init__(self, spec: ModelSpec, weight: Weight, linear: LinearBackend, device: torch.device) -> None:
        names, self._linear = self.names, linear
        self._heads, self._kv_heads, self._head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.activation_dtype = linear.activation_dtype
        self.linear_name, self.linear_reason = linear.name, linear.reason
        self.attention = tuple(
            LayerAttention(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.head_dim**-0.5, window)
            for window in spec.windows
        )
        embed_VH = weight(names.embed + ".weight")
        self._embed = Embedding(embed_VH)
        prefixes = map(names.layer.format, range(spec.num_layers))
        self._layers = [self._layer(spec, prefix, weight) for prefix in prefixes]
        final_norm = self._norm(spec, names.final_norm, weight)
        self._next_norms = [layer.attention_norm for layer in self._layers[1:]] + [final_norm]
        head_VH = embed_VH if spec.tie_word_embeddings else weight(names.lm_head + ".weight")
        self._lm_head = linear.make(head_VH, None)
        self._rotary = Rotary(spec.rope, spec.max_model_len, device)
        shared = embed_VH.nbytes if spec.tie_word_embeddings and linear.name == "torch" else 0
        parts = [getattr(layer, field.name) for layer in self._layers for field in fields(Layer)]
        parts += [self._embed, final_norm, self._lm_head, self._rotary]
        self.num_bytes = sum(part.num_bytes for part in parts) - shared

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        count = len(tokens_T)
        rows = self._linear.even_rows(count)
        residual_MH = _padded(self._embed(tokens_T), rows)
        turn = self._rotary.turn(positions_T)
        hidden_MH = self._layers[0].attention_norm(residual_MH)
        for index, (layer, next_norm) in enumerate(zip(self._layers, self._next_norms, strict=True)):
            qkv_TXD = layer.qkv(hidden_MH)[:count].view(count, -1, self._head_dim)
            mixed_THD = self._attention(index, layer, qkv_TXD, turn, attend)
            hidden_MH = layer.mlp_norm.add(residual_MH, layer.o(_padded(mixed_THD.flatten(1), rows)))
            hidden_MH = next_norm.add(residual_MH, layer.down(silu_and_mul(layer.gate_up(hidden_MH))))
        return hidden_MH[:count]

    def _attention(self, index: int, layer: Layer, qkv_TXD: Tensor, turn: Turn, attend: Attend) -> Tensor:
        turning = self._heads + self._kv_heads
        qk_TQD = rotate(layer.head_norm(qkv_TXD[:, :turning]), turn)
        return attend(index, qk_TQD[:, : self._heads], qk_TQD[:, self._heads :], qkv_TXD[:, turning:])

    def logits(self, hidden_NH: Tensor) -> Tensor:
        count = len(hidden_NH)
        return self._lm_head(_padded(hidden_NH, self._linear.even_rows(count)))[:count].float()

    def _layer(self, spec: ModelSpec, prefix: str, weight: Weight) -> Layer:
        names = self.names

        def linear(modules: tuple[str, ...], bias: bool) -> Linear:
            joined = torch.cat([weight(f"{prefix}{module}.weight") for module in modules])
            biases = torch.cat([weight(f"{prefix}{module}.bias") for module in modules]) if bias else None
            return self._linear.make(joined, biases)

        return Layer(
            attention_norm=self._norm(spec, prefix + names.attention_norm, weight),
            qkv=linear(names.qkv, spec.qkv_bias),
            head_norm=self._head_norm(spec, prefix, weight),
            o=linear(names.o, spec.o_bias),
            mlp_norm=self._norm(spec, prefix + names.mlp_norm, weight),
            gate_up=linear(names.gate_up, spec.mlp_bias),
            down=linear(names.down, spec.mlp_bias),
        )

    def _norm(self, spec: ModelSpec, module: str, weight: Weight) -> RMSNorm:
        return RMSNorm(weight(module + ".weight"), spec.rms_norm_eps, self.activation_dtype)

    def _head_norm(self, spec: ModelSpec, prefix: str, weight: Weight) -> HeadNorm | NoHeadNorm:
        if not spec.qk_norm:
            return NoHeadNorm()
        rows = [weight(f"{prefix}{module}.weight")[None] for module in self.names.head_norms]
        counts = (spec.num_heads, spec.num_kv_heads)
        weight_QD = torch.cat([row.expand(count, -1) for row, count in zip(rows, counts, strict=True)])
        return HeadNorm(weight_QD, spec.rms_norm_eps)

    @classmethod
    def weight_shapes(cls, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        names, hidden, inner, head = cls.names, spec.hidden_size, spec.intermediate_size, spec.head_dim
        query, key = spec.num_heads * head, spec.num_kv_heads * head
        shapes: dict[str, tuple[int, ...]] = {names.embed + ".weight": (spec.vocab_size, hidden)}
        if not spec.tie_word_embeddings:
            shapes[names.lm_head + ".weight"] = (spec.vocab_size, hidden)
        linears = (
            (names.qkv, (query, key, key), hidden, spec.qkv_bias),
            (names.o, (hidden,), query, spec.o_bias),
            (names.gate_up, (inner, inner), hidden, spec.mlp_bias),
            (names.down, (hidden,), inner, spec.mlp_bias),
        )
        for prefix in map(names.layer.format, range(spec.num_layers)):
            for module in (names.attention_norm, names.mlp_norm):
                shapes[f"{prefix}{module}.weight"] = (hidden,)
            for module in names.head_norms:
                shapes[f"{prefix}{module}.weight"] = (head,)
            for modules, outputs, inputs, bias in linears:
                for module, output in zip(modules, outputs, strict=True):
                    shapes[f"{prefix}{module}.weight"] = (output, inputs)
                    if bias:
                        shapes[f"{prefix}{module}.bias"] = (output,)
        return shapes | {names.final_norm + ".weight": (hidden,)}


def _padded(x_TH: Tensor, rows: int) -> Tensor:
    """Zero rows below x, where the linear layers want them."""
    return x_TH if rows == len(x_TH) else F.pad(x_TH, (0, 0, 0, rows - len(x_TH)))
