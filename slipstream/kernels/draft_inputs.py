"""Input build of a step that verifies drafts: each lane computes what it owes and, where that reaches the end
of its row, the drafts that stand there.

A step has a fixed count of tokens. What lanes owe comes first of all; drafts fill the rest as far as they go:
first drafts of all lanes, then second ones, and so on, so that a lane with many uses what others leave.

Legend: T tokens, L lanes, N sampled positions, R rows, B blocks a row, M max_model_len.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

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
from slipstream.kernels.step_inputs import StepInputs, build_step_inputs_reference

Tensor = torch.Tensor

PLACES_AT_ONCE = 32
LEVEL_STEPS = (16, 8, 4, 2, 1)  # any number of drafts is a sum of some


@dataclass(slots=True)
class DraftInputs(StepInputs):
    """length_L and query_start_L1 count drafts, end_L does not.

    num_draft_L: int32 [L], drafts that each lane verifies. sample_start_L1: int32 [L + 1]; lane l samples at
    places sample_start[l] .. sample_start[l] + num_draft[l] of N, in order. sample_token_N: int64, the token
    of the step whose hidden state they are sampled from. sample_row_N: int64. sample_length_N: int32, tokens
    in the row before the sampled one. Places nobody needs: token 0 for the padding row, at length 0.
    """

    num_draft_L: Tensor
    sample_start_L1: Tensor
    sample_token_N: Tensor
    sample_row_N: Tensor
    sample_length_N: Tensor


@dataclass(frozen=True, slots=True)
class DraftColumns:
    """What the inputs read of rows. Scalar columns [R] have one stride; the last row is the padding row."""

    tokens_RM: Tensor
    blocks_RB: Tensor
    alive_R: Tensor
    length_R: Tensor
    num_computed_R: Tensor
    draft_count_R: Tensor

    def check(self) -> None:
        """Raises ValueError for columns of different strides."""
        scalars = (self.alive_R, self.length_R, self.num_computed_R, self.draft_count_R)
        if len({each.stride(0) for each in scalars}) != 1:
            raise ValueError("the scalar columns of a row must have one stride")


def build_draft_inputs(
    lane_to_row_L: Tensor,
    query_len_L: Tensor,
    limits_2: Tensor,
    num_tokens: int,
    num_samples: int,
    columns: DraftColumns,
    block_size: int,
) -> DraftInputs:
    """All int32. query_len: tokens without drafts; limits: drafts of a lane, and of all together, at most.
    Drafts never exceed what num_tokens and num_samples (at least one a lane) leave room for."""
    lanes = lane_to_row_L.shape[0]
    if query_len_L.shape != (lanes,) or limits_2.shape != (2,) or num_samples < lanes:
        raise ValueError("lane_to_row and query_len must be [L], limits [2], and every lane needs a sample")
    if not (lane_to_row_L.is_contiguous() and query_len_L.is_contiguous() and limits_2.is_contiguous()):
        raise ValueError("lane_to_row, query_len and limits must be contiguous")
    columns.check()
    build = _launch if use_triton(columns.tokens_RM) else build_draft_inputs_reference
    return build(lane_to_row_L, query_len_L, limits_2, num_tokens, num_samples, columns, block_size)


def wanted_drafts(
    lane_to_row_L: Tensor, query_len_L: Tensor, limits_2: Tensor, columns: DraftColumns
) -> Tensor:
    """int32 [L]: drafts each lane would verify if there were room, in torch operations."""
    row_L = lane_to_row_L.long()
    ends_L = columns.num_computed_R[row_L] + query_len_L == columns.length_R[row_L]
    ready_L = ends_L & (columns.alive_R[row_L] != 0)
    return torch.minimum(columns.draft_count_R[row_L], limits_2[0]).clamp_(min=0) * ready_L


def build_draft_inputs_reference(
    lane_to_row_L: Tensor,
    query_len_L: Tensor,
    limits_2: Tensor,
    num_tokens: int,
    num_samples: int,
    columns: DraftColumns,
    block_size: int,
) -> DraftInputs:
    """The same in torch operations."""
    lanes, device = lane_to_row_L.shape[0], lane_to_row_L.device
    wanted_L = wanted_drafts(lane_to_row_L, query_len_L, limits_2, columns)
    room = (num_tokens - query_len_L.sum()).clamp(max=num_samples - lanes).minimum(limits_2[1])
    num_draft_L = allot_reference(wanted_L, room.clamp(min=0)).int()
    inputs = build_step_inputs_reference(
        lane_to_row_L, query_len_L + num_draft_L, num_tokens, columns.tokens_RM, columns.num_computed_R,
        columns.alive_R, columns.blocks_RB, block_size, False,
    )
    inputs.end_L = inputs.end_L - num_draft_L
    start_L1 = torch.zeros(lanes + 1, dtype=torch.int32, device=device)
    torch.cumsum(1 + num_draft_L, 0, dtype=torch.int32, out=start_L1[1:])
    place_N = torch.arange(num_samples, device=device)
    lane_N = torch.searchsorted(start_L1[1:], place_N, right=True)
    real_N, lane_N = lane_N < lanes, lane_N.clamp_(max=lanes - 1)
    draft_N = place_N - start_L1[lane_N]
    token_N = ((inputs.query_start_L1[:-1] + query_len_L - 1)[lane_N] + draft_N) * real_N
    row_N = torch.where(real_N, inputs.row_L[lane_N], columns.tokens_RM.shape[0] - 1)
    length_L = torch.where(inputs.alive_L, inputs.end_L, 1)
    length_N = ((length_L[lane_N] + draft_N) * real_N).int()
    held = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    return DraftInputs(**held, num_draft_L=num_draft_L, sample_start_L1=start_L1, sample_token_N=token_N,
                       sample_row_N=row_N, sample_length_N=length_N)


def allot_reference(wanted_L: Tensor, room: Tensor) -> Tensor:
    """As many of the wanted drafts as there is room for: up to a level that all fit into, and one more for
    the first lanes that want it."""
    level = torch.zeros_like(room)
    for step in LEVEL_STEPS:
        fits = torch.minimum(wanted_L, level + step).sum() <= room
        level = level + step * fits
    below_L = torch.minimum(wanted_L, level)
    more_L = (wanted_L > level).to(wanted_L.dtype)
    return below_L + more_L * (more_L.cumsum(0) <= room - below_L.sum())


def _launch(
    lane_to_row_L: Tensor,
    query_len_L: Tensor,
    limits_2: Tensor,
    num_tokens: int,
    num_samples: int,
    columns: DraftColumns,
    block_size: int,
) -> DraftInputs:
    lanes, device = lane_to_row_L.shape[0], lane_to_row_L.device

    def new(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    long = torch.int64
    out = DraftInputs(
        token_T=new(num_tokens, long), position_T=new(num_tokens, long), slot_T=new(num_tokens, long),
        query_start_L1=new(lanes + 1), length_L=new(lanes), row_L=new(lanes, long), end_L=new(lanes),
        alive_L=new(lanes, torch.bool), num_draft_L=new(lanes), sample_start_L1=new(lanes + 1),
        sample_token_N=new(num_samples, long), sample_row_N=new(num_samples, long),
        sample_length_N=new(num_samples),
    )
    places = max(num_tokens, num_samples)
    _inputs_kernel[(ceil_div(places, PLACES_AT_ONCE),)](
        lane_to_row_L, query_len_L, limits_2, columns.tokens_RM, columns.blocks_RB, columns.alive_R,
        columns.length_R, columns.num_computed_R, columns.draft_count_R,
        *(getattr(out, field.name) for field in fields(out)),
        lanes, num_tokens, num_samples, columns.tokens_RM.shape[0] - 1, columns.alive_R.stride(0),
        columns.tokens_RM.stride(0), columns.blocks_RB.stride(0),
        BLOCK_SIZE=block_size, LANES=max(FEW_LANES, next_power_of_2(lanes)), PLACES=PLACES_AT_ONCE,
        **pdl_options(lane_to_row_L), num_warps=4,
    )  # fmt: skip
    return out


@jit_with(
    do_not_specialize=("lanes", "num_tokens", "num_samples", "padding_row", "blocks_stride"),
    do_not_specialize_on_alignment=("limits",),
)
def _inputs_kernel(
    lane_to_row: Arg, query_len: Arg, limits: Arg, tokens: Arg, blocks: Arg, alive: Arg, lengths: Arg,
    num_computed: Arg, draft_count: Arg, token_out: Arg, position_out: Arg, slot_out: Arg,
    query_start_out: Arg, length_out: Arg, row_out: Arg, end_out: Arg, alive_out: Arg, drafts_out: Arg,
    sample_start_out: Arg, sample_token_out: Arg, sample_row_out: Arg, sample_length_out: Arg,
    lanes: Arg, num_tokens: Arg, num_samples: Arg, padding_row: Arg, row_stride: Arg, tokens_stride: Arg,
    blocks_stride: Arg,
    BLOCK_SIZE: tl.constexpr, LANES: tl.constexpr, PLACES: tl.constexpr, PDL: tl.constexpr,
) -> None:
    """Every program allots the drafts of all lanes for itself."""
    lane = tl.arange(0, LANES)
    in_lanes = lane < lanes
    pdl_begin(PDL)
    base = tl.load(query_len + lane, mask=in_lanes, other=0)
    row = tl.load(lane_to_row + lane, mask=in_lanes, other=0).to(tl.int64)
    lives = tl.load(alive + row * row_stride, mask=in_lanes, other=0) != 0
    end = tl.load(num_computed + row * row_stride, mask=in_lanes, other=0) + base
    ready = lives & (end == tl.load(lengths + row * row_stride, mask=in_lanes, other=-1))
    wanted = tl.load(draft_count + row * row_stride, mask=ready, other=0)
    wanted = tl.maximum(tl.minimum(wanted, tl.load(limits)), 0)
    room = tl.minimum(tl.minimum(num_tokens - tl.sum(base, 0), num_samples - lanes), tl.load(limits + 1))
    drafts = _allot(wanted, tl.maximum(room, 0))
    count, samples = base + drafts, tl.where(in_lanes, 1 + drafts, 0)
    ends, sample_ends = tl.cumsum(count, 0), tl.cumsum(samples, 0)
    length = tl.where(lives, end, 1)
    if tl.program_id(0) == 0:
        tl.store(query_start_out, 0)
        tl.store(query_start_out + 1 + lane, ends, mask=in_lanes)
        tl.store(sample_start_out, 0)
        tl.store(sample_start_out + 1 + lane, sample_ends, mask=in_lanes)
        tl.store(length_out + lane, tl.where(lives, end + drafts, 1), mask=in_lanes)
        tl.store(row_out + lane, row, mask=in_lanes)
        tl.store(end_out + lane, end, mask=in_lanes)
        tl.store(alive_out + lane, lives, mask=in_lanes)
        tl.store(drafts_out + lane, drafts, mask=in_lanes)
    place = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    # As in step_inputs.
    before = (ends[None, :] <= place[:, None]) & in_lanes[None, :]
    token_lane = tl.sum(before.to(tl.int32), 1)
    real = token_lane < lanes
    token_row = tl.load(lane_to_row + token_lane, mask=real, other=0).to(tl.int64)
    token_lives = tl.load(alive + token_row * row_stride, mask=real, other=0) != 0
    start = tl.load(num_computed + token_row * row_stride, mask=real, other=0)
    position = tl.where(token_lives, start + place - tl.sum(tl.where(before, count[None, :], 0), 1), 0)
    at = blocks + token_row * blocks_stride + position // BLOCK_SIZE
    block = tl.load(at, mask=token_lives, other=0).to(tl.int64)
    slot = tl.where(token_lives, block * BLOCK_SIZE + position % BLOCK_SIZE, 0)
    value = tl.load(tokens + token_row * tokens_stride + position, mask=real, other=0)
    inside = place < num_tokens
    tl.store(token_out + place, value.to(tl.int64), mask=inside)
    tl.store(position_out + place, position.to(tl.int64), mask=inside)
    tl.store(slot_out + place, slot, mask=inside)
    _store_samples(
        place, sample_ends, samples, ends - count + base - 1, length, lane_to_row, sample_token_out,
        sample_row_out, sample_length_out, lanes, num_samples, padding_row, LANES,
    )


@jit
def _allot(wanted: Arg, room: Arg) -> Arg:
    """See allot_reference."""
    drafts = wanted
    if tl.sum(wanted, 0) > room:
        level = room * 0
        for bit in tl.static_range(5):
            higher = level + (16 >> bit)
            level = tl.where(tl.sum(tl.minimum(wanted, higher), 0) <= room, higher, level)
        below = tl.minimum(wanted, level)
        more = (wanted > level).to(tl.int32)
        left = room - tl.sum(below, 0)
        drafts = below + tl.where(tl.cumsum(more, 0) <= left, more, 0)
    return drafts


@jit
def _store_samples(
    place: Arg, sample_ends: Arg, samples: Arg, first: Arg, length: Arg, lane_to_row: Arg, token_out: Arg,
    row_out: Arg, length_out: Arg, lanes: Arg, num_samples: Arg, padding_row: Arg, LANES: tl.constexpr,
) -> None:
    """What is sampled at some places of N. samples, first, length: of all lanes, how many each has, from
    which token on and at which length."""
    lane = tl.arange(0, LANES)[None, :]
    before = (sample_ends[None, :] <= place[:, None]) & (lane < lanes)
    own_lane = tl.sum(before.to(tl.int32), 1)
    real, inside = own_lane < lanes, place < num_samples
    own = lane == own_lane[:, None]
    draft = place - tl.sum(tl.where(before, samples[None, :], 0), 1)
    token = tl.sum(tl.where(own, first[None, :], 0), 1) + draft
    row = tl.load(lane_to_row + own_lane, mask=real, other=0)
    own_length = tl.sum(tl.where(own, length[None, :], 0), 1) + draft
    tl.store(token_out + place, tl.where(real, token, 0).to(tl.int64), mask=inside)
    tl.store(row_out + place, tl.where(real, row, padding_row).to(tl.int64), mask=inside)
    tl.store(length_out + place, tl.where(real, own_length, 0), mask=inside)
