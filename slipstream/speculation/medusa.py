"""medusa: heads on the target's last hidden state, the k-th for the token k places after the next (Cai et
al., 2024, Medusa 1). No head knows what the others say: drafts are the likeliest token of each, in one chain.

They stay the likeliest for rows that sample too: heads see too little to be like the target's distribution,
and then its likeliest token agrees more often than one drawn with its noise.

Files: the authors' ({k}.{i}.linear, {k}.{layers}, medusa_lm_head.pt) and vLLM's (blocks, lm_heads or one
lm_head for all, token_map).

Legend: L lanes, H hidden size, D tokens of the heads' vocabulary, K drafts.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
import torch.nn.functional as F

from slipstream.attention.protocol import LayerAttention
from slipstream.contracts.request import EngineRequest
from slipstream.kernels.draft_choice import choose_draft
from slipstream.layers.linear import Linear
from slipstream.loading.drafter_files import DrafterFiles
from slipstream.models.maths import Maths
from slipstream.rows.columns import Column, RowWriter
from slipstream.speculation.passes import empty_drafts
from slipstream.speculation.protocol import Drafts, DraftStep
from slipstream.speculation.target import Target, Weights

Tensor = torch.Tensor


class Medusa:
    """See Drafter."""

    name = "medusa"
    columns: tuple[Column, ...] = ()
    layers: tuple[LayerAttention, ...] = ()
    aux_layers: tuple[int, ...] = ()

    def __init__(self, files: DrafterFiles, target: Target, maths: Maths) -> None:
        weights, hidden, self._maths = Weights(files, target, maths), target.spec.hidden_size, maths
        heads = files.field("medusa_num_heads", "num_heads")
        depth = files.field("medusa_num_layers", "num_hidden_layers")
        if target.num_drafts > heads:
            raise ValueError(f"{files.folder}: {heads} heads give no {target.num_drafts} drafts")

        def block(name: str) -> Linear:
            bias_H = weights(f"{name}bias", hidden) if f"{name}bias" in files else None
            return maths.linear(weights(f"{name}weight", hidden, hidden), bias_H)

        self._blocks = [
            [block(f"blocks.{head}.layers.{place}.") for place in range(depth)]
            for head in range(target.num_drafts)
        ]
        self._ids_D = None
        if "token_map" in files:
            self._ids_D = weights.ids(files.stored("token_map"), "token_map")
        names = _head_names(files, target.num_drafts)
        own = [maths.linear(_head_weight(weights, name, target, self._ids_D), None) for name in names]
        if not own and self._ids_D is not None:
            raise ValueError(f"{files.folder}: token_map without lm_head.weight")
        self._own, self._target = own, target
        unused = "|".join(str(head) for head in range(target.num_drafts, heads))
        files.finish(rf"(blocks|lm_heads)\.({unused})\..*")
        parts = [part for blocks in self._blocks for part in blocks] + own
        self.num_bytes = sum(part.num_bytes for part in parts)

    def admit(self, request: EngineRequest, write: RowWriter) -> None:
        """Rows have nothing of it."""

    def propose(self, step: DraftStep) -> Drafts:
        hidden_LH = step.hidden_TH[step.source_L]
        drafts = min(len(self._blocks), step.num_drafts)
        token_LK = empty_drafts(step, drafts)
        for head in range(drafts):
            state_LH = hidden_LH
            for block in self._blocks[head]:
                state_LH = state_LH + F.silu(block(state_LH))
            choose_draft(self._logits(head, state_LH), token_LK[:, head], self._ids_D)
        return Drafts(token_LK, step.appended_L.clamp(max=1) * drafts)

    def _logits(self, head: int, state_LH: Tensor) -> Tensor:
        """Of a head of its own, of one that all share, or of the target's."""
        if not self._own:
            return self._target.model.logits(state_LH)
        return self._maths.logits(self._own[min(head, len(self._own) - 1)], state_LH)


def _head_names(files: DrafterFiles, heads: int) -> list[str]:
    """Tensors of the heads over the vocabulary: one each, one for all, or none: the target's own."""
    if not files.config.get("original_lm_head", False):
        return [f"lm_heads.{head}.weight" for head in range(heads)]
    return [name for name in ("lm_head.weight", "lm_heads.0.weight") if name in files][:1]


def _head_weight(weights: Weights, name: str, target: Target, ids_D: Tensor | None) -> Tensor:
    """[D, H]. Some files keep all of the vocabulary's rows beside token_map."""
    files, shape = weights.files, (target.spec.vocab_size, target.spec.hidden_size)
    if ids_D is None:
        return weights(name, *shape)
    whole = not files.dummy and files.stored(name).shape[0] == shape[0]
    return weights(name, *shape)[ids_D.long()] if whole else weights(name, len(ids_D), shape[1])


def rename(name: str) -> str:
    """A tensor's name as vLLM would have it."""
    name = re.sub(r"^medusa_heads?\.", "", name)
    if found := re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)", name):
        return "blocks.{}.layers.{}.{}".format(*found.groups())
    if found := re.fullmatch(r"(\d+)\.\d+\.weight", name):
        return f"lm_heads.{found.group(1)}.weight"
    return name


def load_medusa(path: str, target: Target) -> Medusa:
    """Raises ValueError that names the file and the tensor or field."""
    files = DrafterFiles(Path(path), rename, dummy=target.load_format == "dummy", seed=target.seed)
    return target.build(lambda maths: Medusa(files, target, maths))
