"""From arrays of a step to outputs of requests. Samples that nobody watches cost no Python until they end, or
until somebody takes what they have."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from slipstream.contracts.outputs import EngineOutputs
from slipstream.contracts.request import EngineRequest
from slipstream.contracts.sampling_params import RequestOutputKind
from slipstream.contracts.step import Finish
from slipstream.engine.input_processor import PreparedRequest
from slipstream.engine.outputs import TokenScores
from slipstream.engine.request_state import RequestState, Sample, TokenText, score_width, token_scores
from slipstream.text.detokenizer import Detokenizers
from slipstream.text.tokenizer import Tokenizer

Array = np.ndarray
_SLOT_BITS = 24
_SLOT_MASK = (1 << _SLOT_BITS) - 1
_FINISH = tuple(Finish)  # by code
_NOWHERE = 0  # the row that tokens of watched samples and of former owners fall into


class SampleStore:
    """Live samples by key, and the tokens of those that nobody watches, appended by array operations.
    awaited: by slot, whether a stream's reader is to be told of the next token.

    A key is a count of tenancies and a slot, so that keys are looked up without a dictionary, and news that
    comes late for a former owner of a slot is told apart. Rows of tokens are given with the first token.
    """

    def __init__(self) -> None:
        self._samples: list[Sample | None] = []
        self._free_slots: list[int] = []
        self._tenancies = 0
        self._key_of = np.zeros(0, np.int64)
        self._row_of = np.zeros(0, np.int64)
        self.watched = np.zeros(0, np.bool_)  # by slot
        self.awaited = np.zeros(0, np.bool_)
        self._drafts = np.zeros((3, 0), np.int64)  # steps that verified some, verified, taken, by slot
        self._free_rows: list[int] = []
        self._length = np.zeros(1, np.int64)
        self._tokens = np.zeros((1, 64), np.int32)

    def __len__(self) -> int:
        return len(self._samples) - len(self._free_slots)

    def open(self, sample: Sample) -> None:
        """Give the sample its key."""
        if not self._free_slots:
            self._add_slots(max(64, len(self._samples)))
        slot = self._free_slots.pop()
        self._tenancies += 1
        sample.key = self._tenancies << _SLOT_BITS | slot
        self._samples[slot] = sample
        self._key_of[slot] = sample.key
        self._row_of[slot] = _NOWHERE if sample.watched else -1
        self.watched[slot] = sample.watched
        self.awaited[slot] = sample.streamed
        self._drafts[:, slot] = 0

    def _add_slots(self, count: int) -> None:
        first = len(self._samples)
        assert first + count <= _SLOT_MASK + 1, "too many live samples"
        self._samples += [None] * count
        self._free_slots += range(first + count - 1, first - 1, -1)
        self._key_of = np.concatenate((self._key_of, np.full(count, -1, np.int64)))
        self._row_of = np.concatenate((self._row_of, np.full(count, _NOWHERE, np.int64)))
        self.watched = np.concatenate((self.watched, np.zeros(count, np.bool_)))
        self.awaited = np.concatenate((self.awaited, np.zeros(count, np.bool_)))
        self._drafts = np.concatenate((self._drafts, np.zeros((3, count), np.int64)), 1)

    def find(self, key: int) -> Sample | None:
        slot = key & _SLOT_MASK
        sample = self._samples[slot] if slot < len(self._samples) else None
        return sample if sample is not None and sample.key == key else None

    def close(self, sample: Sample) -> None:
        """The sample gets nothing more."""
        slot = sample.key & _SLOT_MASK
        row = int(self._row_of[slot])
        if row > _NOWHERE:
            self._length[row] = 0
            self._free_rows.append(row)
        self._samples[slot] = None
        self._key_of[slot] = -1
        self._row_of[slot] = _NOWHERE
        self.watched[slot] = self.awaited[slot] = False
        self._free_slots.append(slot)

    def append(self, keys: Array, counts: Array, tokens: Array) -> tuple[Array, Array]:
        """Store a step's tokens. int64 [n] slots, bool [n]: True where the key is live."""
        slots = keys & _SLOT_MASK
        live = self._key_of[slots] == keys
        rows = np.where(live, self._row_of[slots], _NOWHERE)
        if np.count_nonzero(rows < 0):
            for place in np.flatnonzero((rows < 0) & (counts > 0)).tolist():
                rows[place] = self._new_row(int(slots[place]))
            rows = np.maximum(rows, _NOWHERE)
        start = self._length[rows]
        end = start + counts
        if len(end) and int(end.max()) > self._tokens.shape[1]:
            self._widen(int(end.max()))
        if len(tokens) == len(keys) == np.count_nonzero(counts):
            self._tokens[rows, start] = tokens
        else:
            before = np.cumsum(counts) - counts
            columns = np.repeat(start - before, counts) + np.arange(len(tokens))
            self._tokens[np.repeat(rows, counts), columns] = tokens
        self._length[rows] = end
        self._length[_NOWHERE] = 0
        return slots, live

    def count_drafts(self, slots: Array, drafted: Array, counts: Array) -> None:
        """Drafts that a step verified for live samples; each of them has one token that was no draft."""
        self._drafts[0, slots] += drafted > 0
        self._drafts[1, slots] += drafted
        self._drafts[2, slots] += np.maximum(counts - 1, 0)

    def drafts(self, sample: Sample) -> list[int]:
        """Steps that verified drafts for it, drafts verified and drafts taken so far."""
        counts: list[int] = self._drafts[:, sample.key & _SLOT_MASK].tolist()
        return counts

    def _new_row(self, slot: int) -> int:
        if not self._free_rows:
            count = len(self._length)
            self._length = np.concatenate((self._length, np.zeros(count, np.int64)))
            self._tokens = np.concatenate((self._tokens, np.zeros_like(self._tokens)))
            self._free_rows += range(2 * count - 1, count - 1, -1)
        row = self._free_rows.pop()
        self._row_of[slot] = row
        self.sample(slot).request.note_token()
        return row

    def _widen(self, needed: int) -> None:
        rows, width = self._tokens.shape
        wider = np.zeros((rows, max(needed, 2 * width)), np.int32)
        wider[:, :width] = self._tokens
        self._tokens = wider

    def sample(self, slot: int) -> Sample:
        """The owner of a slot whose key is live."""
        sample = self._samples[slot]
        assert sample is not None
        return sample

    def tokens(self, sample: Sample) -> list[int]:
        """What is stored of a live sample: nothing where it is watched, of a stream what its reader has not
        taken."""
        row = self._row_of[sample.key & _SLOT_MASK]
        stored: list[int] = self._tokens[row, : self._length[row]].tolist() if row > _NOWHERE else []
        return stored

    def take(self, sample: Sample) -> list[int]:
        """What is stored of a live stream, which is to be told of the next token from now on."""
        slot = sample.key & _SLOT_MASK
        tokens = self.tokens(sample)
        if tokens:
            self._length[self._row_of[slot]] = 0
        self.awaited[slot] = True
        return tokens


