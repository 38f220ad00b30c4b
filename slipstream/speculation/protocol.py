"""What a drafter is: columns, a proposal made on the device inside the tick, and weights if it has any.

Drafts are guesses about what the sampler will choose next. A step computes a row's last token and its drafts,
samples every position as an ordinary step would, and keeps drafts for as long as they agree; so a drafter
changes how many tokens a step appends, never which.

Legend: T tokens of the step, L lanes, K drafts at most, H hidden size, A auxiliary layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from slipstream.attention.protocol import AttentionBackend, AttentionBatch
from slipstream.contracts.request import EngineRequest
from slipstream.kernels.attention_common import LayerAttention
from slipstream.kernels.step_inputs import StepInputs
from slipstream.rows.columns import Column, RowWriter

Tensor = torch.Tensor

MAX_DRAFTS = 16


@dataclass(frozen=True, slots=True)
class Drafts:
    """token_LK: int32; count_L: int32, of which the first count_L[l] are meant. Lanes that are dead or still
    in their prompt may hold anything."""

    token_LK: Tensor
    count_L: Tensor


@dataclass(slots=True)
class DraftStep:
    """A step after its commit: columns are up to date, inputs are what was computed.

    appended_L: int32, tokens the lane gained (0: dead, or in its prompt). source_L: int64, the token of the
    step whose hidden state gave the lane's newest token; of lanes that gained none, any token of the step.
    hidden_TH: what the target's logits are made from. aux_TX: [T, A * H], the residual streams that go into
    the decoder layers Drafter.aux_layers names, side by side; None where there are none. batch: the step's
    attention. length_bound: host bound of any lane's length after all K drafts, for eager attention.
    num_drafts: more drafts than this are not looked at; 0 in a plain step: bring state up to date, and what
    is returned means nothing (it may be empty). K and V may be written at positions below length +
    num_drafts.
    """

    inputs: StepInputs
    batch: AttentionBatch
    columns: Mapping[str, Tensor]
    attention: AttentionBackend
    block_size: int
    appended_L: Tensor
    source_L: Tensor
    hidden_TH: Tensor
    aux_TX: Tensor | None
    length_bound: int
    num_drafts: int = MAX_DRAFTS


class Drafter(Protocol):
    """name: the method, as --speculative-config calls it. columns: what it adds to the table. layers: its own
    attention layers, whose K and V follow the target's in the same pool (layer numbers count on from the
    target's). aux_layers: decoder layers of the target whose input it wants. num_bytes: weights and state.
    """

    name: str
    columns: tuple[Column, ...]
    layers: tuple[LayerAttention, ...]
    aux_layers: tuple[int, ...]
    num_bytes: int

    def admit(self, request: EngineRequest, write: RowWriter) -> None:
        """Write the drafter's columns of a row."""
        ...

    def propose(self, step: DraftStep) -> Drafts:
        """On the stream, inside the tick. With CUDA graphs it is captured: sizes are fixed by the shape of
        inputs, everything else is read from device memory. In a trial that computes nothing, what kernels
        made (rows, lengths, tokens) reads as zeros."""
        ...
