"""The list of sampling features, and the walk along it. List order is the rule by which features combine.

Legend: N sampling lanes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slipstream.contracts.request import EngineRequest
from slipstream.kernels.sampling import choose, finite_rows
from slipstream.rows.columns import Column, RowWriter
from slipstream.sampling.allowed_token_ids import AllowedTokenIds
from slipstream.sampling.bad_words import BadWords
from slipstream.sampling.draw import Draw, DrawAmongTop
from slipstream.sampling.logit_bias import LogitBias
from slipstream.sampling.min_p import MinP
from slipstream.sampling.min_tokens import MinTokens
from slipstream.sampling.penalties import Penalties
from slipstream.sampling.protocol import Feature, SampleBatch
from slipstream.sampling.temperature import Temperature
from slipstream.sampling.top_k import TopK
from slipstream.sampling.top_p import TopP

Tensor = torch.Tensor


def default_features(vocab_size: int) -> tuple[Feature, ...]:
    """Every feature, in the order stated in docs/sampling.md."""
    return (
        AllowedTokenIds(vocab_size),
        LogitBias(),
        MinTokens(),
        BadWords(),
        Penalties(),
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
    """Features joined by a list. columns: what they add to the table; names: bit i of admit() is names[i]."""

    def __init__(self, features: Sequence[Feature], vocab_size: int, device: torch.device) -> None:
        self._features = tuple(features)
        self._vocab_size = vocab_size
        self._device = device
        self.names: tuple[str, ...] = tuple(feature.name for feature in features)
        self.columns: tuple[Column, ...] = tuple(c for feature in features for c in feature.columns)

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
