"""A request on its way back to its user: its samples, and the outputs made from them when somebody looks.

Nothing is built until take(): a reader that falls behind gets its deltas joined, for no extra work.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from slipstream.contracts.request import EngineRequest
from slipstream.contracts.sampling_params import RequestOutputKind
from slipstream.contracts.step import Finish, PromptLogprobs
from slipstream.engine.input_processor import PreparedRequest, mix_seed
from slipstream.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, TokenScores
from slipstream.text.detokenizer import Detokenizer

_REASONS = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.ERROR: "error", Finish.ABORT: "abort"}
TokenText = Callable[[int], str | None]


class Sample:
    """One of a request's n sequences. watched: somebody must look at each of its tokens. streamed: somebody
    reads it as it comes, and looks at what has come when he does. token_ids: all of them where `watched`,
    what was taken where `streamed`, else only once it has ended."""

    __slots__ = ("_detokenizer", "_new_text", "_seen_tokens", "_text", "cumulative_logprob", "finish_reason",
                 "fresh", "index", "key", "logprobs", "request", "stop_reason", "streamed", "token_ids",
                 "watched")

    def __init__(self, request: RequestState, index: int, detokenizer: Detokenizer | None) -> None:
        params = request.prepared.params
        self.request = request
        self.index = index
        self.key = -1
        self.watched = bool(params.stop) or params.logprobs is not None
        self.streamed = request.kind != RequestOutputKind.FINAL_ONLY and not self.watched
        self.token_ids: list[int] = []
        self.logprobs: list[TokenScores] | None = None if params.logprobs is None else []
        self.cumulative_logprob: float | None = None if params.logprobs is None else 0.0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.fresh = False  # has what no output has shown
        self._detokenizer = detokenizer
        self._text = ""
        self._new_text: list[str] = []
        self._seen_tokens = 0

    def advance(self, tokens: list[int], finish: Finish, scores: list[TokenScores] | None) -> bool:
        """Take tokens and, maybe, the end. True where a stop string ended it and the engine does not know."""
        self.fresh = True
        stopped = self._add_text(tokens, finish) if self._detokenizer is not None else None
        if stopped is not None:
            tokens = tokens[: stopped[1]]
        self.token_ids += tokens
        if self.logprobs is not None and scores is not None:
            scores = scores[: len(tokens)]
            self.logprobs += scores
            chosen = (score[token].logprob for score, token in zip(scores, tokens, strict=True))
            self.cumulative_logprob = sum(chosen, self.cumulative_logprob or 0.0)
        if stopped is not None:
            self.finish_reason, self.stop_reason = "stop", stopped[0]
        elif finish:
            self.finish_reason = _REASONS[finish]
            listed = self.request.prepared.params.stop_token_ids or ()
            if finish == Finish.STOP and self.token_ids[-1] in listed:
                self.stop_reason = self.token_ids[-1]
        return stopped is not None and not finish

    def _add_text(self, tokens: list[int], finish: Finish) -> tuple[str, int] | None:
        """(stop string, tokens up to its end) where one is complete."""
        detokenizer = self._detokenizer
        assert detokenizer is not None
        silent_end = finish == Finish.STOP and not self.request.prepared.params.include_stop_str_in_output
        text, used = detokenizer.feed(tokens[:-1] if silent_end else tokens)
        if finish and detokenizer.stopped is None:
            text, used = text + detokenizer.end(), len(tokens)
        if text:
            self._new_text.append(text)
        return None if detokenizer.stopped is None else (detokenizer.stopped, used)

    def take(self, delta: bool) -> CompletionOutput:
        """What is new, or all there is."""
        new_text, self._new_text = "".join(self._new_text), []
        start, self._seen_tokens = self._seen_tokens if delta else 0, len(self.token_ids)
        self.fresh = False
        if not delta:
            self._text = new_text = self._text + new_text
        return CompletionOutput(
            self.index, new_text, self.token_ids[start:], self.cumulative_logprob,
            None if self.logprobs is None else self.logprobs[start:], self.finish_reason, self.stop_reason,
        )


class RequestState:
    """kind: the output kind in force. num_live: samples that run. prompt_logprobs grows chunk by chunk.
    max_wait: seconds from its arrival on in which it must have a row. pull: takes what is stored of a sample
    that is streamed."""

    __slots__ = ("_pull", "error", "kind", "max_wait", "metrics", "num_cached", "num_live",
                 "prepared", "prompt_logprobs", "request_id", "samples")

    def __init__(
        self, request_id: str, prepared: PreparedRequest, kind: RequestOutputKind,
        pull: Callable[[Sample], list[int]],
    ) -> None:
        self.request_id = request_id
        self.prepared = prepared
        self.kind = kind
        self._pull = pull
        self.samples: list[Sample] = []
        self.num_live = prepared.params.n
        self.num_cached: int | None = None
        self.error: str | None = None
        self.max_wait = math.inf
        self.metrics = RequestMetrics(time.monotonic())
        scored = prepared.params.prompt_logprobs is not None
        self.prompt_logprobs: list[TokenScores | None] | None = [None] if scored else None

    @property
    def finished(self) -> bool:
        return self.num_live == 0

    @property
    def admit_by(self) -> float:
        """time.monotonic() seconds; what has had a row has waited enough."""
        return self.metrics.arrival_time + self.max_wait if self.num_cached is None else math.inf

    def note_token(self) -> None:
        """A sample has tokens."""
        if self.metrics.first_token_time is None:
            self.metrics.first_token_time = time.monotonic()

    def note_end(self) -> None:
        """A sample has ended."""
        self.num_live -= 1
        if self.finished:
            self.metrics.finished_time = time.monotonic()

    def engine_requests(self) -> list[EngineRequest]:
        """One a sample. The prompt is scored once, by sample 0. A user's schema stays here: it may hold
        numbers that no message can."""
        prepared = self.prepared
        scored = prepared.params
        if scored.structured_outputs is not None:
            scored = replace(scored, structured_outputs=None)
        unscored = scored
        if unscored.prompt_logprobs is not None and len(self.samples) > 1:
            unscored = replace(unscored, prompt_logprobs=None)
        return [
            EngineRequest(
                key=sample.key,
                prompt_token_ids=prepared.tokens,
                params=unscored if sample.index else scored,
                seed=mix_seed(prepared.seed, sample.index),
                end_token_ids=prepared.end_token_ids,
                max_len=prepared.max_len,
                bad_word_token_ids=prepared.bad_word_token_ids,
                priority=prepared.priority,
                arrival=self.metrics.arrival_time,
                cache_salt=prepared.cache_salt,
                grammar=prepared.grammar,
                admit_by=self.admit_by,
                first=self.samples[0].key,
            )
            for sample in self.samples
        ]

    def resume(self, stored: Callable[[Sample], list[int]]) -> list[EngineRequest]:
        """One a sample that runs, with the tokens that came of it, for an engine that has seen none of them.
        stored: tokens of a sample that are not among its own yet. A prompt that is scored in part is scored
        again."""
        scores, prompt = self.prompt_logprobs, self.prepared.token_ids
        if scores is not None and len(scores) < len(prompt):
            scores = self.prompt_logprobs = [None]
        scored = scores is None or len(scores) == len(prompt)
        resumed = []
        for sample, request in zip(self.samples, self.engine_requests(), strict=True):
            if sample.finish_reason is None:
                request.resumed_token_ids = np.array([*sample.token_ids, *stored(sample)], np.int32)
                if scored and request.params.prompt_logprobs is not None:
                    request.params = replace(request.params, prompt_logprobs=None)
                resumed.append(request)
        return resumed

    def add_prompt_scores(self, piece: PromptLogprobs, text_of: TokenText) -> None:
        if self.prompt_logprobs is not None:
            width = score_width(self.prepared.params.prompt_logprobs)
            self.prompt_logprobs += token_scores(
                piece.ids[:, :width].tolist(), piece.values[:, :width].tolist(), piece.rank.tolist(), text_of
            )

    def take(self) -> RequestOutput | None:
        """The output that is due: None where nothing is new, or nothing is asked for before the end."""
        delta = self.kind == RequestOutputKind.DELTA
        if self.kind == RequestOutputKind.FINAL_ONLY and not self.finished:
            return None
        for sample in self.samples:
            if sample.streamed and sample.finish_reason is None and (tokens := self._pull(sample)):
                sample.advance(tokens, Finish.NONE, None)
        if not any(sample.fresh for sample in self.samples):
            return None
        outputs = [sample.take(delta) for sample in self.samples if sample.fresh or not delta]
        prompt_logprobs = self.prompt_logprobs
        if prompt_logprobs is not None and len(prompt_logprobs) < len(self.prepared.token_ids):
            prompt_logprobs = None  # another sample was faster than the one that scores the prompt
        elif delta:
            self.prompt_logprobs = None
        return RequestOutput(
            self.request_id, self.prepared.text, self.prepared.token_ids, outputs, self.finished,
            prompt_logprobs, self.metrics, self.num_cached, self.error,
        )


def score_width(count: int | None) -> int | None:
    """Columns of a scores array that a request asked for: the token's own, then `count`; -1 means all."""
    return None if count is None or count < 0 else 1 + count


def token_scores(
    ids: Iterable[Sequence[int]], values: Iterable[Sequence[float]], ranks: Iterable[int], text_of: TokenText
) -> list[TokenScores]:
    """Rows of (token, then the likeliest in order) as dictionaries."""
    scores: list[TokenScores] = []
    for row_ids, row_values, rank in zip(ids, values, ranks, strict=True):
        score = {row_ids[0]: Logprob(row_values[0], rank, text_of(row_ids[0]))}
        for place in range(1, len(row_ids)):
            if row_ids[place] not in score:
                score[row_ids[place]] = Logprob(row_values[place], place, text_of(row_ids[place]))
        scores.append(score)
    return scores