class OutputProcessor:
    """One thread calls it. tokenizer: None gives no text."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._detokenizers = Detokenizers(tokenizer) if tokenizer is not None else None
        self._store = SampleStore()

    @property
    def num_live(self) -> int:
        """Samples that run or wait."""
        return len(self._store)

    def request_of(self, key: int) -> RequestState | None:
        """The live request that the engine knows by this key."""
        sample = self._store.find(key)
        return None if sample is None else sample.request

    def open(
        self, request_id: str, prepared: PreparedRequest, kind: RequestOutputKind | None = None
    ) -> RequestState:
        """Expect outputs of a request. kind: instead of the one in its params."""
        params = prepared.params
        kind = params.output_kind if kind is None else kind
        state = RequestState(request_id, prepared, kind, self._store.take)
        texts = self._detokenizers if params.detokenize else None
        for index in range(params.n):
            sample = Sample(state, index, None if texts is None else texts.open(params, prepared.token_ids))
            self._store.open(sample)
            state.samples.append(sample)
        return state

    def close(self, states: Iterable[RequestState]) -> list[int]:
        """Expect nothing more of these requests: what runs ends as "abort". The keys that ran."""
        keys = []
        for state in states:
            for sample in state.samples:
                if sample.finish_reason is None:
                    keys.append(sample.key)
                    self._end(sample, Finish.ABORT)
        return keys

    def resume(self, states: Iterable[RequestState]) -> list[EngineRequest]:
        """What an engine that knows nothing of these requests is to go on with."""
        return [request for state in states for request in state.resume(self._store.tokens)]

    def process(self, outputs: EngineOutputs) -> tuple[list[RequestState], list[int]]:
        """(requests that have an output to take, keys that the engine is to abort: stop strings ended
        them)."""
        for key, cached in outputs.num_cached:
            sample = self._store.find(key)
            if sample is not None and sample.index == 0 and sample.request.num_cached is None:
                sample.request.num_cached = int(cached)
        for key, when in outputs.admitted:
            sample = self._store.find(key)
            if sample is not None and sample.request.metrics.scheduled_time is None:
                sample.request.metrics.scheduled_time = when
        for key, piece in outputs.prompt_logprobs:
            if (sample := self._store.find(key)) is not None:
                sample.request.add_prompt_scores(piece, self._text_of(sample))
        for key, error in outputs.errors:
            if (sample := self._store.find(key)) is not None:
                sample.request.error = error
        slots, live = self._store.append(outputs.keys, outputs.num_tokens, outputs.tokens)
        if outputs.drafted is not None:
            self._store.count_drafts(slots[live], outputs.drafted[live], outputs.num_tokens[live])
        told = self._store.awaited[slots] & (outputs.num_tokens > 0)
        noted = (live & (self._store.watched[slots] | told | (outputs.finish != 0))).nonzero()[0]
        self._store.awaited[slots[noted]] = False
        return self._advance(outputs, slots, noted) if len(noted) else ([], [])

    def _advance(
        self, outputs: EngineOutputs, slots: Array, noted: Array
    ) -> tuple[list[RequestState], list[int]]:
        ready: dict[RequestState, None] = {}
        stopped: list[int] = []
        tokens = outputs.tokens.tolist()
        ends = np.cumsum(outputs.num_tokens).tolist()
        counts, finishes = outputs.num_tokens.tolist(), outputs.finish.tolist()
        for place, slot in zip(noted.tolist(), slots[noted].tolist(), strict=True):
            sample = self._store.sample(slot)
            request, finish, count = sample.request, _FINISH[finishes[place]], counts[place]
            if sample.watched:
                new = tokens[ends[place] - count : ends[place]]
                if new:
                    request.note_token()
                scores = self._scores(outputs, place, count, sample)
                if sample.advance(new, finish, scores):
                    stopped.append(sample.key)
                if sample.finish_reason is not None:
                    self._ended(sample)
            elif finish:
                self._end(sample, finish)
            if request.finished or request.kind != RequestOutputKind.FINAL_ONLY:
                ready[request] = None
        return list(ready), stopped

    def _end(self, sample: Sample, finish: Finish) -> None:
        sample.advance(self._store.tokens(sample), finish, None)
        self._ended(sample)

    def _ended(self, sample: Sample) -> None:
        drafts, verified, taken = self._store.drafts(sample)
        metrics = sample.request.metrics
        metrics.num_drafts += drafts
        metrics.draft_tokens += verified
        metrics.accepted_tokens += taken
        self._store.close(sample)
        sample.request.note_end()

    def _scores(
        self, outputs: EngineOutputs, place: int, count: int, sample: Sample
    ) -> list[TokenScores] | None:
        found = outputs.logprobs
        if found is None or sample.logprobs is None:
            return None
        width = score_width(sample.request.prepared.params.logprobs)
        return token_scores(
            found.ids[place, :count, :width].tolist(), found.values[place, :count, :width].tolist(),
            found.rank[place, :count].tolist(), self._text_of(sample),
        )

    def _text_of(self, sample: Sample) -> TokenText:
        if self._detokenizers is None or not sample.request.prepared.params.detokenize:
            return _no_text
        return self._detokenizers.token_text


def _no_text(_token: int) -> None:
    return None
