"""The list of sampling features, and the walk along it. List order is the rule by which features combine.

Legend: N sampling lanes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import torch

from slipstream.contracts.request import EngineRequest
from slipstream.kernels.edit_rows import copy_rows
from slipstream.kernels.greedy import choose_greedy
from slipstream.kernels.sample_rows import sample_rows
from slipstream.kernels.sample_scan import RowParams
from slipstream.kernels.sampling import choose, finite_rows
from slipstream.rows.columns import Column, RowWriter
from slipstream.sampling.allowed_token_ids import AllowedTokenIds
from slipstream.sampling.bad_words import BadWords
from slipstream.sampling.draw import Draw, DrawAmongTop
from slipstream.sampling.logit_bias import LogitBias
from slipstream.sampling.min_p import MinP
from slipstream.sampling.min_tokens import MinTokens
from slipstream.sampling.penalties import Penalties
from slipstream.sampling.protocol import EditingFeature, Feature, SampleBatch
from slipstream.sampling.structured_outputs import StructuredOutputs
from slipstream.sampling.temperature import Temperature
from slipstream.sampling.top_k import TopK
from slipstream.sampling.top_p import TopP

Tensor = torch.Tensor


def default_features(
    vocab_size: int, max_lanes: int = 0, device: torch.device | None = None, mask_places: int = 1
) -> tuple[Feature, ...]:
    """Every feature, in the order stated in docs/sampling.md. max_lanes, device: for scratch of sample_all's
    stage "full"; not needed where it is not used. mask_places: see StepPlan.legal."""
    return (
        StructuredOutputs(vocab_size, mask_places),
        AllowedTokenIds(vocab_size),
        LogitBias(),
        MinTokens(),
        BadWords(),
        Penalties(vocab_size, max_lanes, device),
        Temperature(),
        MinP(),
        TopK(vocab_size),
        TopP(),
        Draw(),
        DrawAmongTop(),
    )


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """tokens_N: int32. ok_N: bool, False where the raw logits were not finite or no legal token was left; the
    token is 0 there and means nothing."""

    tokens_N: Tensor
    ok_N: Tensor


class Pipeline:
    """Features joined by a list. columns: what they add to the table; names: bit i of admit() is names[i].

    sample works on the lanes that a feature is used by, which the host lists; sample_all on every lane, with
    nothing from the host, so that a CUDA graph can hold it. A graph is captured for one of `stages`, each of
    which covers those before it.
    """

    stages: tuple[str, ...] = ("greedy", "sampled", "full")

    def __init__(self, features: Sequence[Feature], vocab_size: int, device: torch.device) -> None:
        self._features = tuple(features)
        self._vocab_size = vocab_size
        self._device = device
        self.names: tuple[str, ...] = tuple(feature.name for feature in features)
        self.columns: tuple[Column, ...] = tuple(c for feature in features for c in feature.columns)
        edits = [(bit, each) for bit, each in enumerate(features) if isinstance(each, EditingFeature)]
        self._edits: tuple[tuple[int, EditingFeature], ...] = tuple(edits)
        self._edit_names = frozenset(feature.name for _, feature in edits)

    def admit(self, request: EngineRequest, write: RowWriter) -> int:
        """Write every feature's columns of the row; returns the set of features it uses, as bits."""
        return sum(feature.admit(request, write) << bit for bit, feature in enumerate(self._features))

    def sample(self, logits_NV: Tensor, batch: SampleBatch) -> SampledTokens:
        """One token a lane. logits: contiguous float32, changed in place; a lane never sees another's."""
        if logits_NV.shape[1] != self._vocab_size or logits_NV.device.type != self._device.type:
            raise ValueError(f"logits must be [N, {self._vocab_size}] on {self._device}")
        ok_N = finite_rows(logits_NV)
        for feature in self._features:
            if feature.name in batch.feature_lanes:
                feature.apply(logits_NV, batch)
        return SampledTokens(*choose(logits_NV, ok_N))

    def stage_of(self, names: Iterable[str]) -> str:
        """The first stage that covers these features; names that are not the pipeline's need none."""
        used = set(names)
        if used & self._edit_names:
            return "full"
        return "sampled" if used & set(self.names) else "greedy"

    def sample_all(self, logits_NV: Tensor, batch: SampleBatch, stage: str) -> SampledTokens:
        """One token a lane, as sample would choose it, by what the rows say alone. ok is False in lanes of
        rows that are not alive, but for stage "greedy".

        logits: float32 or bfloat16, a row's elements adjacent; left as they are. Stages but "greedy" need
        Triton. The features in use must not need a later stage.
        """
        if stage == "greedy":
            return SampledTokens(*choose_greedy(logits_NV))
        columns, length_N = batch.columns, batch.length_N
        params = RowParams(*(columns[each.name.removesuffix("_R")] for each in fields(RowParams)))
        if stage == "sampled":
            return SampledTokens(*sample_rows(logits_NV, batch.row_N, length_N, params))
        if stage != "full":
            raise ValueError(f"stage {stage!r} is none of {self.stages}")
        edited_NV, sum_NC = copy_rows(logits_NV)
        for bit, feature in self._edits:
            feature.launch(edited_NV, batch, bit)
        return SampledTokens(*sample_rows(edited_NV, batch.row_N, length_N, params, sum_NC))
