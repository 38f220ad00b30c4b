"""Who proposes drafts: a lookup on the host, or a drafter's module with tensors made for the occasion.

Legend: T tokens, L lanes, R rows, K drafts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from slipstream.attention.protocol import AttentionBackend
from slipstream.contracts.request import EngineRequest
from slipstream.kernels.step_inputs import StepInputs
from slipstream.rows.columns import Column, blocks_width
from slipstream.runner_v1.batch import Batch, Lane
from slipstream.runner_v1.request import Declared, LiveRequest, RequestWriter
from slipstream.speculation.protocol import Drafter, DraftStep

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Computed:
    """A step that was verified. appended: tokens that each lane gained; most: drafts wanted of each."""

    lanes: Sequence[Lane]
    batch: Batch
    hidden_TH: Tensor
    aux_TX: Tensor | None
    appended: Sequence[int]
    most: int


class Proposer:
    """Puts drafts into requests; this one has none. aux_layers: see Drafter."""

    aux_layers: tuple[int, ...] = ()

    def admit(self, row: int, live: LiveRequest, request: EngineRequest) -> None:
        """A request takes a row."""

    def release(self, row: int, live: LiveRequest) -> None:
        """The request has left it."""

    def propose(self, step: Computed) -> None:
        """Of every lane that gained tokens."""


class ModuleProposer(Proposer):
    """The columns of all rows that a drafter may read, brought up to date before each of its calls."""

    def __init__(
        self,
        drafter: Drafter,
        attention: AttentionBackend,
        columns: Sequence[Column],
        rows: int,
        max_len: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        self.aux_layers = drafter.aux_layers
        self._drafter, self._attention = drafter, attention
        self._block_size, self._device = block_size, device
        lists = (Column("tokens", width=max_len), Column("blocks", width=blocks_width(max_len, block_size)))
        scalars = ("alive", "length", "num_computed", "max_len", "draft_count")
        declared = (*lists, *map(Column, scalars), *columns, *drafter.columns)
        self._declared: Declared = {column.name: column for column in declared}
        self._columns = {column.name: _zeros(column, rows, device) for column in declared}

    def admit(self, row: int, live: LiveRequest, request: EngineRequest) -> None:
        write = RequestWriter(self._declared)
        self._drafter.admit(request, write)
        for name, column in self._declared.items():
            value = write.values.get(name, live.sampling.get(name, column.default))
            self._columns[name][row] = torch.as_tensor(value).to(self._columns[name])
        self._columns["max_len"][row] = live.max_len

    def release(self, row: int, live: LiveRequest) -> None:
        self._columns["alive"][row] = 0

    def propose(self, step: Computed) -> None:
        for lane in step.lanes:
            self._update(lane)
        drafts = self._drafter.propose(self._draft_step(step))
        counts = drafts.count_L.tolist() if step.most else [0] * len(step.lanes)
        for number, (lane, appended) in enumerate(zip(step.lanes, step.appended, strict=True)):
            most = max(min(counts[number], step.most, lane.request.room), 0) if appended else 0
            lane.request.drafts = drafts.token_LK[number, :most].tolist() if most else []

    def _update(self, lane: Lane) -> None:
        request, columns = lane.request, self._columns
        for name, values in (("tokens", request.tokens), ("blocks", request.blocks)):
            columns[name][lane.row, : len(values)] = torch.tensor(values, dtype=torch.int32)
        columns["alive"][lane.row] = int(not request.finish)
        columns["length"][lane.row] = len(request.tokens)
        columns["num_computed"][lane.row] = request.num_computed

    def _draft_step(self, step: Computed) -> DraftStep:
        attention, lanes, device = step.batch.attention, step.lanes, self._device
        alive = [not lane.request.finish for lane in lanes]
        gained = [count * lives for count, lives in zip(step.appended, alive, strict=True)]
        source = [lane.newest(count) for lane, count in zip(lanes, step.appended, strict=True)]
        inputs = StepInputs(
            token_T=step.batch.token_T,
            position_T=attention.position_T,
            slot_T=attention.slot_T,
            query_start_L1=attention.query_start_L1,
            length_L=attention.length_L,
            row_L=torch.tensor([lane.row for lane in lanes], device=device),
            end_L=torch.tensor([lane.start + lane.owed for lane in lanes], device=device).int(),
            alive_L=torch.tensor(alive, device=device),
        )
        bound = int(np.max(attention.length_bound_L)) + 1 + step.most
        return DraftStep(
            inputs, attention, self._columns, self._attention, self._block_size,
            torch.tensor(gained, device=device).int(), torch.tensor(source, device=device),
            step.hidden_TH, step.aux_TX, bound, step.most,
        )  # fmt: skip


def _zeros(column: Column, rows: int, device: torch.device) -> Tensor:
    dtype = torch.float32 if column.dtype == "f32" else torch.int32
    shape = (rows,) if column.width == 1 else (rows, column.width)
    return torch.zeros(shape, dtype=dtype, device=device)


def verify(lane: Lane, tokens: Sequence[int], ok: Sequence[bool], chances: Sequence[float]) -> list[int]:
    """Append what was sampled at the lane's places for as long as drafts agree with it; all that was
    appended. chances: where not empty, drafts are taken by these, whatever was sampled."""
    request, appended = lane.request, list[int]()
    for place, (token, good) in enumerate(zip(tokens, ok, strict=True)):
        if place and not good:
            break  # it fails as the first of the next step
        draft = lane.drafts[place] if place < len(lane.drafts) else -1
        agrees = token == draft
        if chances and draft >= 0:
            agrees = random.Random(f"{request.seed}:{len(request.tokens)}").random() < chances[place]
            token = draft if agrees else token
        if not request.append(token, good):
            break
        appended.append(token)
        if request.finish or not agrees:
            break
    return appended
