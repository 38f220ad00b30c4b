"""eagle: a decoder layer or two that go on from the target's last hidden states (Li et al., 2024, EAGLE 1
and 2).

At position p it reads the token of p + 1 and the hidden state of p, and its output stands in for the hidden
state of p + 1: the target's own head makes a draft of it, and the next pass goes on from there. Its first
pass reads a whole step, so K drafts take K - 1 more. The drafts of rows that sample are drawn with the
sampler's noise, as in draft_model.py.

A block that rows share by its prefix was written by one of them: in its last position stands what that row
had next. That costs others a little acceptance, never a token.

Files: the EAGLE authors' (fc, layers.N) and the speculators library's (fusion_fc, transformer, and norms).

Legend: T tokens, L lanes, H hidden size, X width of the features, D tokens of the drafter's vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from slipstream.attention.protocol import Attend, LayerAttention
from slipstream.config.model import ModelSpec
from slipstream.contracts.request import EngineRequest
from slipstream.kernels.draft_choice import choose_draft
from slipstream.kernels.draft_lanes import next_tokens
from slipstream.layers.norm import NoHeadNorm
from slipstream.layers.rotary import Rotary
from slipstream.loading.drafter_files import DrafterFiles
from slipstream.loading.hf_config import read_layer_spec
from slipstream.models.decoder import Layer, layers_attention, make_layer
from slipstream.models.llama import Llama
from slipstream.models.maths import Maths, Sized
from slipstream.models.qwen3 import Qwen3
from slipstream.rows.columns import Column, RowWriter
from slipstream.speculation.passes import attend_step, empty_drafts, lane_passes
from slipstream.speculation.protocol import Drafts, DraftStep
from slipstream.speculation.target import Target, Weights

Tensor = torch.Tensor

# Stored by some: the target's own, or computed.
IGNORED = r"lm_head\.weight|.*rotary_emb\.inv_freq"


class Head(Protocol):
    """A few layers that go on from features of the target. ids_D: int32, the target's ids of its tokens;
    None where they are the same. aux_layers: those whose input the features are, none for the last hidden
    state."""

    attention: tuple[LayerAttention, ...]
    aux_layers: tuple[int, ...]
    ids_D: Tensor | None
    num_bytes: int

    def fuse(self, feature_TX: Tensor) -> Tensor:
        """[T, H]: what stands for the hidden state of a step's tokens."""
        ...

    def forward(
        self, token_T: Tensor, hidden_TH: Tensor, position_T: Tensor, attend: Attend, source_L: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Of the tokens that source_L (int64) names, or all: what stands for the next position's hidden
        state, float32 [L, H], and what logits() takes. hidden may be overwritten."""
        ...

    def logits(self, ready_LH: Tensor) -> Tensor:
        """[L, D]."""
        ...


class Eagle:
    """See Drafter. Both kinds of head draft alike. first: the number of its first layer in the pool."""

    columns: tuple[Column, ...] = ()

    def __init__(self, name: str, head: Head, num_drafts: int, most: int, first: int) -> None:
        self.name = name
        self.layers, self.aux_layers, self.num_bytes = head.attention, head.aux_layers, head.num_bytes
        self._head, self._num_drafts, self._most, self._first = head, num_drafts, most, first

    def admit(self, request: EngineRequest, write: RowWriter) -> None:
        """Rows have nothing of it."""

    def propose(self, step: DraftStep) -> Drafts:
        head, inputs, drafts = self._head, step.inputs, min(self._num_drafts, step.num_drafts)
        feature_TX = step.hidden_TH if step.aux_TX is None else step.aux_TX
        token_T = next_tokens(
            inputs.position_T, inputs.query_start_L1, inputs.row_L, step.columns["tokens"]
        )
        attend = attend_step(step, self._first)
        hidden_LH, ready_LH = head.forward(
            token_T, head.fuse(feature_TX), inputs.position_T, attend, step.source_L
        )
        passes = lane_passes(step, passes=drafts, most=self._most, first=self._first)
        token_LK = empty_drafts(step, drafts)
        for number in range(drafts):
            if number:
                token_L, position_L = token_LK[:, number - 1], passes.lanes.position_PL[number - 1]
                attend = passes.attend(number - 1)
                hidden_LH, ready_LH = head.forward(token_L, hidden_LH, position_L, attend, None)
            choose_draft(head.logits(ready_LH), token_LK[:, number], head.ids_D, passes.noise(number))
        return Drafts(token_LK, passes.lanes.count_L)


class EagleHead:
    """See Head. Everything but the token embedding and the head over the vocabulary is its own."""

    aux_layers: tuple[int, ...] = ()
    ids_D: Tensor | None = None

    def __init__(self, files: DrafterFiles, target: Target, maths: Maths) -> None:
        weights, self._maths, self._target = Weights(files, target, maths), maths, target
        spec, bias = layer_spec(files), "fc.bias" in files
        hidden, self._dtype = spec.hidden_size, maths.activation_dtype
        if hidden != target.spec.hidden_size:
            raise ValueError(
                f"{files.folder}: hidden_size={hidden}, must be the model's {target.spec.hidden_size}"
            )
        normed = "embedding_layernorm.weight" in files
        names = ("embedding_layernorm.weight", "pre_lm_head_layernorm.weight") if normed else ()
        self._norms = [maths.norm(weights(name, hidden), spec.rms_norm_eps) for name in names]
        self._fc = maths.linear(
            weights("fc.weight", hidden, 2 * hidden), weights("fc.bias", hidden) if bias else None
        )
        self._embed, num_bytes = weights.embed(hidden)
        self._rotary = Rotary(spec.rope, target.max_model_len, target.device)
        self._layers = []
        for number in range(spec.num_layers):
            name = f"layers.{number}.input_layernorm.weight"
            # The authors' first layer has no norm before attention.
            bare = number == 0 and name not in files
            norm = NoHeadNorm() if bare else maths.norm(weights(name, hidden), spec.rms_norm_eps)
            layer = make_head_layer(weights, spec, self._rotary, number, norm, hidden)
            self._layers.append((number, layer, bare))
        self.attention = layers_attention(spec)
        files.finish(IGNORED)
        parts: list[Sized] = [self._fc, self._rotary, *self._norms]
        parts += [part for _, layer, _ in self._layers for part in layer.parts()]
        self.num_bytes = num_bytes + sum(part.num_bytes for part in parts)

    def fuse(self, feature_TX: Tensor) -> Tensor:
        return feature_TX

    def forward(
        self, token_T: Tensor, hidden_TH: Tensor, position_T: Tensor, attend: Attend, source_L: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        embed_TH = self._embed(token_T)
        if self._norms:
            embed_TH = self._maths.normed(self._norms[0], embed_TH)
        joined_TX = torch.cat((embed_TH.to(self._dtype), hidden_TH.to(self._dtype)), 1)
        step = self._maths.resume(self._rotary, self._fc(joined_TX).float(), position_T)
        for number, layer, bare in self._layers:
            if bare:
                qkv_TN = layer.qkv(step.residual().to(self._dtype))
            else:
                qkv_TN = step.project(layer.attention_norm, layer.qkv)
            mixed_TN = step.mix(number, layer.heads, qkv_TN, attend)
            if source_L is not None and number + 1 == len(self._layers):  # as in eagle3.py
                mixed_TN = step.keep(source_L, mixed_TN)
            step.add(layer.o, mixed_TN, layer.mlp_norm)
            step.add(layer.down, step.project_gated(layer.mlp_norm, layer.gate_up))
        hidden_LH = step.residual()
        ready_LH = self._maths.normed(self._norms[1], hidden_LH) if self._norms else hidden_LH.to(self._dtype)
        return hidden_LH, ready_LH

    def logits(self, ready_LH: Tensor) -> Tensor:
        return self._target.model.logits(ready_LH)


def rename(name: str) -> str:
    """A tensor's name in any of the files, as the authors of EAGLE 1 would have it."""
    name = name.removeprefix("model.")
    for theirs, ours in (("fusion_fc.", "fc."), ("transformer.", "layers.0."), ("midlayer.", "layers.0.")):
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def layer_spec(files: DrafterFiles) -> ModelSpec:
    """What config.json says of the layers, with the biases and norms that are stored."""
    layer = files.config.get("transformer_layer_config", {})
    spec = read_layer_spec(files.folder / "config.json", {**files.config, **layer})
    first = "layers.0."
    return replace(
        spec,
        qkv_bias=f"{first}self_attn.q_proj.bias" in files,
        o_bias=f"{first}self_attn.o_proj.bias" in files,
        mlp_bias=f"{first}mlp.down_proj.bias" in files,
        qk_norm=f"{first}self_attn.q_norm.weight" in files,
    )


def make_head_layer(
    weights: Weights, spec: ModelSpec, rotary: Rotary, number: int, norm: Sized, qkv_inputs: int
) -> Layer:
    """A decoder layer of a head. qkv_inputs: the width that attention's projections read."""
    decoder = Qwen3 if spec.qk_norm else Llama
    shapes = decoder.weight_shapes(spec)
    projections = tuple(f"{module}.weight" for module in decoder.names.qkv)

    def weight(name: str) -> Tensor:
        shape = shapes[f"model.{name}"]
        return weights(name, *((shape[0], qkv_inputs) if name.endswith(projections) else shape))

    return make_layer(weights.maths, rotary, decoder.names, spec, f"layers.{number}.", weight, norm)


def load_eagle(path: str, target: Target) -> Eagle:
    """Raises ValueError that names the file and the tensor or field."""
    files = DrafterFiles(Path(path), rename, dummy=target.load_format == "dummy", seed=target.seed)
    head = target.build(lambda maths: EagleHead(files, target, maths))
    return Eagle("eagle", head, target.num_drafts, target.max_model_len, target.num_layers)
