"""What users get back. Names and fields follow vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Logprob(NamedTuple):
    """logprob: natural logarithm of the model's own probability, before any sampling feature. rank: 1 for the
    likeliest token. decoded_token: its text; None without a tokenizer, or with detokenize=False."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenScores = dict[int, Logprob]  # the token itself first, then the alternatives, best first


@dataclass(slots=True)
class CompletionOutput:
    """One sample of a request: all of it, or with RequestOutputKind.DELTA what is new since the last output.

    token_ids holds the end token too, text does not. cumulative_logprob is always of all tokens so far.
    finish_reason: "stop", "length", "abort" or "error"; None while it runs. stop_reason: the stop string or
    the id out of stop_token_ids that ended it; None for an end token of the model.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenScores] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """time.monotonic() seconds, in the front end. None: not yet.

    Over the samples that have ended: num_drafts, steps that verified drafts; draft_tokens, drafts that they
    verified; accepted_tokens, those that were taken."""

    arrival_time: float
    scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(slots=True)
class RequestOutput:
    """A request and its samples. prompt: None where it was given as token ids.

    prompt_logprobs: an entry a prompt token, None for the first; with RequestOutputKind.DELTA in one output
    only. num_cached_tokens: prompt tokens found in the prefix cache; None until the request is admitted.
    error: why a sample ended with finish_reason "error".
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[TokenScores | None] | None = None
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None
    error: str | None = None
