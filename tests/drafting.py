"""Drives a scheduler and a runner whose rows have drafts, with a drafter given by hand."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
from harness import Collected, collect

from slipstream.config.args import EngineArgs
from slipstream.contracts.request import EngineRequest
from slipstream.engine.plan import make_plan
from slipstream.kernels.attention_common import LayerAttention
from slipstream.rows.columns import Column, RowWriter
from slipstream.runner.build import BuiltRunner, build_runner
from slipstream.scheduler import Scheduler, SchedulerConfig
from slipstream.scheduler.drafting import NoDrafting
from slipstream.speculation.protocol import Drafts, DraftStep

METHOD = {"method": "custom_class", "model": "drafting.Table"}
UNEVEN = {"method": "ngram", "model": "ngram"}  # whose rows share the step's room for drafts


class TableDrafter:
    """Drafts are read from a table of texts: column `text` says which of them a row follows. wrong: every so
    many positions another token stands there. counts: how many drafts, by position; None: as many as wanted.
    """

    name = "custom_class"
    columns: tuple[Column, ...] = (Column("text"),)
    layers: tuple[LayerAttention, ...] = ()
    aux_layers: tuple[int, ...] = ()
    num_bytes = 0

    def __init__(
        self, texts: Sequence[Sequence[int]], most: int, vocab: int, wrong: int = 0,
        counts: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        width = max(map(len, texts)) + most + 1
        self.table = torch.zeros(len(texts), width, dtype=torch.int32)
        for number, text in enumerate(texts):
            self.table[number, : len(text)] = torch.tensor(text, dtype=torch.int32)
        if wrong:
            self.table[:, ::wrong] = (self.table[:, ::wrong] + 1) % vocab
        self.most, self.counts = most, counts
        self.steps: list[int] = []

    def admit(self, request: EngineRequest, write: RowWriter) -> None:
        write.scalar("text", request.key)

    def propose(self, step: DraftStep) -> Drafts:
        self.steps.append(step.num_drafts)
        # Moved in the first trial, before a graph is captured.
        row_L = step.inputs.row_L
        self.table = table = self.table.to(row_L.device)
        draft_K = torch.arange(self.most, device=row_L.device)
        length_L = step.columns["length"][row_L].long()
        text_L = step.columns["text"][row_L].long()
        place_LK = (length_L[:, None] + draft_K).clamp(max=table.shape[1] - 1)
        count_L = torch.full_like(row_L, self.most) if self.counts is None else self.counts(length_L)
        return Drafts(table[text_L[:, None], place_LK], count_L.int())


def draft_plan(model, most: int, device: str = "cpu", **args):
    defaults = {"dtype": "float32", "max_num_seqs": 8, "max_model_len": 256, "num_gpu_blocks_override": 400}
    extra = args.pop("speculation", {})
    config = json.dumps({**METHOD, "num_speculative_tokens": most, **extra})
    return make_plan(
        EngineArgs(model=str(model), device=device, speculative_config=config, **{**defaults, **args})
    )


class Scripted(NoDrafting):
    """limit(step): drafts of a lane in each step planned."""

    def __init__(self, limit: Callable[[int], int]) -> None:
        self._limit_of, self._step = limit, 0

    def choose(self, lanes: int, tokens: int) -> int:
        self._step += 1
        return self._limit_of(self._step - 1)


class DraftEngine:
    """limit(step): drafts a lane in a step."""

    def __init__(
        self, plan, drafter, *, build: Callable[..., BuiltRunner] = build_runner,
        limit: Callable[[int], int] | None = None,
    ) -> None:
        most = plan.speculation.num_speculative_tokens
        built = build(plan, lambda *_: drafter)
        self.runner, self.depth = built.runner, plan.steps_in_flight
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=plan.max_num_seqs, max_num_batched_tokens=plan.max_num_batched_tokens,
                max_model_len=plan.max_model_len, block_size=plan.block_size,
                num_blocks=built.memory.num_blocks, tokens_per_step=1 + most,
                uneven_drafts=plan.speculation.uneven,
            ),
            Scripted(limit or (lambda step: most)),
        )
        self.results: list = []

    def run(self, requests, arrive_at=None, abort_at=None) -> dict[int, Collected]:
        arrive_at, abort_at = arrive_at or {}, dict(abort_at or {})
        waiting = sorted(requests, key=lambda r: arrive_at.get(r.key, 0))
        out = {r.key: Collected(r.params.logprobs) for r in requests}
        flight: deque = deque()
        step = 0
        while waiting or flight or self.scheduler.has_work:
            while waiting and arrive_at.get(waiting[0].key, 0) <= step:
                self.scheduler.add(waiting.pop(0))
            for key in [k for k, at in abort_at.items() if at <= step]:
                self.scheduler.abort([key])
                del abort_at[key]
            while len(flight) < self.depth and (plan := self.scheduler.schedule()) is not None:
                flight.append(self.runner.step(plan))
            if flight:
                result = flight.popleft().wait()
                self.results.append(result)
                collect(self.scheduler.apply(result), out)
            else:
                collect(self.scheduler.drain(), out)
            step += 1
            assert step < 20_000
        self.scheduler.check_invariants()
        return out

    def close(self) -> None:
        self.runner.close()

    def verified_and_taken(self) -> tuple[int, int]:
        """Drafts, of all steps so far."""
        results = [r for r in self.results if r.drafted is not None]
        taken = [np.maximum(r.num_tokens[r.drafted > 0] - 1, 0).sum() for r in results]
        return sum(int(r.drafted.sum()) for r in results), int(sum(taken))
