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
from slipstream.runner_v1.request import BASE_COLUMNS, LiveRequest, admit_request
from slipstream.runner_v1.sampler import sample, score_prompt, spread_scores
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
    """Turns plans into results, one at a time. pipeline: on the CPU, whatever the model's device."""

    def __init__(
        self,
        *,
        model: Model,
        attention: AttentionBackend,
        pipeline: Pipeline,
        block_size: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._model, self._attention, self._pipeline = model, attention, pipeline
        self._block_size, self._vocab_size, self._device = block_size, vocab_size, device
        self._declared = {column.name: column for column in (*BASE_COLUMNS, *pipeline.columns)}
        self._requests: dict[int, LiveRequest] = {}

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> FinishedStep:
        """Runs the whole step; raises what went wrong in it."""
        for row in plan.released.tolist():
            del self._requests[row]
        self._admit(plan.admissions)
        self._grant(plan)
        lanes = live_lanes(plan, self._requests)
        result = _nothing(plan)
        begin = end = time.perf_counter()
        if lanes:
            num_decode_lanes = sum(lane.index < plan.num_decode_lanes for lane in lanes)
            batch = build_batch(lanes, num_decode_lanes, self._block_size, self._device)
            begin = time.perf_counter()
            hidden_TH, logits_NV = self._forward(batch, lanes)
            end = time.perf_counter()
            self._score_prompts(lanes, hidden_TH, result)
            self._sample(lanes, logits_NV, result)
        return FinishedStep(plan.step, DeviceTime(begin, end), result)

    def _admit(self, admissions: Sequence[Admission]) -> None:
        for admission in admissions:
            self._requests[admission.row] = admit_request(
                admission, self._pipeline, self._declared, self._vocab_size
            )

    def _grant(self, plan: StepPlan) -> None:
        grants = (plan.grant_row, plan.grant_index, plan.grant_block)
        for row, index, block in zip(*(column.tolist() for column in grants), strict=True):
            blocks = self._requests[row].blocks
            assert index == len(blocks), "blocks are granted in order"
            blocks.append(block)
        fresh = plan.fresh_blocks()
        if len(fresh):
            self._attention.clear(torch.tensor(fresh, dtype=torch.int64, device=self._device))

    def _forward(self, batch: Batch, lanes: Sequence[Lane]) -> tuple[Tensor, Tensor]:
        """Hidden states [T, H] on the device, and float32 logits [N, V] on the CPU."""
        attend = self._attention.bind(batch.attention)
        hidden_TH = self._model.forward(batch.token_T, batch.position_T, attend)
        last = [lane.last_token for lane in lanes if lane.samples]
        logits_NV = self._logits(hidden_TH[last]) if last else torch.empty(0, self._vocab_size)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return hidden_TH, logits_NV

    def _logits(self, hidden_NH: Tensor) -> Tensor:
        """Copying them is the wait."""
        return self._model.logits(hidden_NH).cpu().float()

    def _score_prompts(self, lanes: Sequence[Lane], hidden_TH: Tensor, result: StepResult) -> None:
        for lane in lanes:
            scores = score_prompt(lane, hidden_TH, self._logits)
            if scores is not None:
                result.prompt_logprobs.append(scores)

    def _sample(self, lanes: Sequence[Lane], logits_NV: Tensor, result: StepResult) -> None:
        """Samples, appends, ends requests, and writes down what came of it."""
        for lane in lanes:
            lane.request.num_computed += lane.query_len
        sampling = [lane for lane in lanes if lane.samples]
        if not sampling:
            return
        requests = [lane.request for lane in sampling]
        sampled = sample(logits_NV, requests, self._pipeline, self._declared)
        result.logprobs = spread_scores(sampled, sampling, len(result.lane_row))
        for lane, token, ok in zip(sampling, sampled.tokens, sampled.ok, strict=True):
            if lane.request.append(token, ok):
                result.num_tokens[lane.index], result.tokens[lane.index, 0] = 1, token
            result.finish[lane.index] = lane.request.finish

    def close(self) -> None:
        """Nothing is in flight, ever."""
        self._requests.clear()


def _nothing(plan: StepPlan) -> StepResult:
    """A result of no tokens, to be filled in."""
    lanes = len(plan.lane_row)
    return StepResult(
        step=plan.step,
        lane_row=plan.lane_row,
        lane_generation=plan.lane_generation,
        num_tokens=np.zeros(lanes, np.int32),
        tokens=np.full((lanes, 1), -1, np.int32),
        finish=np.zeros(lanes, np.int32),
    )
