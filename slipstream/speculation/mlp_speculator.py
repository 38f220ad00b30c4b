"""mlp_speculator: a small chain of states, each made of the one before and of the token drafted last
(Wertheimer et al., 2024, "Accelerating Production LLMs with Combined Token/Embedding Speculators").

The first state is the target's last hidden state. Stage k: state = gelu(norm(proj(state) + w emb(token))),
and its head's likeliest token is the draft. Drafts stay the likeliest for rows that sample, as in medusa.py.

Files: IBM's accelerators (emb.N, proj.N, head.N, ln.N; one set for all stages with tie_weights).

Legend: L lanes, H hidden size of the target, I inner size, V vocabulary, K drafts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F

from slipstream.attention.protocol import LayerAttention
from slipstream.contracts.request import EngineRequest
from slipstream.kernels.draft_choice import choose_draft
from slipstream.layers.embedding import Embedding
from slipstream.layers.linear import Linear
from slipstream.loading.drafter_files import DrafterFiles
from slipstream.models.maths import Maths, Sized
from slipstream.rows.columns import Column, RowWriter
from slipstream.speculation.passes import empty_drafts, lanes_of
from slipstream.speculation.protocol import Drafts, DraftStep
from slipstream.speculation.target import Target, Weights

Tensor = torch.Tensor
T = TypeVar("T")

EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Stage:
    """scale_I, shift_I: float32, of the norm. Stages may share all of it."""

    embed: Embedding
    proj: Linear
    head: Linear
    scale_I: Tensor
    shift_I: Tensor


class MlpSpeculator:
    """See Drafter."""

    name = "mlp_speculator"
    columns: tuple[Column, ...] = ()
    layers: tuple[LayerAttention, ...] = ()
    aux_layers: tuple[int, ...] = ()

    def __init__(self, files: DrafterFiles, target: Target, maths: Maths) -> None:
        weights, self._maths, self._most = Weights(files, target, maths), maths, target.max_model_len
        stages, width = files.field("n_predict"), files.field("emb_dim", "hidden_size")
        inner, vocab = files.field("inner_dim") or width, target.spec.vocab_size
        tied = bool(files.config.get("tie_weights", False))
        if width != (hidden := target.spec.hidden_size):
            raise ValueError(f"{files.folder}: emb_dim={width}, must be the model's {hidden}")
        if target.num_drafts > stages:
            raise ValueError(f"{files.folder}: n_predict={stages} gives no {target.num_drafts} drafts")
        used = range(target.num_drafts)
        own = used[:1] if tied else used
        embeds = [Embedding(weights(f"emb.{k}.weight", vocab, inner)) for k in own]
        # The first projection reads the target's hidden state: its width is another.
        projections = [
            maths.linear(weights(f"proj.{k}.weight", inner, inner if k else width), None)
            for k in (used[:2] if tied else used)
        ]
        heads = [maths.linear(weights(f"head.{k}.weight", vocab, inner), None) for k in own]
        scales = [weights(f"ln.{k}.weight", inner).float() for k in own]
        shifts = [weights(f"ln.{k}.bias", inner).float() for k in own]
        self._stages = [
            Stage(_of(embeds, k), _of(projections, k), _of(heads, k), _of(scales, k), _of(shifts, k))
            for k in used
        ]
        self._scale_input = bool(files.config.get("scale_input", False))
        state_weight = 0.5 ** (0.5 / stages)
        self._token_weight = math.sqrt((1 - state_weight**2) * (inner / 2)) / state_weight
        files.finish(r"(emb|proj|head|ln)\.\d+\.(weight|bias)")
        parts: list[Sized] = [*embeds, *projections, *heads]
        self.num_bytes = sum(part.num_bytes for part in parts)
        self.num_bytes += sum(each.nbytes for each in (*scales, *shifts))

    def admit(self, request: EngineRequest, write: RowWriter) -> None:
        """Rows have nothing of it."""

    def propose(self, step: DraftStep) -> Drafts:
        drafts = min(len(self._stages), step.num_drafts)
        lanes = lanes_of(step, drafts, self._most)
        token_LK, token_L = empty_drafts(step, drafts), lanes.token_L
        state_LI = step.hidden_TH[step.source_L]
        dtype = state_LI.dtype
        if self._scale_input:
            state_LI = (_unit(state_LI.float()) / math.sqrt(2)).to(dtype)
        for number, stage in enumerate(self._stages[:drafts]):
            token_LI = stage.embed(token_L)
            mixed_LI = _unit(stage.proj(state_LI).float() + token_LI * self._token_weight)
            state_LI = F.gelu(mixed_LI * stage.scale_I + stage.shift_I).to(dtype)
            choose_draft(self._maths.logits(stage.head, state_LI), token_LK[:, number])
            token_L = token_LK[:, number]
        return Drafts(token_LK, lanes.count_L)


def _of(parts: list[T], stage: int) -> T:
    """A stage's own part, or the last there is."""
    return parts[min(stage, len(parts) - 1)]


def _unit(x_LI: Tensor) -> Tensor:
    """Each row with a root mean square of one."""
    return x_LI * torch.rsqrt(x_LI.square().mean(-1, keepdim=True) + EPS)


def load_mlp_speculator(path: str, target: Target) -> MlpSpeculator:
    """Raises ValueError that names the file and the tensor or field."""
    files = DrafterFiles(
        Path(path),
        lambda name: name.removeprefix("speculator."),
        dummy=target.load_format == "dummy",
        seed=target.seed,
    )
    return target.build(lambda maths: MlpSpeculator(files, target, maths))
