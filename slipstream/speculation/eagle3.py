"""eagle3: one layer on the hidden states of three of the target's layers (Li et al., 2025).

The three are fused into one state; attention reads it beside the token's embedding, each behind a norm of its
own. What goes on to the next pass is the layer's output before the last norm. Drafts come from a head over a
vocabulary of the drafter's own, which d2t maps to the target's. It drafts as eagle does: see eagle.py.

Files: the EAGLE authors' (midlayer) and the speculators library's (layers.0, norm_before_residual).

Legend: T tokens, L lanes, H hidden size, X width of the features, D tokens of the drafter's vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import torch

from slipstream.attention.protocol import Attend
from slipstream.layers.rotary import Rotary
from slipstream.loading.drafter_files import DrafterFiles
from slipstream.models.decoder import layers_attention
from slipstream.models.maths import Maths, Sized
from slipstream.speculation.eagle import Eagle, layer_spec, make_head_layer, rename
from slipstream.speculation.target import Target, Weights

Tensor = torch.Tensor

# t2d, the mask of the target's tokens that have a place in the drafter's vocabulary, follows from d2t.
IGNORED = r"t2d|verifier_.*|.*rotary_emb\.inv_freq"


class Eagle3Head:
    """See Head in eagle.py."""

    def __init__(self, files: DrafterFiles, target: Target, maths: Maths) -> None:
        weights, self._maths = Weights(files, target, maths), maths
        spec = layer_spec(files)
        if spec.num_layers != 1:
            raise ValueError(f"{files.folder}: num_hidden_layers={spec.num_layers}: eagle3 has one layer")
        hidden, eps, name = spec.hidden_size, spec.rms_norm_eps, "layers.0."
        self.aux_layers = aux_layers(files, target.spec.num_layers)
        width = len(self.aux_layers) * target.spec.hidden_size
        self._fc = maths.linear(weights("fc.weight", hidden, width), None)
        self._embed, num_bytes = weights.embed(hidden)
        self._embed_norm = maths.norm(weights(f"{name}input_layernorm.weight", hidden), eps)
        self._hidden_norm = maths.norm(weights(f"{name}hidden_norm.weight", hidden), eps)
        self._rotary = Rotary(spec.rope, target.max_model_len, target.device)
        self._layer = make_head_layer(weights, spec, self._rotary, 0, self._embed_norm, 2 * hidden)
        self._norm = maths.norm(weights("norm.weight", hidden), eps)
        size = draft_vocab_size(files, target)
        self._lm_head = maths.linear(weights("lm_head.weight", size, hidden), None)
        self.ids_D = None
        if size != target.spec.vocab_size or "d2t" in files:
            self.ids_D = weights.ids(torch.arange(size) + draft_offsets(files, size), "d2t")
        self._normed_residual = bool(files.config.get("norm_before_residual", False))
        self.attention = layers_attention(spec)
        files.finish(IGNORED)
        parts: list[Sized] = [self._fc, self._hidden_norm, self._norm, self._lm_head, self._rotary]
        parts += self._layer.parts()
        self.num_bytes = num_bytes + sum(part.num_bytes for part in parts)

    def fuse(self, feature_TX: Tensor) -> Tensor:
        return self._fc(feature_TX)

    def forward(
        self, token_T: Tensor, hidden_TH: Tensor, position_T: Tensor, attend: Attend, source_L: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        maths, layer, (tokens, hidden) = self._maths, self._layer, hidden_TH.shape
        joined_TX = hidden_TH.new_empty(tokens, 2 * hidden, dtype=maths.activation_dtype)
        maths.embedded(self._embed_norm, self._embed, token_T, joined_TX[:, :hidden])
        state_TH = maths.normed(self._hidden_norm, hidden_TH, joined_TX[:, hidden:])
        residual_TH = state_TH.to(torch.float32, copy=True) if self._normed_residual else hidden_TH.float()
        step = maths.resume(self._rotary, residual_TH, position_T)
        mixed_TN = step.mix(0, layer.heads, layer.qkv(joined_TX), attend)
        if source_L is not None:  # the others are there for their K and V
            mixed_TN = step.keep(source_L, mixed_TN)
        step.add(layer.o, mixed_TN, layer.mlp_norm)
        step.add(layer.down, step.project_gated(layer.mlp_norm, layer.gate_up))
        ready_LH = step.finish(self._norm)
        return step.residual(), ready_LH

    def logits(self, ready_LH: Tensor) -> Tensor:
        return self._maths.logits(self._lm_head, ready_LH)


def aux_layers(files: DrafterFiles, num_layers: int) -> tuple[int, ...]:
    """The target's layers whose input is a feature. By default those that the authors took; a list within
    eagle_config, as NVIDIA writes it, names layers by their output."""
    inner = files.config.get("eagle_config") or {}
    key = "eagle_aux_hidden_state_layer_ids"
    ids = files.config.get(key) or [number + 1 for number in inner.get(key) or ()]
    ids = ids or [2, num_layers // 2, num_layers - 3]
    if not all(type(number) is int and 0 <= number <= num_layers for number in ids):
        raise ValueError(f"{files.folder}: {key}={ids}: the model has {num_layers} layers")
    return tuple(ids)


def draft_vocab_size(files: DrafterFiles, target: Target) -> int:
    size = files.config.get("draft_vocab_size") or target.spec.vocab_size
    if type(size) is not int or not 0 < size <= target.spec.vocab_size:
        raise ValueError(
            f"{files.folder}: draft_vocab_size={size!r}, must be at most {target.spec.vocab_size}"
        )
    return size


def draft_offsets(files: DrafterFiles, size: int) -> Tensor:
    """d2t: what to add to a draft's id to have the target's; nothing for dummies."""
    return torch.zeros(size) if files.dummy else files.get("d2t", (size,))


def load_eagle3(path: str, target: Target) -> Eagle:
    """Raises ValueError that names the file and the tensor or field."""
    files = DrafterFiles(Path(path), rename, dummy=target.load_format == "dummy", seed=target.seed)
    head = target.build(lambda maths: Eagle3Head(files, target, maths))
    return Eagle("eagle3", head, target.num_drafts, target.max_model_len, target.num_layers)
