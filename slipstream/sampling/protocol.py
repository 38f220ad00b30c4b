"""What a sampling feature is. A feature is one file: its columns, admit, apply and skip rule; list order is
pipeline order.

Legend: N sampling lanes, V vocabulary, R rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from slipstream.contracts.request import EngineRequest
from slipstream.kernels.edit_rows import EditLanes
from slipstream.rows.columns import Column, RowWriter

Tensor = torch.Tensor


@dataclass(slots=True)
class SampleBatch:
    """The lanes that sample in this step, as features see them. Everything is on the device.

    row_N: int64, the row of each lane. columns: every column of the table by name, [R, width] or [R].
    length_N: int32, tokens in the row before the sampled one (so the sampled token's position).
    feature_lanes: feature name -> int64 lanes (places in N, ascending) of the rows that use it; absent where
    no lane does.
    """

    row_N: Tensor
    length_N: Tensor
    columns: Mapping[str, Tensor]
    feature_lanes: Mapping[str, Tensor]

    def of(self, lane_n: Tensor, name: str) -> Tensor:
        """A column's values for the rows of some lanes: [n] or [n, width]."""
        return self.columns[name][self.row_N[lane_n]]

    def using(self, bit: int) -> EditLanes:
        """All lanes, for kernels that skip those whose row does not use the feature of this bit."""
        return EditLanes(self.row_N, self.columns["alive"], self.columns["features"], bit)


class Feature(Protocol):
    """name: key in feature_lanes. columns: what it adds to the table."""

    name: str
    columns: tuple[Column, ...]

    def admit(self, request: EngineRequest, write: RowWriter) -> bool:
        """Write the feature's columns of the row; True where the row uses the feature."""
        ...

    def apply(self, logits_NV: Tensor, batch: SampleBatch) -> None:
        """Change float32 logits in place, on the lanes batch.feature_lanes[self.name]; not called where
        absent."""
        ...


@runtime_checkable
class EditingFeature(Feature, Protocol):
    """A feature that changes logits before temperature, truncation and the draw."""

    def launch(self, logits_NV: Tensor, batch: SampleBatch, bit: int) -> None:
        """Like apply on all lanes of a captured step: kernels on CUDA that read from the rows which of them
        use the feature. bit: its place in the column `features`; batch.feature_lanes is not looked at."""
        ...
