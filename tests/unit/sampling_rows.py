"""Real tables and batches for the sampling tests, and what their expected values are computed with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from slipstream.contracts.request import EngineRequest
from slipstream.contracts.sampling_params import SamplingParams
from slipstream.contracts.step import Admission
from slipstream.rows.table import RowTable
from slipstream.sampling.pipeline import Pipeline, SampledTokens, default_features
from slipstream.sampling.protocol import Feature, SampleBatch

CPU = torch.device("cpu")
MAX_MODEL_LEN = 48


@dataclass
class Row:
    """A request as a test names it."""

    params: SamplingParams = field(default_factory=SamplingParams)
    prompt: Sequence[int] = (1, 2, 3)
    output: Sequence[int] = ()
    seed: int = 0
    end_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.output]


def make_row(prompt=(1, 2, 3), output=(), seed=0, end_ids=(), bad_words=(), **params) -> Row:
    return Row(SamplingParams(max_tokens=None, **params), prompt, output, seed, end_ids, bad_words)


def make_pipeline(vocab: int, features: Sequence[Feature] | None = None) -> Pipeline:
    return Pipeline(default_features(vocab) if features is None else features, vocab, CPU)


def make_batch(pipeline: Pipeline, rows: Sequence[Row]) -> SampleBatch:
    """Lane i is rows[i], in a table row of another number; what admission does not write is rubbish."""
    table = RowTable(
        max_num_seqs=len(rows) + 3,
        max_model_len=MAX_MODEL_LEN,
        block_size=16,
        device=CPU,
        columns=pipeline.columns,
        features=pipeline.names,
    )
    table.arena.fill_(0x7F123456)
    row_of_lane = [(lane + 2) % (len(rows) + 3) for lane in range(len(rows))]
    used = []
    for number, row in zip(row_of_lane, rows, strict=True):
        request = EngineRequest(
            key=number,
            prompt_token_ids=np.array(row.prompt, np.int32),
            params=row.params,
            seed=row.seed,
            end_token_ids=row.end_ids,
            max_len=MAX_MODEL_LEN,
            bad_word_token_ids=row.bad_words,
        )
        tokens = np.array(row.tokens, np.int32)
        writer = table.admit(Admission(number, 1, request, tokens, 0, np.array([1], np.int32)))
        used.append(pipeline.admit(request, writer))
        writer.scalar("features", used[-1])
        writer.commit()
    table.flush().apply(table.arena)
    row_N = torch.tensor(row_of_lane)
    lanes = {
        name: torch.tensor([lane for lane, bits in enumerate(used) if bits >> bit & 1])
        for bit, name in enumerate(pipeline.names)
        if any(bits >> bit & 1 for bits in used)
    }
    return SampleBatch(row_N, table.columns["length"][row_N], table.columns, lanes)


def apply_features(features: Sequence[Feature], rows: Sequence[Row], logits: torch.Tensor) -> torch.Tensor:
    """The logits after the features alone, without a choice."""
    batch = make_batch(make_pipeline(logits.shape[1], features), rows)
    changed = logits.clone()
    for feature in features:
        if feature.name in batch.feature_lanes:
            feature.apply(changed, batch)
    return changed


def sample(rows: Sequence[Row], logits: torch.Tensor) -> SampledTokens:
    """One token of each row through the whole pipeline."""
    pipeline = make_pipeline(logits.shape[1])
    return pipeline.sample(logits.clone(), make_batch(pipeline, rows))


def softmax64(logits: np.ndarray) -> np.ndarray:
    """float64 softmax over the last axis."""
    weight = np.exp(logits - logits.max(-1, keepdims=True))
    return weight / weight.sum(-1, keepdims=True)


def chi_square_is_plausible(counts: np.ndarray, expected: np.ndarray) -> bool:
    """Pearson's statistic against its 1 - 1e-5 quantile (Wilson and Hilferty's approximation)."""
    assert expected.min() >= 5, "too few draws for a chi-square test"
    statistic = float((((counts - expected) ** 2) / expected).sum())
    degrees = counts.size - 1
    spread = 2 / (9 * degrees)
    return statistic < degrees * (1 - spread + 4.265 * spread**0.5) ** 3
