"""Commit: sampled tokens go into their rows, lengths advance, rows that end die. All on the device.

Legend: N sampling lanes, L lanes, R rows, M max_model_len, E end ids a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.kernels.backend import (
    FEW_LANES,
    Arg,
    ceil_div,
    jit,
    jit_with,
    next_power_of_2,
    pdl_begin,
    pdl_options,
    tl,
    use_triton,
)
from slipstream.kernels.step_inputs import StepInputs

Tensor = torch.Tensor

LANES_AT_ONCE = 32

# The numbers of contracts.step.Finish, which a kernel may not import (a test compares them).
FINISH_NONE, FINISH_STOP, FINISH_LENGTH, FINISH_ERROR = 0, 1, 2, 3
STOP, LENGTH, ERROR = tl.constexpr(FINISH_STOP), tl.constexpr(FINISH_LENGTH), tl.constexpr(FINISH_ERROR)


@dataclass(slots=True)
class CommitRecord:
    """What the host will read: int32 [L] each. token is -1 where no token was appended."""

    count_L: Tensor
    finish_L: Tensor
    token_L: Tensor


@dataclass(frozen=True, slots=True)
class CommitRing:
    """Records that a captured step writes in turn, for the host to read later: memory_S3L, int32, may be
    pinned host memory. turn_2: int32 on the device, the next record's place and a count of programs; zero at
    first."""

    memory_S3L: Tensor
    turn_2: Tensor


def commit_step(
    inputs: StepInputs,
    sample_to_lane_N: Tensor,
    token_N: Tensor,
    ok_N: Tensor,
    *,
    tokens_RM: Tensor,
    length_R: Tensor,
    num_computed_R: Tensor,
    max_len_R: Tensor,
    end_ids_RE: Tensor,
    alive_R: Tensor,
    record: CommitRecord | CommitRing,
) -> None:
    """token_N: int32; ok_N: bool, False where no token could be chosen; sample_to_lane_N: int64, only dead
    lanes more than once. record: where to write; a ring only on CUDA.

    A lane appends its token where it is alive and every token of its row has been computed. The row ends at
    an end token, at max_len, or where ok is False. The last row is the padding row: what is written there
    means nothing.
    """
    if token_N.shape != sample_to_lane_N.shape or ok_N.shape != token_N.shape:
        raise ValueError("token, ok and sample_to_lane must be [N]")
    if not (sample_to_lane_N.is_contiguous() and token_N.is_contiguous() and ok_N.is_contiguous()):
        raise ValueError("token, ok and sample_to_lane must be contiguous")
    lanes = inputs.row_L.shape[0]
    columns = (tokens_RM, length_R, num_computed_R, max_len_R, end_ids_RE, alive_R)
    if not use_triton(tokens_RM):
        assert isinstance(record, CommitRecord)
        commit_step_reference(inputs, sample_to_lane_N, token_N, ok_N, *columns, record)
        return
    if isinstance(record, CommitRing):
        lines, turn, slots = CommitRecord(*record.memory_S3L[0]), record.turn_2, len(record.memory_S3L)
    else:
        lines, turn, slots = record, alive_R, 1
    _commit_kernel[(ceil_div(lanes, LANES_AT_ONCE),)](
        inputs.row_L, inputs.end_L, inputs.alive_L, sample_to_lane_N, token_N, ok_N, *columns,
        lines.count_L, lines.finish_L, lines.token_L, turn, lanes, sample_to_lane_N.shape[0],
        *(column.stride(0) for column in columns), 3 * lines.count_L.shape[0],
        SAMPLES=max(FEW_LANES, next_power_of_2(sample_to_lane_N.shape[0])),
        ENDS=end_ids_RE.shape[1], ENDS_PAD=next_power_of_2(end_ids_RE.shape[1]), LANES=LANES_AT_ONCE,
        SLOTS=slots, **pdl_options(tokens_RM), num_warps=4,
    )


def commit_step_reference(
    inputs: StepInputs,
    sample_to_lane_N: Tensor,
    token_N: Tensor,
    ok_N: Tensor,
    tokens_RM: Tensor,
    length_R: Tensor,
    num_computed_R: Tensor,
    max_len_R: Tensor,
    end_ids_RE: Tensor,
    alive_R: Tensor,
    record: CommitRecord,
) -> None:
    """The same in torch operations."""
    row_N, alive_N = inputs.row_L[sample_to_lane_N], inputs.alive_L[sample_to_lane_N]
    length_N, max_len_N = length_R[row_N], max_len_R[row_N]
    ready_N = alive_N & (inputs.end_L[sample_to_lane_N] == length_N)
    append_N = ready_N & ok_N & (length_N < max_len_N)
    padding = tokens_RM.shape[0] - 1
    position_N = (length_N * append_N).long()
    tokens_RM[torch.where(append_N, row_N, padding), position_N] = token_N
    new_length_N = length_N + append_N.int()
    ends_N = append_N & (token_N.unsqueeze(1) == end_ids_RE[row_N]).any(1)
    full_N = ready_N & (new_length_N >= max_len_N)
    finish_N = full_N.int() * FINISH_LENGTH
    finish_N = torch.where(ready_N & ~ok_N & (length_N < max_len_N), FINISH_ERROR, finish_N)
    finish_N = torch.where(ends_N, FINISH_STOP, finish_N)
    length_R[row_N] = new_length_N
    num_computed_R[inputs.row_L] = torch.where(inputs.alive_L, inputs.end_L, num_computed_R[inputs.row_L])
    alive_R[row_N] = (alive_N & (finish_N == FINISH_NONE)).int()
    record.count_L.zero_()[sample_to_lane_N] = append_N.int()
    record.finish_L.zero_()[sample_to_lane_N] = finish_N.int()
    record.token_L.fill_(-1)[sample_to_lane_N] = torch.where(append_N, token_N, -1)


@jit_with(
    do_not_specialize=("lanes", "samples", "slot_stride"),
    do_not_specialize_on_alignment=("count_out", "finish_out", "token_out"),
)
def _commit_kernel(
    row_in: Arg, end_in: Arg, alive_in: Arg, sample_to_lane: Arg, token_in: Arg, ok_in: Arg,
    tokens: Arg, length: Arg, num_computed: Arg, max_len: Arg, end_ids: Arg, alive: Arg,
    count_out: Arg, finish_out: Arg, token_out: Arg, turn: Arg, lanes: Arg, samples: Arg,
    tokens_stride: Arg, length_stride: Arg, computed_stride: Arg, max_stride: Arg, ends_stride: Arg,
    alive_stride: Arg, slot_stride: Arg,
    SAMPLES: tl.constexpr, ENDS: tl.constexpr, ENDS_PAD: tl.constexpr, LANES: tl.constexpr,
    SLOTS: tl.constexpr, PDL: tl.constexpr,
) -> None:
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    in_lanes = lane < lanes
    place = tl.arange(0, SAMPLES)
    pdl_begin(PDL)
    row = tl.load(row_in + lane, mask=in_lanes, other=0)
    end = tl.load(end_in + lane, mask=in_lanes, other=0)
    lives = in_lanes & (tl.load(alive_in + lane, mask=in_lanes, other=0) != 0)
    named = tl.load(sample_to_lane + place, mask=place < samples, other=-1)
    sample = tl.max(tl.where(named[None, :] == lane[:, None], place[None, :], -1), 1)
    is_sample = in_lanes & (sample >= 0)
    token = tl.load(token_in + sample, mask=is_sample, other=-1)
    ok = tl.load(ok_in + sample, mask=is_sample, other=0) != 0
    old = tl.load(length + row * length_stride, mask=in_lanes, other=0)
    most = tl.load(max_len + row * max_stride, mask=in_lanes, other=0)
    ready = is_sample & lives & (end == old)
    has_room = ready & (old < most)
    append = has_room & ok
    column = tl.arange(0, ENDS_PAD)[None, :]
    end_id = tl.load(
        end_ids + (row * ends_stride)[:, None] + column, mask=append[:, None] & (column < ENDS), other=-1
    )
    stops = append & (tl.max((end_id == token[:, None]).to(tl.int32), 1) > 0)
    new = old + append.to(tl.int32)
    finish = tl.where(ready & (new >= most), LENGTH, 0)
    finish = tl.where(has_room & (ok == 0), ERROR, finish)
    finish = tl.where(stops, STOP, finish)
    tl.store(tokens + row * tokens_stride + old, token, mask=append)
    tl.store(length + row * length_stride, new, mask=append)
    tl.store(num_computed + row * computed_stride, end, mask=lives)
    tl.store(alive + row * alive_stride, (lives & (finish == 0)).to(tl.int32), mask=is_sample)
    to = lane
    if SLOTS > 1:
        slot = tl.load(turn)
        to += slot * slot_stride
    tl.store(count_out + to, append.to(tl.int32), mask=in_lanes)
    tl.store(finish_out + to, finish, mask=in_lanes)
    tl.store(token_out + to, tl.where(append, token, -1), mask=in_lanes)
    if SLOTS > 1:
        take_turn(turn, slot, SLOTS)


@jit
def take_turn(turn: Arg, slot: Arg, SLOTS: tl.constexpr) -> None:
    """A ring's next record is due once every program of this launch has written its part of this one."""
    # Every thread of every program has read the turn when the last program counts itself.
    tl.debug_barrier()
    if tl.atomic_add(turn + 1, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(turn + 1, 0)
        tl.store(turn, (slot + 1) % SLOTS)
