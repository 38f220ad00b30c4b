"""The scheduler: who computes what in the next step, and what a step's result means for each request.

It never waits for the device. schedule() may run any number of steps ahead of apply(): what it planned moves
host bounds, the device holds the exact lengths, and a result of a row that changed hands since is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from slipstream.contracts.errors import OVERDUE
from slipstream.contracts.outputs import EngineOutputs, EngineStats
from slipstream.contracts.request import EngineRequest
from slipstream.contracts.step import Admission, Finish, StepPlan, StepResult
from slipstream.scheduler.columns import DECODE, PREFILL, Array
from slipstream.scheduler.config import SchedulerConfig
from slipstream.scheduler.constrained import NO_MASKS, Constraints, NoConstraints, advance, take_legal
from slipstream.scheduler.drafting import Drafting, NoDrafting, count_drafts
from slipstream.scheduler.fitting import refusal, within_pool
from slipstream.scheduler.lanes import (
    EMPTY_LANES,
    NO_GRANTS,
    NO_KEYS,
    NO_ROWS,
    Chunk,
    Flight,
    Grants,
    affordable_drafts,
    are_ending,
    blocks_short,
    give_back,
    half_blocks,
    length_bound,
    make_lanes,
    quiet_tokens,
    take_chunk,
)
from slipstream.scheduler.news import NO_LEGAL_TOKEN, ROW_FAILED, News, pick_logprobs
from slipstream.scheduler.queue import Entry, WaitingQueue
from slipstream.scheduler.tenancy import Tenancy

FINISH_NONE, FINISH_ERROR = int(Finish.NONE), int(Finish.ERROR)


class Scheduler:
    """One thread calls it. Requests are known by their keys, rows by (row, generation). drafting: chooses how
    many drafts a step verifies; needed where config.tokens_per_step is over 1. constraints: knows every
    request with a grammar before it is added."""

    def __init__(
        self, config: SchedulerConfig, drafting: Drafting | None = None,
        constraints: Constraints | None = None,
    ) -> None:
        self.config = config
        self._drafting, self._constraints = drafting or NoDrafting(), constraints or NoConstraints()
        self._rows = Tenancy(config)
        self._columns = self._rows.columns
        self.waiting = WaitingQueue()
        self._news = News()
        self._entries: dict[int, Entry] = {}
        self._prefills: list[int] = []  # rows whose prompt is not fully planned, in order of admission
        self._flight: deque[Flight] = deque()
        self._lanes = EMPTY_LANES
        self._in_lanes = np.zeros(config.max_num_seqs, np.bool_)
        self._stale = True  # the lane set must be made anew
        # By how many tokens bounds may move before the lane set needs a block, and before it needs a look.
        self._room = self._run = 0
        self._elapsed = 0  # tokens that decode bounds have moved by since they were settled
        self._drafts = self._length_bound = 0  # of the last step planned
        self._blocked = False  # the head of the queue does not fit until somebody leaves
        self._sequence = self._step = 0
        self._counts = EngineStats(
            num_blocks=config.usable_blocks, accepted_per_position=(0,) * (config.tokens_per_step - 1)
        )

    # Requests come and go.

    def add(self, request: EngineRequest) -> None:
        """Queue a request. One that can never fit ends with an error in the next outputs. Raises ValueError
        for a key that is in use."""
        if request.key in self._entries:
            raise ValueError(f"key={request.key}: a live request has it")
        tokens = np.concatenate((request.prompt_token_ids, request.resumed_token_ids), dtype=np.int32)
        request = within_pool(request, self.config)
        if (text := refusal(request, len(tokens), self.config)) is not None:
            self.refuse(request, text)
            return
        priority = request.priority if self.config.policy == "priority" else 0
        order = (priority, request.arrival, self._sequence)
        entry = Entry(request, order, tokens, first=self._entries.get(request.first))
        self._entries[request.key] = entry
        self._sequence += 1
        self.waiting.push(entry)
        self._blocked = False

    def refuse(self, request: EngineRequest, text: str) -> None:
        """A request that was not added ends with an error."""
        self._constraints.close(request.key)
        self._news.failed(request.key, text)

    def abort(self, keys: Iterable[int]) -> None:
        """End requests without a further output. Unknown and finished keys are ignored."""
        gone = set(keys)
        for key in gone:
            self._end(key, keep=True)
        self._news.withdraw(gone)

    def fail(self, keys: Iterable[int], text: str) -> None:
        """End requests with an error of their own; nobody else is harmed. Unknown keys are ignored."""
        for key in keys:
            if self._end(key, keep=False):
                self._news.failed(key, text)

    def _end(self, key: int, *, keep: bool) -> bool:
        entry = self._entries.pop(key, None)
        self._constraints.close(key)
        if entry is None:
            return False
        if entry.waiting:
            self.waiting.discard(entry)
            self._blocked = False
        else:
            self._leave(entry.row, keep=keep)
        return True

    def _leave(self, row: int, *, keep: bool = True) -> Entry:
        if self._columns.phase[row] == PREFILL:
            self._prefills.remove(row)
        self._stale |= bool(self._in_lanes[row])
        self._blocked = False
        return self._rows.leave(row, keep=keep)

    # Planning.

    def schedule(self) -> StepPlan | None:
        """The next step; None where no row can compute now (results in flight may change that)."""
        grants, legal, admissions, half, changed = NO_GRANTS, NO_MASKS, [], NO_ROWS, False
        self._take_masks()
        self.fail(self.waiting.overdue(), OVERDUE)
        decodes, most = len(self._lanes.decode_row), self.config.max_num_batched_tokens
        drafts = affordable_drafts(self._drafting.choose(decodes, most), decodes, most, False)
        width = 1 + self.config.most_drafts(drafts)
        if self._stale or self._run <= 0 or self._room < width or self._prefills or self._may_admit():
            self._settle()
            rows, grants, preempted, drafts, width = self._grant(drafts)
            budget = most - len(rows) * (1 + drafts)
            chunks = self._continue_prefills(budget)
            if not preempted:
                budget -= sum(chunk.size for chunk in chunks)
                admissions = self._admit(budget, chunks)
            half = half_blocks(self._columns, chunks, self.config.block_size)
            changed = self._set_lanes(rows, chunks, width)
        else:
            self._length_bound += width
        lanes = self._lanes
        if not len(lanes):
            return None
        decodes = len(lanes.decode_row)
        if changed:
            legal = take_legal(self._columns, self._constraints, lanes, width - 1)
            self._stale |= len(legal[0]) > 0  # these rows are out of the next step
        released = self._rows.take_released() if self._rows.released else NO_ROWS
        plan = StepPlan(
            self._step, lanes.row, lanes.generation, lanes.query_len, lanes.samples, decodes,
            changed or drafts != self._drafts, self._length_bound, released, admissions, *grants,
            width - 1, decodes * drafts, *legal, half,
        )
        self._flight.append(Flight(self._step, lanes, self._rows.departures, drafts, width - 1))
        self._step += 1
        self._drafts, self._elapsed = drafts, self._elapsed + width
        self._room, self._run = self._room - width, self._run - width
        return plan

    def _take_masks(self) -> None:
        """Rows whose masks have come take part again."""
        for key, error in self._constraints.take_ready():
            if error is not None:
                self.fail([key], error)
            elif (entry := self._entries[key]).row >= 0:
                self._columns.held[entry.row] = False
                self._stale = True

    def _may_admit(self) -> bool:
        return not self._blocked and len(self.waiting) > 0 and self._rows.num_free_rows > 0

    def _settle(self) -> None:
        """Bring the bounds of decode rows up to the last step planned."""
        if self._elapsed:
            self._columns.computed_bound[self._lanes.decode_row] += self._elapsed
            self._elapsed = 0

    def _grant(self, drafts: int) -> tuple[Array, Grants, bool, int, int]:
        """The decode rows of the next step, their new blocks, whether somebody was preempted for them, the
        drafts a lane that there is room for, and the tokens that one lane may gain."""
        config, pool, preempted = self.config, self._rows.pool, False
        rows = self._columns.decoding(len(self._flight))
        waits = bool(self._prefills) or self._may_admit()
        gains = (self._drafting.gain(flight.share) for flight in self._flight)
        if drafts and not waits and are_ending(self._columns, rows, gains):
            rows = rows[:0]  # a step that most likely nobody needs would only be in the way of who comes next
        drafts = affordable_drafts(drafts, len(rows), config.max_num_batched_tokens, waits)
        width = 1 + config.most_drafts(drafts)
        needed = blocks_short(self._columns, rows, config, width, 0)
        if drafts and int(needed.sum()) > pool.num_free:
            # Nobody leaves for the sake of guesses.
            drafts, width = 0, 1
            needed = blocks_short(self._columns, rows, config, 1, 0)
        while int(needed.sum()) > pool.num_free:
            self._preempt()
            preempted = True
            rows = self._columns.decoding(len(self._flight))
            needed = blocks_short(self._columns, rows, config, 1, 0)
        if not needed.any():
            return rows, NO_GRANTS, preempted, drafts, width
        # All rows are topped up together, so that the steps between need no look at all.
        wanted = blocks_short(self._columns, rows, config, width, config.grant_ahead)
        counts = wanted if 2 * int(wanted.sum()) <= pool.num_free else needed
        return rows, self._rows.grant(rows, counts), preempted, drafts, width

    def _preempt(self) -> None:
        """The last in order leaves its row as if finished, and waits again with what it has."""
        self._put_back(max(self._rows.owners(), key=lambda owner: owner.order), keep=True)
        self._counts.preemptions += 1

    def _put_back(self, entry: Entry, *, keep: bool) -> None:
        entry.tokens = self._columns.tokens[entry.row, : self._columns.length[entry.row]].copy()
        self._leave(entry.row, keep=keep)
        self.waiting.push(entry)

    def put_all_back(self, *, keep: bool) -> list[list[int]]:
        """Steps in flight have no result: every running request waits again with what it has. keep: the
        device has its rows and blocks still. The keys in those steps, the oldest step's first."""
        keys = [flight.lanes.key.tolist() for flight in self._flight]
        self._flight.clear()
        for entry in self._rows.owners():
            self._put_back(entry, keep=keep)
        if not keep:
            self._rows.forget()
        self._lanes, self._in_lanes[:], self._elapsed, self._stale = EMPTY_LANES, False, 0, True
        return keys

    def _continue_prefills(self, budget: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        for row in self._prefills:
            if budget == 0:
                break
            chunks.append(take_chunk(self._columns, row, budget))
            budget -= chunks[-1].size
        self._prefills = self._prefills[sum(chunk.last for chunk in chunks) :]
        return chunks

    def _admit(self, budget: int, chunks: list[Chunk]) -> list[Admission]:
        """Admit from the head of the queue while rows, blocks and budget last; appends their first chunks."""
        admissions = list[Admission]()
        while budget > 0 and self._may_admit() and (entry := self.waiting.peek()) is not None:
            if entry.request.grammar and not self._constraints.ready(entry.request.key):
                break  # preempted while its mask is computed
            # A free block for each running row, so that newcomers survive the next block boundary.
            admission = self._rows.admit(entry, reserve=self._rows.num_owned_rows)
            if admission is None:
                self._blocked = True
                break
            self.waiting.pop()
            self._count_admission(entry, admission)
            admissions.append(admission)
            chunk = take_chunk(self._columns, admission.row, budget)
            budget -= chunk.size
            chunks.append(chunk)
            if not chunk.last:
                self._prefills.append(admission.row)
        return admissions

    def _count_admission(self, entry: Entry, admission: Admission) -> None:
        if not entry.admitted_before:
            entry.admitted_before = True
            self._news.cached(entry.request.key, admission.num_cached)
            self._counts.prefix_query_tokens += len(entry.tokens)
            self._counts.prefix_hit_tokens += admission.num_cached

    def _set_lanes(self, rows: Array, chunks: list[Chunk], width: int) -> bool:
        """Make the lane set of the next step, or keep the one there is; True where it changed."""
        changed = self._stale or bool(chunks) or len(rows) != len(self._lanes)
        if changed:
            self._lanes = make_lanes(self._columns, rows, chunks)
            self._in_lanes[:] = False
            self._in_lanes[self._lanes.index] = True
        self._length_bound = length_bound(self._columns, self._lanes, width)
        # A set with chunks is good for one step.
        self._stale = bool(chunks)
        self._room, self._run = quiet_tokens(self._columns, rows, self.config)
        return changed

    # Results.

    def apply(self, result: StepResult, seconds: float = 0.0) -> EngineOutputs:
        """Take the result of the oldest step in flight: deliver tokens, end rows. seconds: that it took on
        the device. Raises AssertionError for any other step's."""
        flight = self._flight.popleft()
        assert flight.step == result.step, f"result of step {result.step}, expected {flight.step}"
        lanes, all_owned = flight.lanes, flight.departures == self._rows.departures
        owned = None if all_owned else self._columns.generation[lanes.index] == lanes.generation
        for lane, chunk in enumerate(lanes.chunks, len(lanes.decode_row)):
            if owned is None or owned[lane]:
                self._rows.computed(chunk.row, chunk.end)
        for piece in result.prompt_logprobs:
            if self._columns.generation[piece.row] == piece.generation:
                self._news.scored(self._rows.owner(piece.row), piece)
        counts, tokens, finish, picked = result.num_tokens, result.tokens, result.finish, None
        drafted = self._verified(flight, result, owned, seconds) if self.config.tokens_per_step > 1 else None
        rows, keys = lanes.index, lanes.key
        if owned is not None or np.count_nonzero(counts) < len(counts):
            has_news = (counts > 0) | (finish != FINISH_NONE)
            picked = np.flatnonzero(has_news if owned is None else has_news & owned)
            rows, keys = rows[picked], keys[picked]
            counts, tokens, finish = counts[picked], tokens[picked], finish[picked]
            drafted = None if drafted is None else drafted[picked]
        taken = self._columns.append(rows, counts, tokens)
        advance(self._columns, self._constraints, rows, counts, tokens, finish)
        if np.count_nonzero(finish):
            self._finish(rows, finish)
        self._counts.steps += 1
        scores = pick_logprobs(result, picked)
        return self._news.outputs(keys, counts, taken, finish, scores, self.stats(), drafted)

    def _verified(
        self, flight: Flight, result: StepResult, owned: Array | None, seconds: float
    ) -> Array | None:
        """Learn from a step of an engine that drafts, and count what it verified: int32 [L], as it is."""
        lanes, decodes = flight.lanes, len(flight.lanes.decode_row)
        counts = result.num_tokens[:decodes]
        live = counts > 0 if owned is None else (counts > 0) & owned[:decodes]
        shown = counts[:0], counts[:0]
        if flight.drafts and give_back(self._columns, lanes.decode_row, 1 + flight.drafts, counts, owned):
            # A row whose bound stood at its limit may run again.
            self._stale |= int((self._columns.phase == DECODE).sum()) > len(self._lanes)
        if flight.drafts and result.drafted is not None:
            shown = count_drafts(self._columns, self._counts, lanes.decode_row, counts, result.drafted, live)
        self._drafting.learn(decodes, flight.share, *shown, 0.0 if lanes.chunks else seconds)
        return result.drafted if flight.drafts else None

    def _finish(self, rows: Array, finish: Array) -> None:
        for place in np.flatnonzero(finish).tolist():
            failed = finish[place] == FINISH_ERROR
            # A row with bad numbers may have bad numbers in its blocks.
            entry = self._leave(int(rows[place]), keep=not failed)
            del self._entries[entry.request.key]
            self._constraints.close(entry.request.key)
            if failed:
                text = NO_LEGAL_TOKEN if entry.request.grammar else ROW_FAILED
                self._news.failed(entry.request.key, text, in_step=True)

    def drain(self, always: bool = False) -> EngineOutputs | None:
        """News that no step will bring (refused and failed requests). None without any, unless always."""
        self.fail(self.waiting.overdue(), OVERDUE)
        if not self._news and not always:
            return None
        return self._news.outputs(NO_KEYS, NO_ROWS, NO_ROWS, NO_ROWS, None, self.stats())

    # State.

    @property
    def has_work(self) -> bool:
        """Requests are live, or news waits for drain()."""
        return bool(self._entries) or bool(self._news)

    @property
    def num_running(self) -> int:
        return self._rows.num_owned_rows

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    def stats(self) -> EngineStats:
        """A snapshot; the loop adds its own numbers."""
        counts = self._counts
        return EngineStats(
            self.num_running, self.num_waiting, self._rows.pool.num_free, counts.num_blocks, counts.steps,
            len(self._flight), counts.preemptions, counts.prefix_hit_tokens, counts.prefix_query_tokens,
            drafts=counts.drafts, draft_tokens=counts.draft_tokens, accepted_tokens=counts.accepted_tokens,
            accepted_per_position=counts.accepted_per_position, draft_limit=self._drafts,
        )

    def look(self, steps: Array) -> EngineOutputs:
        """The row table for somebody who looks, with no other news. steps: EngineSnapshot's."""
        snapshot = self._columns.snapshot(steps)
        return EngineOutputs(NO_KEYS, NO_ROWS, NO_ROWS, NO_ROWS, stats=self.stats(), snapshot=snapshot)

    def check_invariants(self) -> None:
        """For tests. Raises AssertionError where a row or block is shared, leaked or counted wrongly."""
        self._rows.check()
        waiting = [entry for entry in self._entries.values() if entry.waiting]
        assert len(waiting) == len(self.waiting)
        assert len(self._entries) == len(waiting) + self.num_running, "a request is lost"
        assert sorted(self._prefills) == np.flatnonzero(self._columns.phase == PREFILL).tolist()
