"""An exact, small model of the device, for tests of the scheduler: rows, lengths, KV slots and who wrote
them.

It knows nothing of the scheduler's code. Tokens are a hash of a request's key and the position, so every
request has one right output; the KV of a position is the sequence of tokens up to it (and the salt), so a
lane that reads a slot which somebody else overwrote, or a prefix that is not its own, is caught. """

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from slipstream.contracts.outputs import EngineOutputs
from slipstream.contracts.request import EngineRequest
from slipstream.contracts.sampling_params import SamplingParams
from slipstream.contracts.step import (
    Admission,
    Finish,
    PromptLogprobs,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from slipstream.scheduler import Scheduler, SchedulerConfig
from slipstream.scheduler.drafting import NoDrafting

END = 7
VOCAB = 50


def token_at(key: int, position: int) -> int:
    """The token that request `key` samples for this position; END about once in 50."""
    return random.Random(key * 1_000_003 + position).randrange(VOCAB)


def make_request(
    key: int, prompt: list[int] | int, max_tokens: int | None = 8, *, max_len: int | None = None,
    priority: int = 0, salt: str | None = None, ignore_eos: bool = False, prompt_logprobs: int | None = None,
    logprobs: int | None = None, resumed: list[int] | None = None,
    admit_by: float = math.inf, first: int = -1,
) -> EngineRequest:
    """prompt: tokens, or how many (then they are the key's own)."""
    if isinstance(prompt, int):
        prompt = [random.Random(f"{key}:{i}").randrange(VOCAB) for i in range(prompt)]
    if max_len is None:
        assert max_tokens is not None
        max_len = len(prompt) + max_tokens
    params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs, logprobs=logprobs)
    return EngineRequest(
        key=key, prompt_token_ids=np.array(prompt, np.int32), params=params, seed=key,
        end_token_ids=() if ignore_eos else (END,), max_len=max_len, priority=priority, arrival=0.0,
        cache_salt=salt, resumed_token_ids=np.array(resumed or [], np.int32),
        admit_by=admit_by, first=first,
    )


def expected_output(request: EngineRequest) -> tuple[list[int], Finish]:
    """What the request must deliver, by definition."""
    length = len(request.prompt_token_ids) + len(request.resumed_token_ids)
    out: list[int] = []
    while length < request.max_len:
        out.append(token_at(request.key, length))
        length += 1
        if out[-1] in request.end_token_ids:
            return out, Finish.STOP
    return out, Finish.LENGTH


@dataclass
class DeviceRow:
    """What the device holds of a row."""

    alive: bool = False
    request: EngineRequest | None = None
    generation: int = -1
    tokens: list[int] = field(default_factory=list)
    num_computed: int = 0
    blocks: dict[int, int] = field(default_factory=dict)


