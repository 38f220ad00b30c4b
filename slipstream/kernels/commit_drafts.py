"""Commit of a step that verifies drafts: each lane keeps its drafts for as long as the sampler agrees, then
takes the sampler's own token. All on the device.

Every position was sampled as an ordinary step would have sampled it, so a draft is right where it equals the
token sampled in its place; the first that differs is replaced by that token, and after the last comes one
more. With `accept`, drafts are taken by chance instead: for measuring with weights that mean nothing.

Legend: N sampled positions, L lanes, Q tokens a lane may gain (1 + drafts), R rows, M max_model_len, E end
ids a row, S records of a ring, X = 3 + Q lines of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from slipstream.kernels.backend import (
    Arg,
    jit,
    jit_with,
    next_power_of_2,
    pdl_begin,
    pdl_options,
    tl,
    use_triton,
)
from slipstream.kernels.commit import (
    ERROR,
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_NONE,
    FINISH_STOP,
    LENGTH,
    STOP,
    CommitRing,
    take_turn,
)
from slipstream.kernels.draft_inputs import DraftInputs
from slipstream.kernels.noise import PURPOSE_ACCEPT, lane_key, lane_keys

Tensor = torch.Tensor

# Chances are compared with the top bits of a hash, as integers: the same on every device.
CHANCE_BITS = 24


@dataclass(frozen=True, slots=True)
class CommitColumns:
    """Columns that commit reads and writes. Scalars [R] have one stride; the last row is the padding row:
    what is written there means nothing."""

    tokens_RM: Tensor
    end_ids_RE: Tensor
    alive_R: Tensor
    length_R: Tensor
    num_computed_R: Tensor
    max_len_R: Tensor
    draft_count_R: Tensor
    seed_lo_R: Tensor
    seed_hi_R: Tensor

    def scalars(self) -> tuple[Tensor, ...]:
        """In the order in which kernels take them."""
        return (self.alive_R, self.length_R, self.num_computed_R, self.max_len_R, self.draft_count_R,
                self.seed_lo_R, self.seed_hi_R)


@dataclass(frozen=True, slots=True)
class Appended:
    """What lanes gained, for a drafter: appended_L, int32; source_L, int64, the token of the step whose
    hidden state gave the newest token (of lanes that gained none, any of theirs)."""

    appended_L: Tensor
    source_L: Tensor


def chances(probabilities: Tensor) -> Tensor:
    """accept of commit_drafts: int32, of float64 probabilities [Q - 1] that a draft is taken where all before
    it were."""
    return (probabilities.double() * (1 << CHANCE_BITS)).round().int()


def commit_drafts(
    inputs: DraftInputs,
    token_N: Tensor,
    ok_N: Tensor,
    columns: CommitColumns,
    record: Tensor | CommitRing,
    out: Appended,
    accept: Tensor | None = None,
) -> None:
    """token_N: int32; ok_N: bool, False where no token could be chosen. record: int32 [X, L], lines of tokens
    gained, finish codes, drafts verified, then tokens, of which the first gained mean something; or a ring of
    such, [S, X, L], only on CUDA. out is written.

    A lane gains tokens where it is alive and every token of its row has been computed. It ends at an end
    token, at max_len, or where ok is False for the very first; where it is for a later one, the step stops
    before it, and the next will find it first. The row's drafts are used up.
    """
    lines = record.memory_S3L[0] if isinstance(record, CommitRing) else record
    queries, positions = lines.shape[0] - 3, inputs.sample_token_N.shape
    if queries < 1 or token_N.shape != positions or ok_N.shape != positions:
        raise ValueError("token and ok must be [N], and a record has 3 + Q lines")
    if len({each.stride(0) for each in columns.scalars()}) != 1 or lines.stride(1) != 1:
        raise ValueError("scalar columns must have one stride, and a record's line no gaps")
    if accept is not None and (accept.shape != (queries - 1,) or accept.dtype != torch.int32):
        raise ValueError(f"accept must be int32 [{queries - 1}]")
    if not use_triton(columns.tokens_RM):
        assert isinstance(record, Tensor)
        commit_drafts_reference(inputs, token_N, ok_N, columns, record, out, accept)
        return
    ring = isinstance(record, CommitRing)
    turn = record.turn_2 if isinstance(record, CommitRing) else columns.alive_R
    ends = columns.end_ids_RE.shape[1]
    _commit_kernel[(inputs.row_L.shape[0],)](
        inputs.row_L, inputs.end_L, inputs.alive_L, inputs.num_draft_L, inputs.sample_start_L1,
        inputs.sample_token_N, token_N, ok_N, columns.tokens_RM, columns.end_ids_RE, *columns.scalars(),
        out.appended_L, out.source_L, lines, turn, turn if accept is None else accept,
        columns.tokens_RM.stride(0), columns.end_ids_RE.stride(0), columns.alive_R.stride(0),
        lines.stride(0), lines.shape[0] * lines.stride(0),
        QUERIES=queries, PAD=next_power_of_2(queries), ENDS=ends, ENDS_PAD=next_power_of_2(ends),
        SLOTS=record.memory_S3L.shape[0] if isinstance(record, CommitRing) else 1, RING=ring,
        BY_CHANCE=accept is not None, PURPOSE=PURPOSE_ACCEPT, BITS=CHANCE_BITS,
        **pdl_options(token_N), num_warps=4,
    )  # fmt: skip


def commit_drafts_reference(
    inputs: DraftInputs,
    token_N: Tensor,
    ok_N: Tensor,
    columns: CommitColumns,
    record_XL: Tensor,
    out: Appended,
    accept: Tensor | None,
) -> None:
    """The same in torch operations."""
    row_L, tokens_RM = inputs.row_L, columns.tokens_RM
    old_L, most_L = columns.length_R[row_L], columns.max_len_R[row_L]
    draft_Q = torch.arange(record_XL.shape[0] - 3, dtype=torch.int32, device=row_L.device)
    place_LQ = (inputs.sample_start_L1[:-1, None] + draft_Q).clamp_(max=len(token_N) - 1)
    sampled_LQ, ok_LQ = token_N[place_LQ], ok_N[place_LQ]
    position_LQ = old_L[:, None] + draft_Q
    guess_LQ = tokens_RM[row_L[:, None], position_LQ.clamp(max=tokens_RM.shape[1] - 1)]
    agrees_LQ = sampled_LQ == guess_LQ if accept is None else _taken(columns, row_L, position_LQ, accept)
    agrees_LQ = agrees_LQ & (draft_Q < inputs.num_draft_L[:, None])
    value_LQ = torch.where(agrees_LQ, guess_LQ, sampled_LQ)
    ends_LQ = (value_LQ[:, :, None] == columns.end_ids_RE[row_L][:, None]).any(2)
    goes_on_LQ = agrees_LQ & ok_LQ & ~ends_LQ & (position_LQ + 1 < most_L[:, None])
    last_L1 = goes_on_LQ.int().cumprod(1).sum(1, keepdim=True)
    ok_L, ends_L = ok_LQ.gather(1, last_L1)[:, 0], ends_LQ.gather(1, last_L1)[:, 0]
    last_L = last_L1[:, 0].int()
    ready_L = inputs.alive_L & (inputs.end_L == old_L)
    has_room_L = ready_L & (old_L + last_L < most_L)
    append_L = has_room_L & ok_L
    gained_L = last_L * ready_L + append_L.int()
    new_L = old_L + gained_L
    finish_L = (ready_L & (new_L >= most_L)).int() * FINISH_LENGTH
    finish_L = torch.where(has_room_L & ~ok_L & (last_L == 0), FINISH_ERROR, finish_L)
    finish_L = torch.where(append_L & ends_L, FINISH_STOP, finish_L).int()
    to_L = torch.where(append_L, row_L, tokens_RM.shape[0] - 1)
    tokens_RM[to_L, ((old_L + last_L) * append_L).long()] = value_LQ.gather(1, last_L1)[:, 0]
    columns.length_R[row_L] = new_L
    computed_L = torch.where(gained_L > 0, new_L - 1, inputs.end_L)
    columns.num_computed_R[row_L] = torch.where(inputs.alive_L, computed_L, columns.num_computed_R[row_L])
    columns.alive_R[row_L] = (inputs.alive_L & (finish_L == FINISH_NONE)).int()
    columns.draft_count_R[row_L] = 0
    record_XL[0], record_XL[1], record_XL[2] = gained_L, finish_L, inputs.num_draft_L
    record_XL[3:] = value_LQ.T
    out.appended_L.copy_(gained_L)
    newest_L = inputs.sample_start_L1[:-1] + (gained_L - 1).clamp(min=0)
    out.source_L.copy_(inputs.sample_token_N[newest_L])


def _taken(columns: CommitColumns, row_L: Tensor, position_LQ: Tensor, accept: Tensor) -> Tensor:
    """bool [L, Q]: by chance; the last is no draft."""
    seeds = (columns.seed_lo_R, columns.seed_hi_R)
    lo_LQ, hi_LQ = (seed_R[row_L, None].expand_as(position_LQ) for seed_R in seeds)
    key_n = lane_keys(lo_LQ.flatten(), hi_LQ.flatten(), position_LQ.flatten(), PURPOSE_ACCEPT)[0]
    top_LQ = (key_n.view_as(position_LQ) >> (32 - CHANCE_BITS)) & ((1 << CHANCE_BITS) - 1)
    return top_LQ < torch.nn.functional.pad(accept, (0, 1))


@jit_with(
    do_not_specialize=("line_stride", "slot_stride"),
    do_not_specialize_on_alignment=("record", "accept", "appended_out", "source_out"),
)
def _commit_kernel(
    row_in: Arg, end_in: Arg, alive_in: Arg, drafts_in: Arg, start_in: Arg, sample_token: Arg, token_in: Arg,
    ok_in: Arg, tokens: Arg, end_ids: Arg, alive: Arg, length: Arg, num_computed: Arg, max_len: Arg,
    draft_count: Arg, seeds_lo: Arg, seeds_hi: Arg, appended_out: Arg, source_out: Arg, record: Arg,
    turn: Arg, accept: Arg, tokens_stride: Arg, ends_stride: Arg, row_stride: Arg, line_stride: Arg,
    slot_stride: Arg,
    QUERIES: tl.constexpr, PAD: tl.constexpr, ENDS: tl.constexpr, ENDS_PAD: tl.constexpr,
    SLOTS: tl.constexpr, RING: tl.constexpr, BY_CHANCE: tl.constexpr, PURPOSE: tl.constexpr,
    BITS: tl.constexpr, PDL: tl.constexpr,
) -> None:
    lane = tl.program_id(0)
    draft, column = tl.arange(0, PAD), tl.arange(0, ENDS_PAD)
    pdl_begin(PDL)
    row, end = tl.load(row_in + lane), tl.load(end_in + lane)
    lives, drafts = tl.load(alive_in + lane) != 0, tl.load(drafts_in + lane)
    start, at = tl.load(start_in + lane), row * row_stride
    old, most = tl.load(length + at), tl.load(max_len + at)
    mine = draft <= drafts
    sampled = tl.load(token_in + start + draft, mask=mine, other=0)
    ok = tl.load(ok_in + start + draft, mask=mine, other=0) != 0
    position = old + draft
    to = tokens + row * tokens_stride + position
    guess = tl.load(to, mask=draft < drafts, other=-1)
    agrees = sampled == guess
    if BY_CHANCE:
        agrees = _by_chance(seeds_lo + at, seeds_hi + at, position, accept, draft, QUERIES, PURPOSE, BITS)
    agrees = agrees & (draft < drafts)
    value = tl.where(agrees, guess, sampled)
    end_id = tl.load(end_ids + row * ends_stride + column, mask=column < ENDS, other=-1)
    stops = tl.max((value[:, None] == end_id[None, :]).to(tl.int32), 1) > 0
    goes_on = agrees & ok & (stops == 0) & (position + 1 < most)
    last = tl.min(tl.where(goes_on, PAD, draft), 0)
    is_last = draft == last
    last_ok = tl.sum((is_last & ok).to(tl.int32), 0) > 0
    last_stops = tl.sum((is_last & stops).to(tl.int32), 0) > 0
    ready = lives & (end == old)
    has_room = ready & (old + last < most)
    append = has_room & last_ok
    gained = tl.where(ready, last, 0) + append.to(tl.int32)
    new = old + gained
    finish = tl.where(ready & (new >= most), LENGTH, 0)
    finish = tl.where(has_room & (last_ok == 0) & (last == 0), ERROR, finish)
    finish = tl.where(append & last_stops, STOP, finish)
    tl.store(to, value, mask=draft == tl.where(append, last, PAD))
    tl.store(length + at, new, mask=gained > 0)
    tl.store(num_computed + at, tl.where(gained > 0, new - 1, end), mask=lives)
    tl.store(alive + at, (lives & (finish == 0)).to(tl.int32))
    tl.store(draft_count + at, 0)
    tl.store(appended_out + lane, gained)
    tl.store(source_out + lane, tl.load(sample_token + start + tl.maximum(gained - 1, 0)))
    line = record + lane
    if RING:
        slot = tl.load(turn)
        line += slot * slot_stride
    tl.store(line, gained)
    tl.store(line + line_stride, finish)
    tl.store(line + 2 * line_stride, drafts)
    tl.store(line + (3 + draft) * line_stride, value, mask=draft < gained)
    if RING:
        take_turn(turn, slot, SLOTS)


@jit
def _by_chance(
    seed_lo: Arg, seed_hi: Arg, position: Arg, accept: Arg, draft: Arg,
    QUERIES: tl.constexpr, PURPOSE: tl.constexpr, BITS: tl.constexpr,
) -> Any:
    """As _taken has it."""
    key, _ = lane_key(tl.load(seed_lo), tl.load(seed_hi), position, PURPOSE)
    chance = tl.load(accept + draft, mask=draft < QUERIES - 1, other=0)
    return (key >> (32 - BITS)).to(tl.int32) < chance
