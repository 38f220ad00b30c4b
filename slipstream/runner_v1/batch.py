"""A step's batch, made anew from its requests.

Legend: T tokens, L lanes, B blocks, N sampling lanes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from slipstream.attention.protocol import AttentionBatch
from slipstream.contracts.step import StepPlan
from slipstream.runner_v1.request import Declared, LiveRequest

Tensor = torch.Tensor

NULL_BLOCK = 0


@dataclass(frozen=True, slots=True)
class Lane:
    """A live request's place in the step. index, row: of the plan; start: KV positions before the step; owed:
    tokens to compute, which drafts follow; first_token: among the step's tokens."""

    index: int
    row: int
    request: LiveRequest
    start: int
    owed: int
    drafts: list[int]
    samples: bool
    first_token: int

    @property
    def places(self) -> range:
        """Tokens of the step whose hidden states are sampled from."""
        first = self.first_token + self.owed - 1
        return range(first, first + 1 + len(self.drafts)) if self.samples else range(0)

    def newest(self, appended: int) -> int:
        """The token of the step whose hidden state gave the newest of the tokens that were appended."""
        return self.first_token + self.owed + max(appended, 1) - 2

    @property
    def query_len(self) -> int:
        return self.owed + len(self.drafts)

    @property
    def end(self) -> int:
        """KV positions after the step, drafts and all."""
        return self.start + self.query_len


def live_lanes(plan: StepPlan, requests: Mapping[int, LiveRequest]) -> list[Lane]:
    """The plan's lanes without those whose request has ended."""
    lanes: list[Lane] = []
    tokens, room = 0, plan.draft_room
    columns = zip(
        plan.lane_row.tolist(), plan.lane_query_len.tolist(), plan.lane_samples.tolist(), strict=True
    )
    for index, (row, query_len, samples) in enumerate(columns):
        request = requests[row]
        if not request.finish:
            most = min(plan.draft_tokens, room) if index < plan.num_decode_lanes else 0
            drafts = request.drafts[:most]
            lanes.append(Lane(index, row, request, request.num_computed, query_len, drafts, samples, tokens))
            tokens, room = tokens + lanes[-1].query_len, room - len(drafts)
    return lanes


@dataclass(frozen=True, slots=True)
class Batch:
    """token_T, position_T: int64 on the device."""

    token_T: Tensor
    position_T: Tensor
    attention: AttentionBatch


def build_batch(lanes: Sequence[Lane], plan: StepPlan, block_size: int, device: torch.device) -> Batch:
    """lanes: those of the plan that live."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    for lane in lanes:
        request = lane.request
        begin, end, blocks = lane.start, lane.end, request.blocks
        tokens += (request.tokens + lane.drafts)[begin:end]
        positions += range(begin, end)
        slots += [blocks[p // block_size] * block_size + p % block_size for p in range(begin, end)]
    starts = [*(lane.first_token for lane in lanes), len(tokens)]
    ends = [lane.end for lane in lanes]
    position_T = torch.tensor(positions, device=device)
    attention = AttentionBatch(
        query_start_L1=torch.tensor(starts, dtype=torch.int32, device=device),
        length_L=torch.tensor(ends, dtype=torch.int32, device=device),
        position_T=position_T,
        slot_T=torch.tensor(slots, device=device),
        row_L=torch.arange(len(lanes), device=device),
        blocks_RB=_padded([lane.request.blocks for lane in lanes], NULL_BLOCK).to(device),
        query_len_L=np.array([lane.query_len for lane in lanes], np.int32),
        length_bound_L=np.array(ends, np.int32),
        num_decode_lanes=sum(lane.index < plan.num_decode_lanes for lane in lanes),
        decode_tokens=1 + plan.draft_tokens,
    )
    return Batch(torch.tensor(tokens, device=device), position_T, attention)


class SamplingColumns(Mapping[str, Tensor]):
    """The columns that sampling features read, on the CPU, a line a sampled place; each is stacked when it is
    asked for, which spares those that nobody in the batch uses. lanes: one an entry of the batch."""

    def __init__(self, lanes: Sequence[Lane], declared: Declared) -> None:
        self._lanes, self._declared = lanes, declared

    def __getitem__(self, name: str) -> Tensor:
        if name == "tokens":
            return _padded([lane.request.tokens + lane.drafts for lane in self._lanes], 0)
        column = self._declared[name]
        absent = column.default if column.width == 1 else [column.default] * column.width
        lines = [lane.request.sampling.get(name, absent) for lane in self._lanes]
        return torch.from_numpy(np.array(lines, np.float32 if column.dtype == "f32" else np.int32))

    def __iter__(self) -> Iterator[str]:
        return iter(("tokens", *self._declared))

    def __len__(self) -> int:
        return 1 + len(self._declared)


def _padded(lines: Sequence[list[int]], filler: int) -> Tensor:
    """int32 [lines, the longest], filled up at the ends."""
    width = max(map(len, lines))
    return torch.tensor([line + [filler] * (width - len(line)) for line in lines], dtype=torch.int32)