class DeviceModel:
    """Applies plans in order, exactly as contracts/step.py describes them."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.rows = [DeviceRow() for _ in range(config.max_num_seqs)]
        self.slots: dict[tuple[int, int], tuple[str | None, tuple[int, ...]]] = {}
        self.last_lanes: tuple[np.ndarray, ...] | None = None
        self.last_drafts = (0, 0)
        self.broken_keys: set[int] = set()  # requests whose logits are not finite
        self.computed_tokens = 0
        self.cleared: dict[int, tuple[int, int]] = {}  # a block's (row, generation) when it was cleared

    def run(self, plan: StepPlan) -> StepResult:
        self._check_plan(plan)
        for row in plan.released.tolist():
            self.rows[row].alive = False
        for admission in plan.admissions:
            self._admit(admission)
        for row, index, block in zip(
            plan.grant_row.tolist(), plan.grant_index.tolist(), plan.grant_block.tolist(), strict=True
        ):
            assert block != 0
            self.rows[row].blocks[index] = block
        self._clear(plan.fresh_blocks().tolist())
        lanes, width = len(plan.lane_row), 1 + plan.draft_tokens
        drafted, room = np.zeros(lanes, np.int32), plan.draft_room
        counts, finish = np.zeros(lanes, np.int32), np.zeros(lanes, np.int32)
        tokens = np.full((lanes, width), -1, np.int32)
        pieces: list[PromptLogprobs] = []
        for lane, row in enumerate(plan.lane_row.tolist()):
            state = self.rows[row]
            if not state.alive:
                continue
            assert state.generation == plan.lane_generation[lane], "a live lane of an older owner"
            size = int(plan.lane_query_len[lane])
            if lane < plan.num_decode_lanes:
                assert state.request is not None
                left = state.request.max_len - len(state.tokens) - 1
                drafted[lane] = min(plan.draft_tokens, room, left)
                room -= int(drafted[lane])
                new, finish[lane] = self._decode(state, 1 + int(drafted[lane]))
            else:
                start = state.num_computed
                new, finish[lane] = self._prefill(state, size, bool(plan.lane_samples[lane]))
                pieces += self._score(row, state, start, start + size)
            assert state.num_computed <= plan.len_bound
            index, half = divmod(state.num_computed, self.config.block_size)
            if state.alive and half:
                mine = self.cleared.get(state.blocks[index])
                assert mine == (row, state.generation), "half of a block is another's"
            if new and state.alive:
                self._draft(state)
            counts[lane] = len(new)
            tokens[lane, : len(new)] = new
        scores = self._token_scores(tokens)
        return StepResult(
            plan.step, plan.lane_row, plan.lane_generation, counts, tokens, finish, scores, pieces,
            drafted if plan.draft_tokens else None,
        )

    def _clear(self, blocks: list[int]) -> None:
        for row, state in enumerate(self.rows):
            for index, block in state.blocks.items():
                if state.alive and block in blocks:
                    assert state.num_computed <= index * self.config.block_size, "it holds what was computed"
                    self.cleared[block] = (row, state.generation)

    def _token_scores(self, tokens: np.ndarray) -> TokenLogprobs | None:
        """Where anybody asked: the tokens themselves, so that a test sees whose they are."""
        if all(row.request is None or row.request.params.logprobs is None for row in self.rows):
            return None
        return TokenLogprobs(tokens[:, :, None], -tokens[:, :, None].astype(np.float32), tokens)

    def _check_plan(self, plan: StepPlan) -> None:
        config = self.config
        rows = plan.lane_row.tolist()
        assert rows and len(set(rows)) == len(rows), "a row has two lanes"
        assert all(0 <= row < config.max_num_seqs for row in rows)
        decodes = plan.num_decode_lanes
        assert plan.draft_tokens < config.tokens_per_step
        if config.uneven_drafts and plan.draft_tokens:
            assert plan.draft_tokens == config.tokens_per_step - 1 and plan.draft_room >= decodes
        else:
            assert plan.draft_room == decodes * plan.draft_tokens
        assert int(plan.lane_query_len.sum()) + plan.draft_room <= config.max_num_batched_tokens
        assert (plan.lane_query_len[:decodes] == 1).all()
        assert plan.lane_samples[:decodes].all()
        assert (plan.lane_query_len > 0).all()
        arrays = (plan.lane_row, plan.lane_generation, plan.lane_query_len, plan.lane_samples)
        drafts = (plan.draft_tokens, plan.draft_room)
        assert all(a.dtype == np.int32 for a in arrays[:3]) and plan.lane_samples.dtype == np.bool_
        if not plan.lanes_changed:
            assert self.last_lanes is not None
            assert all(a is b for a, b in zip(arrays, self.last_lanes, strict=True))
            assert drafts == self.last_drafts
        self.last_lanes, self.last_drafts = arrays, drafts
        assert not {a.row for a in plan.admissions} & set(rows[:decodes])

    def _admit(self, admission: Admission) -> None:
        row = self.rows[admission.row]
        assert not row.alive, "a row was given away while its owner lived"
        assert admission.generation > row.generation
        tokens, prompt = admission.tokens.tolist(), admission.request.prompt_token_ids.tolist()
        assert tokens[: len(prompt)] == prompt
        assert admission.num_cached < len(tokens)
        self.rows[admission.row] = DeviceRow(
            True, admission.request, admission.generation, tokens, admission.num_cached,
            dict(enumerate(admission.blocks.tolist())),
        )

    def _kv(self, state: DeviceRow, position: int, tokens: list[int]) -> tuple[str | None, tuple[int, ...]]:
        assert state.request is not None
        return state.request.cache_salt, tuple(tokens[: position + 1])

    def _slot(self, state: DeviceRow, position: int) -> tuple[int, int]:
        block = state.blocks.get(position // self.config.block_size)
        assert block is not None, f"position {position} has no block"
        return block, position % self.config.block_size

    def _compute(self, state: DeviceRow, start: int, tokens: list[int], end: int) -> None:
        """Write KV of positions start .. end-1 of `tokens`, after which every position must read as
        written."""
        for position in range(start, end):
            self.slots[self._slot(state, position)] = self._kv(state, position, tokens)
            self.computed_tokens += 1
        for position in range(end):
            found = self.slots.get(self._slot(state, position))
            assert found == self._kv(state, position, tokens), f"position {position} was overwritten"

    def _draft(self, state: DeviceRow) -> None:
        """What a drafter with layers of its own writes: the positions of the newest token and of drafts."""
        assert state.request is not None
        first = len(state.tokens) - 1
        for position in range(first, min(first + self.config.lookahead, state.request.max_len)):
            self.slots[self._slot(state, position)] = ("a draft", (position,))

    def _sample(self, state: DeviceRow, most: int) -> tuple[list[int], Finish]:
        request = state.request
        assert request is not None
        new: list[int] = []
        finish = Finish.NONE
        if request.key in self.broken_keys and len(state.tokens) < request.max_len:
            finish = Finish.ERROR
        while finish == Finish.NONE and len(new) < most and len(state.tokens) < request.max_len:
            new.append(token_at(request.key, len(state.tokens)))
            state.tokens.append(new[-1])
            if new[-1] in request.end_token_ids:
                finish = Finish.STOP
        if finish == Finish.NONE and len(state.tokens) >= request.max_len:
            finish = Finish.LENGTH
        state.alive = finish == Finish.NONE
        return new, finish

    def _prefill(self, state: DeviceRow, size: int, samples: bool) -> tuple[list[int], Finish]:
        end = state.num_computed + size
        assert end <= len(state.tokens) and samples == (end == len(state.tokens))
        self._compute(state, state.num_computed, state.tokens, end)
        state.num_computed = end
        return self._sample(state, 1) if samples else ([], Finish.NONE)

    def _decode(self, state: DeviceRow, size: int) -> tuple[list[int], Finish]:
        """The known last token and size - 1 drafts; how many are taken depends on key and length alone."""
        assert state.request is not None
        length = len(state.tokens)
        assert state.num_computed == length - 1
        drafts = [token_at(state.request.key, length + i) for i in range(size - 1)]
        end = min(length - 1 + size, state.request.max_len)
        self._compute(state, length - 1, state.tokens + drafts, end)
        taken = 1 + (token_at(state.request.key, -length) % size)
        new, finish = self._sample(state, taken)
        state.num_computed = len(state.tokens) - 1
        return new, finish

    def _score(self, row: int, state: DeviceRow, start: int, end: int) -> list[PromptLogprobs]:
        """Prompt positions predicted by the chunk start .. end-1; values are the positions themselves."""
        assert state.request is not None
        end = min(end, len(state.request.prompt_token_ids) - 1)
        if state.request.params.prompt_logprobs is None or start >= end:
            return []
        positions = np.arange(start + 1, end + 1, dtype=np.int32)
        ids = positions[:, None]
        return [PromptLogprobs(row, state.generation, start + 1, ids, ids.astype(np.float32), positions)]


class Varying(NoDrafting):
    """Another limit at every step, none among them, up to `most`."""

    def __init__(self, most: int) -> None:
        self._random, self._most = random.Random(most), most

    def choose(self, lanes: int, tokens: int) -> int:
        return self._random.choice((0, 1, self._most))

    def gain(self, limit: int) -> float:
        return 1.0 + 0.6 * limit


class Harness:
    """Scheduler and device with results that come late, and everything that was delivered."""

    def __init__(self, lag: int = 1, **numbers: object) -> None:
        values: dict[str, object] = {
            "max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64, "block_size": 4,
            "num_blocks": 65,
        }
        self.config = SchedulerConfig(**{**values, **numbers})  # type: ignore[arg-type]
        most = self.config.tokens_per_step - 1
        self.scheduler = Scheduler(self.config, Varying(most) if most else None)
        self.device = DeviceModel(self.config)
        self.lag = lag
        self.late: deque[StepResult] = deque()
        self.requests: dict[int, EngineRequest] = {}
        self.tokens: dict[int, list[int]] = {}
        self.finish: dict[int, Finish] = {}
        self.cached: dict[int, int] = {}
        self.errors: dict[int, str] = {}
        self.scored: dict[int, list[int]] = {}
        self.token_scores: dict[int, list[int]] = {}
        self.aborted: set[int] = set()
        self.order: list[int] = []  # keys in the order of their first admission
        self.plans: list[StepPlan] = []

    def add(self, *requests: EngineRequest) -> None:
        for request in requests:
            self.requests[request.key] = request
            self.tokens[request.key] = []
            self.scheduler.add(request)

    def abort(self, *keys: int) -> None:
        self.aborted.update(key for key in keys if key not in self.finish)
        self.scheduler.abort(keys)

    def schedule(self) -> bool:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.plans.append(plan)
            self.order += [a.request.key for a in plan.admissions]
            self.late.append(self.device.run(plan))
        self.scheduler.check_invariants()
        return plan is not None

    def apply(self) -> EngineOutputs | None:
        outputs = self.scheduler.apply(self.late.popleft()) if self.late else self.scheduler.drain()
        self.scheduler.check_invariants()
        if outputs is not None:
            self._take(outputs)
        return outputs

    def _take(self, outputs: EngineOutputs) -> None:
        starts = np.concatenate(([0], np.cumsum(outputs.num_tokens))).tolist()
        assert starts[-1] == len(outputs.tokens)
        assert len(set(outputs.keys.tolist())) == len(outputs.keys) == len(outputs.finish)
        for place, key in enumerate(outputs.keys.tolist()):
            assert key not in self.aborted, "news of an aborted request"
            assert key not in self.finish, "news after the end"
            new = outputs.tokens[starts[place] : starts[place + 1]].tolist()
            self.tokens[key] += new
            if outputs.finish[place]:
                self.finish[key] = Finish(outputs.finish[place])
            if outputs.logprobs is not None:
                scores = self.token_scores.setdefault(key, [])
                scores += outputs.logprobs.ids[place, : len(new), 0].tolist()
        for key, cached in outputs.num_cached:
            assert key not in self.cached, "num_cached came twice"
            self.cached[key] = cached
        self.errors.update(outputs.errors)
        for key, piece in outputs.prompt_logprobs:
            self.scored.setdefault(key, []).extend(piece.ids[:, 0].tolist())

    def step(self) -> None:
        """As the engine does: fill the pipeline, then take the oldest result."""
        while len(self.late) <= self.lag and self.schedule():
            pass
        self.apply()

    def finish_all(self, limit: int = 3000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work and not self.late:
                break
            self.step()
        else:
            raise AssertionError("the scheduler does not come to an end")
        self.check_end()

    def check_end(self) -> None:
        """Every request got exactly its tokens; every row and block is free."""
        for key, request in self.requests.items():
            tokens, finish = expected_output(request)
            if key in self.aborted or key in self.errors:
                assert self.tokens[key] == tokens[: len(self.tokens[key])]
                continue
            assert (self.tokens[key], self.finish[key]) == (tokens, finish), f"request {key}"
        stats = self.scheduler.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.free_blocks == self.config.num_blocks - 1
