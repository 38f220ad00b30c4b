"""Sampling on the host side of the wait: float32 logits on the CPU, and the same features as everywhere.

Legend: N sampling lanes, V vocabulary, P prompt tokens scored, K top logprobs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from slipstream.contracts.step import PromptLogprobs, TokenLogprobs
from slipstream.kernels.logprobs import token_logprobs
from slipstream.runner_v1.batch import Lane, SamplingColumns
from slipstream.runner_v1.request import Declared, LiveRequest
from slipstream.sampling.pipeline import Pipeline
from slipstream.sampling.protocol import SampleBatch

Tensor = torch.Tensor
Array = np.ndarray
Scores = tuple[Array, Array, Array]

# Prompt tokens whose logits are held at once.
SCORE_CHUNK = 256


class Sampled(NamedTuple):
    """A token a request and whether it is one; scores of those at the places `scored`: ids and values
    [n, 1 + K], rank [n]."""

    tokens: list[int]
    ok: list[bool]
    scored: list[int]
    scores: Scores | None


def sample(
    logits_NV: Tensor, requests: Sequence[LiveRequest], pipeline: Pipeline, declared: Declared
) -> Sampled:
    """logits: float32 on the CPU, a line a request; changed in place."""
    lanes = range(len(requests))
    users = {
        name: [lane for lane in lanes if requests[lane].features >> bit & 1]
        for bit, name in enumerate(pipeline.names)
    }
    batch = SampleBatch(
        row_N=torch.arange(len(requests)),
        length_N=torch.tensor([len(request.tokens) for request in requests], dtype=torch.int32),
        columns=SamplingColumns(requests, declared),
        feature_lanes={name: torch.tensor(places) for name, places in users.items() if places},
    )
    scored = [lane for lane in lanes if requests[lane].num_logprobs >= 0]
    raw_nV = logits_NV[scored]  # a copy: the pipeline changes logits in place
    chosen = pipeline.sample(logits_NV, batch)
    token_N = chosen.tokens_N
    scores = None
    if scored:
        scores = _scores(raw_nV, token_N[scored], max(requests[lane].num_logprobs for lane in scored))
    return Sampled(token_N.tolist(), chosen.ok_N.tolist(), scored, scores)


def spread_scores(sampled: Sampled, lanes: Sequence[Lane], num_lanes: int) -> TokenLogprobs | None:
    """From the sampling lanes that are scored to all lanes of the plan."""
    if sampled.scores is None:
        return None
    index = [lanes[place].index for place in sampled.scored]
    shape = (num_lanes, 1, sampled.scores[0].shape[1])
    out = TokenLogprobs(np.zeros(shape, np.int32), np.zeros(shape, np.float32), np.zeros(shape[:2], np.int32))
    out.ids[index, 0], out.values[index, 0], out.rank[index, 0] = sampled.scores
    return out


def score_prompt(
    lane: Lane, hidden_TH: Tensor, logits_of: Callable[[Tensor], Tensor]
) -> PromptLogprobs | None:
    """Logprobs of the prompt tokens that this lane's hidden states predict; None where none are owed.
    logits_of: float32 on the CPU. Call it before num_computed moves."""
    request, begin = lane.request, lane.request.num_computed
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
