"""The old runner: each step is built from request objects, run eagerly and waited for.

Legend: T tokens, L lanes, N sampling lanes, H hidden size, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from slipstream.attention.protocol import AttentionBackend
from slipstream.contracts.step import Admission, StepPlan, StepResult
from slipstream.models.base import Model
from slipstream.runner_v1.batch import Batch, Lane, build_batch, live_lanes
from slipstream.runner_v1.drafts import Computed, Proposer, verify
from slipstream.runner_v1.request import BASE_COLUMNS, LiveRequest, admit_request
from slipstream.runner_v1.sampler import Place, sample, score_prompt, spread_scores
from slipstream.sampling.pipeline import Pipeline

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """From the first launch to the end of the wait: time.perf_counter() seconds."""

    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """The handle of a step that ended before step() returned."""

    step: int
    event: DeviceTime
    result: StepResult

    def done(self) -> bool:
        return True

    def wait(self) -> StepResult:
        return self.result


class OldModelRunner:
    """Turns plans into results, one at a time. pipeline: on the CPU, whatever the model's device. chances: of
    drafts being taken, where that is left to chance."""

    def __init__(
        self,
        *,
        model: Model,
        attention: AttentionBackend,
        pipeline: Pipeline,
        block_size: int,
        vocab_size: int,
        device: torch.device,
        proposer: Proposer | None = None,
        chances: Sequence[float] = (),
    ) -> None:
        self._proposer = Proposer() if proposer is None else proposer
        self._chances = chances
        self._model, self._attention, self._pipeline = model, attention, pipeline
        self._block_size, self._vocab_size, self._device = block_size, vocab_size, device
        self._declared = {column.name: column for column in (*BASE_COLUMNS, *pipeline.columns)}
        self._requests: dict[int, LiveRequest] = {}

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> FinishedStep:
        """Runs the whole step; raises what went wrong in it."""
        for row in plan.released.tolist():
            self._proposer.release(row, self._requests.pop(row))
        self._admit(plan.admissions)
        self._grant(plan)
        for row, legal_PW in zip(plan.legal_row.tolist(), plan.legal, strict=True):
            self._requests[row].constrain(legal_PW[0])
        lanes = live_lanes(plan, self._requests)
        result = _nothing(plan)
        begin = end = time.perf_counter()
        if lanes:
            batch = build_batch(lanes, plan, self._block_size, self._device)
            begin = time.perf_counter()
            hidden_TH, aux_TX, logits_NV = self._forward(batch, lanes)
            self._score_prompts(lanes, hidden_TH, result)
            appended = self._sample(lanes, logits_NV, result)
            self._proposer.propose(Computed(lanes, batch, hidden_TH, aux_TX, appended, plan.draft_tokens))
            end = time.perf_counter()
        return FinishedStep(plan.step, DeviceTime(begin, end), result)

    def _admit(self, admissions: Sequence[Admission]) -> None:
        for admission in admissions:
            live = admit_request(admission, self._pipeline, self._declared, self._vocab_size)
            self._requests[admission.row] = live
            self._proposer.admit(admission.row, live, admission.request)

    def _grant(self, plan: StepPlan) -> None:
        grants = (plan.grant_row, plan.grant_index, plan.grant_block)
        for row, index, block in zip(*(column.tolist() for column in grants), strict=True):
            blocks = self._requests[row].blocks
            assert index == len(blocks), "blocks are granted in order"
            blocks.append(block)
        fresh = plan.fresh_blocks()
        if len(fresh):
            self._attention.clear(torch.tensor(fresh, dtype=torch.int64, device=self._device))

    def _forward(self, batch: Batch, lanes: Sequence[Lane]) -> tuple[Tensor, Tensor | None, Tensor]:
        """Hidden states [T, H] and the proposer's auxiliary ones on the device, float32 logits [N, V] on the
        CPU."""
        attend = self._attention.bind(batch.attention)
        layers = self._proposer.aux_layers
        hidden_TH, aux_TX = self._model.forward_aux(batch.token_T, batch.position_T, attend, layers)
        places = [place for lane in lanes for place in lane.places]
        logits_NV = self._logits(hidden_TH[places]) if places else torch.empty(0, self._vocab_size)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return hidden_TH, aux_TX, logits_NV

    def _logits(self, hidden_NH: Tensor) -> Tensor:
        """Copying them is the wait."""
        return self._model.logits(hidden_NH).cpu().float()

    def _score_prompts(self, lanes: Sequence[Lane], hidden_TH: Tensor, result: StepResult) -> None:
        for lane in lanes:
            scores = score_prompt(lane, hidden_TH, self._logits)
            if scores is not None:
                result.prompt_logprobs.append(scores)

    def _sample(self, lanes: Sequence[Lane], logits_NV: Tensor, result: StepResult) -> list[int]:
        """Samples, appends, ends requests, and writes down what came of it. How many tokens each lane
        gained."""
        for lane in lanes:
            lane.request.num_computed += lane.owed
        places = [Place(lane, number) for lane in lanes for number in range(len(lane.places))]
        if not places:
            return [0] * len(lanes)
        sampled = sample(logits_NV, places, self._pipeline, self._declared)
        result.logprobs = spread_scores(sampled, places, result.tokens.shape)
        gained, first = [], 0
        for lane in lanes:
            own = slice(first, first := first + len(lane.places))
            tokens = verify(lane, sampled.tokens[own], sampled.ok[own], self._chances)
            lane.request.num_computed += max(len(tokens) - 1, 0)
            result.num_tokens[lane.index] = len(tokens)
            result.tokens[lane.index, : len(tokens)] = tokens
            result.finish[lane.index] = lane.request.finish
            if result.drafted is not None:
                result.drafted[lane.index] = len(lane.drafts)
            gained.append(len(tokens))
        return gained

    def close(self) -> None:
        """Nothing is in flight, ever."""
        self._requests.clear()


def _nothing(plan: StepPlan) -> StepResult:
    """A result of no tokens, to be filled in."""
    lanes, drafts = len(plan.lane_row), plan.draft_tokens
    return StepResult(
        step=plan.step,
        lane_row=plan.lane_row,
        lane_generation=plan.lane_generation,
        num_tokens=np.zeros(lanes, np.int32),
        tokens=np.full((lanes, 1 + drafts), -1, np.int32),
        finish=np.zeros(lanes, np.int32),
        drafted=np.zeros(lanes, np.int32) if drafts else None,
    )
