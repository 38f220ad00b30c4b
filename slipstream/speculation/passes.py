"""What drafters with layers of their own share: attention in their part of the pool, and one more token a
lane, some times after a step.

Legend: T tokens of the step, L lanes, P passes, H hidden size, K drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from slipstream.attention.protocol import Attend, AttendQkv, AttentionBatch, HeadPrep
from slipstream.kernels.draft_choice import DraftNoise
from slipstream.kernels.draft_lanes import DraftLanes, draft_lanes
from slipstream.speculation.protocol import DraftStep

Tensor = torch.Tensor


class ShiftedAttend:
    """A step's attention, layer numbers counted from `first`."""

    def __init__(self, attend: Attend, first: int) -> None:
        self._attend, self._first = attend, first

    def __call__(self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        return self._attend(self._first + layer, q_THD, k_TGD, v_TGD)

    def from_qkv(self, layer: int, qkv_TXD: Tensor, prep: HeadPrep) -> Tensor:
        """See AttendQkv, which the attention is where a drafter's maths ask for it."""
        return cast(AttendQkv, self._attend).from_qkv(self._first + layer, qkv_TXD, prep)


def attend_step(step: DraftStep, first: int) -> Attend:
    """Attention over the step's own tokens."""
    return ShiftedAttend(step.attention.bind(step.batch), first)


@dataclass(frozen=True, slots=True)
class LanePasses:
    """Pass p computes a token of each lane that gained some, at position length - 1 + p of its row."""

    step: DraftStep
    lanes: DraftLanes
    first: int
    query_start_L1: Tensor

    def attend(self, number: int) -> Attend:
        """Attention over the tokens of pass `number`."""
        step, lanes = self.step, self.lanes
        count = len(step.inputs.row_L)
        batch = AttentionBatch(
            query_start_L1=self.query_start_L1,
            length_L=lanes.length_PL[number],
            position_T=lanes.position_PL[number],
            slot_T=lanes.slot_PL[number],
            row_L=step.inputs.row_L,
            blocks_RB=step.columns["blocks"],
            query_len_L=np.ones(count, np.int32),
            length_bound_L=self._bounds(count, number),
            num_decode_lanes=count,
        )
        return ShiftedAttend(step.attention.bind(batch), self.first)

    def _bounds(self, count: int, number: int) -> np.ndarray:
        """For eager attention, host bounds of the lanes' lengths in this pass."""
        step = self.step
        before = step.batch.length_bound_L if len(step.batch.length_bound_L) == count else step.length_bound
        room = step.columns["blocks"].shape[1] * step.block_size
        return np.minimum(np.full(count, before, np.int32) + number + 1, room)

    def noise(self, number: int) -> DraftNoise:
        """The sampler's noise at the position after pass `number`'s token."""
        columns = self.step.columns
        return DraftNoise(
            self.step.inputs.row_L,
            self.lanes.length_PL[number],
            columns["temperature"],
            columns["seed_lo"],
            columns["seed_hi"],
        )


def lanes_of(step: DraftStep, passes: int, most: int) -> DraftLanes:
    """most: positions that the drafter is made for."""
    return draft_lanes(
        step.inputs.row_L, step.appended_L, step.columns,
        passes=passes, drafts=passes, most=most, block_size=step.block_size,
    )  # fmt: skip


def lane_passes(step: DraftStep, *, passes: int, most: int, first: int) -> LanePasses:
    """most: see lanes_of; first: the number of the drafter's first layer."""
    row_L = step.inputs.row_L
    start_L1 = torch.arange(len(row_L) + 1, dtype=torch.int32, device=row_L.device)
    return LanePasses(step, lanes_of(step, passes, most), first, start_L1)


def empty_drafts(step: DraftStep, drafts: int) -> Tensor:
    """int32 [L, K], to be filled."""
    lanes = step.inputs.row_L
    return torch.empty(len(lanes), drafts, dtype=torch.int32, device=lanes.device)
