"""Sampling on the host side of the wait: float32 logits on the CPU, and the same features as everywhere.

Legend: N sampled places, L lanes, Q tokens of a lane, V vocabulary, P prompt tokens scored, K top logprobs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from slipstream.contracts.step import PromptLogprobs, TokenLogprobs
from slipstream.kernels.logprobs import token_logprobs
from slipstream.runner_v1.batch import Lane, SamplingColumns
from slipstream.runner_v1.request import Declared
from slipstream.sampling.pipeline import Pipeline
from slipstream.sampling.protocol import SampleBatch

Tensor = torch.Tensor
Array = np.ndarray
Scores = tuple[Array, Array, Array]

# Prompt tokens whose logits are held at once.
SCORE_CHUNK = 256


class Place(NamedTuple):
    """A lane's n-th place: the token after its row and the first n drafts."""

    lane: Lane
    number: int


class Sampled(NamedTuple):
    """A token a place and whether it is one; scores of those at the indices `scored`: ids and values
    [n, 1 + K], rank [n]."""

    tokens: list[int]
    ok: list[bool]
    scored: list[int]
    scores: Scores | None


def sample(
    logits_NV: Tensor, places: Sequence[Place], pipeline: Pipeline, declared: Declared
) -> Sampled:
    """logits: float32 on the CPU, a line a place; changed in place."""
    numbers, requests = range(len(places)), [place.lane.request for place in places]
    users = {
        name: [number for number in numbers if requests[number].features >> bit & 1]
        for bit, name in enumerate(pipeline.names)
    }
    lengths = [len(place.lane.request.tokens) + place.number for place in places]
    batch = SampleBatch(
        row_N=torch.arange(len(places)),
        length_N=torch.tensor(lengths, dtype=torch.int32),
        columns=SamplingColumns([place.lane for place in places], declared),
        feature_lanes={name: torch.tensor(found) for name, found in users.items() if found},
    )
    scored = [number for number in numbers if requests[number].num_logprobs >= 0]
    raw_nV = logits_NV[scored]  # a copy: the pipeline changes logits in place
    chosen = pipeline.sample(logits_NV, batch)
    token_N = chosen.tokens_N
    scores = None
    if scored:
        scores = _scores(raw_nV, token_N[scored], max(requests[number].num_logprobs for number in scored))
    return Sampled(token_N.tolist(), chosen.ok_N.tolist(), scored, scores)


def spread_scores(sampled: Sampled, places: Sequence[Place], shape: tuple[int, int]) -> TokenLogprobs | None:
    """From the places that are scored to all lanes and tokens of the step: shape [L, Q]."""
    if sampled.scores is None:
        return None
    index = [places[number].lane.index for number in sampled.scored]
    token = [places[number].number for number in sampled.scored]
    whole = (*shape, sampled.scores[0].shape[1])
    out = TokenLogprobs(np.zeros(whole, np.int32), np.zeros(whole, np.float32), np.zeros(shape, np.int32))
    out.ids[index, token], out.values[index, token], out.rank[index, token] = sampled.scores
    return out


def score_prompt(
    lane: Lane, hidden_TH: Tensor, logits_of: Callable[[Tensor], Tensor]
) -> PromptLogprobs | None:
    """Logprobs of the prompt tokens that this lane's hidden states predict; None where none are owed.
    logits_of: float32 on the CPU."""
    request, begin = lane.request, lane.start
    count = min(lane.end, request.prompt_len - 1) - begin
    if request.num_prompt_logprobs < 0 or count <= 0:
        return None
    target_P = torch.tensor(request.tokens[begin + 1 : begin + 1 + count])
    hidden_PH = hidden_TH[lane.first_token : lane.first_token + count]
    chunks = [slice(first, first + SCORE_CHUNK) for first in range(0, count, SCORE_CHUNK)]
    pieces = [
        _scores(logits_of(hidden_PH[chunk]), target_P[chunk], request.num_prompt_logprobs)
        for chunk in chunks
    ]
    ids, values, rank = map(np.concatenate, zip(*pieces, strict=True))
    return PromptLogprobs(lane.row, request.generation, begin + 1, ids, values, rank)


def _scores(logits_NV: Tensor, token_N: Tensor, num_top: int) -> Scores:
    ids, values, rank = token_logprobs(logits_NV, token_N, num_top)
    return ids.numpy(), values.numpy(), rank.numpy()
