"""The fixed table of request rows on the device. Rows live, batches die; nothing is compacted or reordered.

Every column is 32-bit words in one flat arena: the record of scalars [R, W], then list columns [R, width],
then the lane arrays of the current step. So any host change is words or spans of them, and admission writes
a row in a few spans. Row `num_rows - 1` is the padding row: never alive, its blocks are the null block.

Legend: R rows (with the padding row), W scalar columns, L lanes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch

from slipstream.contracts import limits
from slipstream.contracts.step import Admission, StepPlan
from slipstream.kernels.scatter import CHUNK, Room
from slipstream.rows.columns import LEGAL, Column, blocks_width
from slipstream.rows.doors import InDoor, StagedWrites

Array = np.ndarray
Tensor = torch.Tensor

NULL_BLOCK = 0
MANY_WORDS, MOST_MASK_WORDS = 1 << 16, 1 << 21


def base_columns(max_model_len: int, max_blocks: int) -> tuple[Column, ...]:
    """What every row has, whatever features are on. Lengths are exact on the device.

    length: tokens in the row; num_computed: KV positions filled; draft_count: drafts that stand in tokens
    past length; min_len: end tokens are masked below this length; features: what sampling features the row
    uses, bit i is the i-th of the pipeline's names.
    """
    return (
        Column("alive", writer="commit"),
        Column("generation"),
        Column("length", writer="commit"),
        Column("num_computed", writer="commit"),
        Column("draft_count", writer="commit"),
        Column("prompt_len"),
        Column("min_len"),
        Column("max_len"),
        Column("seed_lo"),
        Column("seed_hi"),
        Column("features"),
        Column("tokens", width=max_model_len, writer="commit"),
        Column("blocks", width=max_blocks, writer="plan"),
        Column("end_ids", width=limits.MAX_END_TOKEN_IDS),
    )


def lane_columns(max_lanes: int, features: Iterable[str]) -> tuple[Column, ...]:
    """The step's lane arrays: one "row" of max_lanes words each. Fixed addresses, so a captured graph may
    read them.

    lane_to_row, lane_query_len: of every lane; sample_to_lane: the lanes that sample; feature_<name>: places
    among the sampling lanes whose rows use the feature. draft_limits: of the step, drafts of a lane and of
    all together.
    """
    names = ["lane_to_row", "lane_query_len", "sample_to_lane", *(f"feature_{name}" for name in features)]
    lanes = tuple(Column(name, width=max_lanes, writer="plan") for name in names)
    return (*lanes, Column("draft_limits", width=2, writer="plan"))


class RowTable:
    """Columns on the device, the layout, and the staged writes. Parts keep views; addresses never change."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        columns: Iterable[Column] = (),
        features: Iterable[str] = (),
        flush_slots: int = 4,
    ) -> None:
        self.num_rows = max_num_seqs + 1
        self.padding_row = max_num_seqs
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.max_blocks = blocks_width(max_model_len, block_size)
        self.device = device
        declared = (*base_columns(max_model_len, self.max_blocks), *columns)
        self._scalars = [c for c in declared if c.width == 1]
        self._slot_of = {c.name: i for i, c in enumerate(self._scalars)}
        self._column = {c.name: c for c in declared}
        if len(self._column) != len(declared):
            raise AssertionError("two columns share a name")
        width = len(self._scalars)
        self._offset: dict[str, int] = {}
        end = self.num_rows * width
        for column in (c for c in declared if c.width > 1):
            self._offset[column.name], end = end, end + self.num_rows * column.width
        lanes = lane_columns(max_num_seqs, features)
        for column in lanes:
            self._offset[column.name], end = end, end + column.width
        self.arena = torch.zeros(end, dtype=torch.int32, device=device)
        self.columns: Mapping[str, Tensor] = self._views(width)
        self.lanes: Mapping[str, Tensor] = {
            c.name: self.arena[self._offset[c.name] : self._offset[c.name] + c.width] for c in lanes
        }
        self._defaults = np.zeros(width, np.int32)
        for column in self._scalars:
            self._defaults[self._slot_of[column.name]] = _word(column, column.default)
        self.door = InDoor(flush_slots, device.type == "cuda", self._room_of_writes())

    def _room_of_writes(self) -> Room:
        """For what a step mostly writes: prompts, the longest among them, masks of all rows, a few numbers a
        row."""
        legal = self._column[LEGAL].width if LEGAL in self._column else 0
        words = MANY_WORDS + self.max_model_len + min(self.num_rows * legal, MOST_MASK_WORDS)
        return Room(cells=8 * self.num_rows, chunks=16 * self.num_rows + words // CHUNK, words=words)

    def _views(self, width: int) -> dict[str, Tensor]:
        record = self.arena[: self.num_rows * width].view(self.num_rows, width)
        as_float = self.arena.view(torch.float32)
        float_record = as_float[: self.num_rows * width].view(self.num_rows, width)
        views: dict[str, Tensor] = {}
        for name, column in self._column.items():
            if column.width == 1:
                views[name] = (float_record if column.dtype == "f32" else record)[:, self._slot_of[name]]
            else:
                flat = as_float if column.dtype == "f32" else self.arena
                start = self._offset[name]
                views[name] = flat[start : start + self.num_rows * column.width].view(
                    self.num_rows, column.width
                )
        return views

    def admit(self, admission: Admission) -> AdmissionWriter:
        """Overwrite the row: base columns now, features through the returned writer, then writer.commit()."""
        request = admission.request
        writer = AdmissionWriter(self, admission.row)
        prompt_len = len(request.prompt_token_ids)
        seed = request.seed & (2**64 - 1)
        for name, value in (
            ("alive", 1),
            ("generation", admission.generation),
            ("length", len(admission.tokens)),
            ("num_computed", admission.num_cached),
            ("prompt_len", prompt_len),
            ("min_len", prompt_len + request.params.min_tokens),
            ("max_len", request.max_len),
            ("seed_lo", _signed(seed & 0xFFFFFFFF)),
            ("seed_hi", _signed(seed >> 32)),
        ):
            writer.scalar(name, value)
        writer.span("tokens", admission.tokens)
        writer.span("blocks", admission.blocks)
        ends = np.full(limits.MAX_END_TOKEN_IDS, -1, np.int32)
        ends[: len(request.end_token_ids)] = request.end_token_ids
        writer.span("end_ids", ends)
        return writer

    def release(self, rows: Array) -> None:
        """Owners left: the rows are dead from the next step on, whatever is still queued."""
        width = len(self._scalars)
        self.door.cells(
            rows.astype(np.int64) * width + self._slot_of["alive"], np.zeros(len(rows), np.int32)
        )

    def grant(self, rows: Array, index: Array, blocks: Array) -> None:
        """blocks[row, index] = block for each of the int32 arrays' entries."""
        self.door.cells(self._offset["blocks"] + rows.astype(np.int64) * self.max_blocks + index, blocks)

    def constrain(self, plan: StepPlan) -> None:
        """What rows may sample in the next step, and their drafts in place of those that stand in them. A row
        that this plan admits has none, as its record says."""
        rows, counts = plan.legal_row, (plan.legal_drafts >= 0).sum(1, dtype=np.int32)
        for row, legal_PW, count in zip(rows.tolist(), plan.legal, counts.tolist(), strict=True):
            self.stage_list(row, self._column[LEGAL], legal_PW[: 1 + count].reshape(-1), 0)
        for lane in np.flatnonzero(counts).tolist():
            drafts = plan.legal_drafts[lane, : counts[lane]]
            self.stage_list(int(rows[lane]), self._column["tokens"], drafts, int(plan.legal_length[lane]))
        old = ~np.isin(rows, [admission.row for admission in plan.admissions])
        places = rows[old].astype(np.int64) * len(self._scalars) + self._slot_of["draft_count"]
        self.door.cells(places, counts[old])

    def set_lanes(self, name: str, values: Array) -> None:
        """Write one lane array from its start (int32)."""
        self.door.span(self._offset[name], values)

    def flush(self) -> StagedWrites | None:
        """Everything staged since the last flush, packed for one step."""
        return self.door.flush()

    def reset(self) -> None:
        """Nothing is in flight, and nothing staged is to be written."""
        self.door.reset()

    def stage_record(self, row: int, record: Array) -> None:
        self.door.span(row * len(self._scalars), record)

    def stage_list(self, row: int, column: Column, values: Array, start: int) -> None:
        if start + len(values) > column.width:
            raise AssertionError(f"{column.name}: {start + len(values)} words in a column of {column.width}")
        self.door.span(self._offset[column.name] + row * column.width + start, values)

    def default_record(self) -> Array:
        return self._defaults.copy()

    def locate(self, name: str) -> tuple[Column, int]:
        """A column and, for scalars, its place in the record."""
        return self._column[name], self._slot_of.get(name, -1)


class AdmissionWriter:
    """Fills one row's record, then stages it whole: a scalar that nobody sets gets its default, never what
    the last owner left."""

    def __init__(self, table: RowTable, row: int) -> None:
        self._table, self._row = table, row
        self._record = table.default_record()

    def scalar(self, name: str, value: float) -> None:
        column, slot = self._table.locate(name)
        self._record[slot] = _word(column, value)

    def span(self, name: str, values: Array, start: int = 0) -> None:
        column, _ = self._table.locate(name)
        words = np.ascontiguousarray(values, np.float32 if column.dtype == "f32" else np.int32).view(np.int32)
        self._table.stage_list(self._row, column, words, start)

    def commit(self) -> None:
        self._table.stage_record(self._row, self._record)


def _word(column: Column, value: float) -> np.int32:
    """A scalar as the 32-bit word the arena holds."""
    return np.float32(value).view(np.int32) if column.dtype == "f32" else np.int32(value)


def _signed(word: int) -> int:
    """An unsigned 32-bit word as the int32 of the same bits."""
    return word - (1 << 32) if word >= 1 << 31 else word
