"""draft_model: a small model of the same vocabulary writes the drafts (Leviathan, Kalman, Matias 2023).

It reads every token that the target reads, in the same step and at the same positions, so that its K and V,
which lie in layers of their own in the same blocks, are always as far as the target's. Then it writes token
by token. Where a row samples, it draws with the sampler's own noise (kernels/draft_choice.py), which two
models of like distributions need to agree; a greedy row has its likeliest tokens.

Legend: L lanes, K drafts.
"""

from __future__ import annotations

from dataclasses import replace

from slipstream.contracts.request import EngineRequest
from slipstream.kernels.draft_choice import choose_draft
from slipstream.loading.load import load_model, read_spec
from slipstream.models.base import Model
from slipstream.rows.columns import Column, RowWriter
from slipstream.speculation.passes import attend_step, empty_drafts, lane_passes
from slipstream.speculation.protocol import Drafts, DraftStep
from slipstream.speculation.target import Target


class DraftModel:
    """See Drafter. most: positions that the model is made for; nothing is drafted beyond. first: the number
    of its first layer in the pool."""

    name = "draft_model"
    columns: tuple[Column, ...] = ()
    aux_layers: tuple[int, ...] = ()

    def __init__(self, model: Model, num_drafts: int, most: int, first: int) -> None:
        self._model, self._num_drafts, self._most, self._first = model, num_drafts, most, first
        self.layers = model.attention
        self.num_bytes = model.num_bytes

    def admit(self, request: EngineRequest, write: RowWriter) -> None:
        """Rows have nothing of it."""

    def propose(self, step: DraftStep) -> Drafts:
        drafts, inputs = min(self._num_drafts, step.num_drafts), step.inputs
        self._model.forward(inputs.token_T, inputs.position_T, attend_step(step, self._first))
        passes = lane_passes(step, passes=drafts, most=self._most, first=self._first)
        token_LK, token_L = empty_drafts(step, drafts), passes.lanes.token_L
        for number in range(drafts):
            position_L = passes.lanes.position_PL[number]
            hidden_LH = self._model.forward(token_L, position_L, passes.attend(number))
            choose_draft(self._model.logits(hidden_LH), token_LK[:, number], noise=passes.noise(number))
            token_L = token_LK[:, number]
        return Drafts(token_LK, passes.lanes.count_L)


def load_draft_model(path: str, target: Target) -> DraftModel:
    """path: a Hugging Face folder or a GGUF file. Raises ValueError where it does not fit the target."""
    spec = read_spec(path)
    if spec.vocab_size != target.spec.vocab_size:
        raise ValueError(
            f"{path}: a vocabulary of {spec.vocab_size} tokens, and the model's has {target.spec.vocab_size}"
        )
    most = min(spec.max_model_len, target.max_model_len)
    model = load_model(
        path,
        # Rotary tables reach as far as rows do: positions beyond `most` are computed, and not used.
        replace(spec, max_model_len=target.max_model_len),
        dtype=target.dtype,
        device=target.device,
        load_format=target.load_format if target.load_format == "dummy" else "auto",
        seed=target.seed,
        fused=target.fused,
        batch_invariant=target.batch_invariant,
    )
    return DraftModel(model, target.num_drafts, most, target.num_layers)
