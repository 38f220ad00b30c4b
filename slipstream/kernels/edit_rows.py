"""Edits of whole batches of logits in place, for captured steps: every lane has a program, and a program
whose row does not use the edit returns at once.

A row uses an edit where it is alive and the edit's bit is set in its `features`. The references are the
launchers in masks.py and penalties.py, which work on chosen lanes.

Legend: N sampling lanes, V vocabulary, C pieces, R rows, W words of 32 tokens, K list entries, M
max_model_len.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from slipstream.kernels.backend import (
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
from slipstream.kernels.sample_scan import PIECE

Tensor = torch.Tensor

# Programs that share a lane's tokens, and tokens of one turn.
TOKEN_SPLITS, TOKENS = 8, 1024


@dataclass(frozen=True, slots=True)
class EditLanes:
    """The lanes of a batch and which edit is meant. row: int64 [N]; alive, features: int32 [R], of one
    stride; bit: the edit's place in features."""

    row_N: Tensor
    alive_R: Tensor
    features_R: Tensor
    bit: int

    def check(self, logits_NV: Tensor) -> None:
        """Raises ValueError unless logits are contiguous float32 [N, V] where Triton runs."""
        if logits_NV.dtype != torch.float32 or not logits_NV.is_contiguous() or not use_triton(logits_NV):
            raise ValueError("logits must be contiguous float32 [N, V] where Triton runs")
        if self.row_N.shape != logits_NV.shape[:1] or self.alive_R.stride(0) != self.features_R.stride(0):
            raise ValueError("every lane needs its row, and columns of a row one stride")

    def args(self) -> tuple[Any, ...]:
        """In the order in which kernels take them."""
        return self.row_N, self.alive_R, self.features_R, self.alive_R.stride(0), self.bit


@dataclass(frozen=True, slots=True)
class MaskPlaces:
    """Rows with a mask for each of `count` places, of which a lane takes that of length_N - length_R.
    length_N: int32 [N], tokens before the sampled one; length_R: int32, tokens in the row, of the other
    columns' stride."""

    count: int
    length_N: Tensor
    length_R: Tensor


def copy_rows(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    """A contiguous float32 copy of logits (float32 or bfloat16, a row's elements adjacent), and the sums of
    its pieces, float32 [N, C], which tell whether a row was finite before it was edited."""
    if logits_NV.dim() != 2 or logits_NV.stride(1) != 1 or not use_triton(logits_NV):
        raise ValueError("logits must be [N, V], a row's elements adjacent, where Triton runs")
    lanes, vocab = logits_NV.shape
    pieces = ceil_div(vocab, PIECE)
    copy_NV = torch.empty(lanes, vocab, dtype=torch.float32, device=logits_NV.device)
    sum_NC = torch.empty(lanes, pieces, dtype=torch.float32, device=logits_NV.device)
    if lanes:
        _copy_kernel[(pieces, lanes)](
            logits_NV, copy_NV, sum_NC, logits_NV.stride(0), VOCAB=vocab, PIECES=pieces, PIECE=PIECE,
            **pdl_options(logits_NV), num_warps=4,
        )  # fmt: skip
    return copy_NV, sum_NC


def allow_rows(
    logits_NV: Tensor, lanes: EditLanes, mask_RW: Tensor, places: MaskPlaces | None = None
) -> None:
    """-inf for every token whose bit is 0: allow_only on the rows that use it. W: words of all places."""
    lanes.check(logits_NV)
    count, vocab = logits_NV.shape
    held = MaskPlaces(1, lanes.row_N, lanes.alive_R) if places is None else places
    words = mask_RW.shape[1] // held.count
    if mask_RW.dtype != torch.int32 or words * 32 < vocab:
        raise ValueError("the mask must be int32 and have a bit for every token")
    if held.length_N.shape != (count,) or held.length_R.stride(0) != lanes.alive_R.stride(0):
        raise ValueError("every lane needs its length, and columns of a row one stride")
    _allow_kernel[(ceil_div(vocab, PIECE), count)](
        logits_NV, *lanes.args(), mask_RW, mask_RW.stride(0), held.length_N.contiguous(), held.length_R,
        VOCAB=vocab, PIECE=PIECE, PLACES=held.count, WORDS=words, **pdl_options(logits_NV), num_warps=4,
    )  # fmt: skip


def add_rows(logits_NV: Tensor, lanes: EditLanes, id_RK: Tensor, bias_RK: Tensor) -> None:
    """logits[lane, id] += bias. No id twice in a row, but for entries of bias 0, which do nothing."""
    lanes.check(logits_NV)
    if id_RK.shape != bias_RK.shape or id_RK.stride(0) != bias_RK.stride(0):
        raise ValueError("every id needs its bias")
    _add_kernel[(logits_NV.shape[0],)](
        logits_NV, *lanes.args(), id_RK, bias_RK, id_RK.stride(0), VOCAB=logits_NV.shape[1],
        ENTRIES=id_RK.shape[1], PAD=next_power_of_2(id_RK.shape[1]), **pdl_options(logits_NV), num_warps=4,
    )  # fmt: skip


def ban_ends_rows(
    logits_NV: Tensor, lanes: EditLanes, length_N: Tensor, min_len_R: Tensor, end_id_RK: Tensor
) -> None:
    """-inf for the end ids (negative: not used) of rows whose length is below min_len."""
    lanes.check(logits_NV)
    if min_len_R.stride(0) != lanes.alive_R.stride(0) or length_N.shape != lanes.row_N.shape:
        raise ValueError("every lane needs its length, and columns of a row one stride")
    _ban_ends_kernel[(logits_NV.shape[0],)](
        logits_NV, *lanes.args(), length_N.contiguous(), min_len_R, end_id_RK, end_id_RK.stride(0),
        VOCAB=logits_NV.shape[1], ENTRIES=end_id_RK.shape[1], PAD=next_power_of_2(end_id_RK.shape[1]),
        **pdl_options(logits_NV), num_warps=1,
    )  # fmt: skip


def ban_words_rows(
    logits_NV: Tensor, lanes: EditLanes, length_N: Tensor, tokens_RM: Tensor, word_RK: Tensor, back_RK: Tensor
) -> None:
    """-inf for the last token of every word whose other tokens end the row; words as in banned_entries."""
    lanes.check(logits_NV)
    if word_RK.shape != back_RK.shape or word_RK.stride(0) != back_RK.stride(0):
        raise ValueError("every token of a word needs its place")
    _ban_words_kernel[(logits_NV.shape[0],)](
        logits_NV, *lanes.args(), length_N.contiguous(), tokens_RM, word_RK, back_RK, tokens_RM.stride(0),
        word_RK.stride(0), VOCAB=logits_NV.shape[1], ENTRIES=word_RK.shape[1],
        PAD=next_power_of_2(word_RK.shape[1]), **pdl_options(logits_NV), num_warps=4,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PenaltyColumns:
    """Columns [R] of one stride, and tokens [R, M]: what penalise_rows reads of a row."""

    tokens_RM: Tensor
    prompt_len_R: Tensor
    repetition_R: Tensor
    frequency_R: Tensor
    presence_R: Tensor


def penalise_rows(
    logits_NV: Tensor, lanes: EditLanes, length_N: Tensor, columns: PenaltyColumns, count_NV: Tensor
) -> None:
    """penalise on the rows that use it. count: int32 scratch for at least so many lanes, zero before and
    after; one stream only."""
    lanes.check(logits_NV)
    count, vocab = logits_NV.shape
    if count_NV.shape[0] < count or count_NV.shape[1] != vocab or not count_NV.is_contiguous():
        raise ValueError(f"counts must have room for {count} lanes of {vocab} tokens")
    tokens_RM, per_row = columns.tokens_RM, (columns.repetition_R, columns.frequency_R, columns.presence_R)
    if any(each.stride(0) != lanes.alive_R.stride(0) for each in (columns.prompt_len_R, *per_row)):
        raise ValueError("the columns of a row must have one stride")
    grid, length_N = (TOKEN_SPLITS, count), length_N.contiguous()
    options: dict[str, Any] = {"VOCAB": vocab, "SPLITS": TOKEN_SPLITS, "TOKENS": TOKENS, "num_warps": 4}
    options |= pdl_options(logits_NV)
    held = (length_N, tokens_RM, tokens_RM.stride(0))
    _count_kernel[grid](count_NV, *lanes.args(), *held, columns.prompt_len_R, **options)
    _penalise_kernel[grid](logits_NV, count_NV, *lanes.args(), *held, *per_row, **options)


@jit
def _uses(lane: Arg, rows: Arg, alive: Arg, features: Arg, row_stride: Arg, bit: Arg) -> Any:
    """The lane's row, and whether it uses the edit."""
    row = tl.load(rows + lane)
    on = (tl.load(features + row * row_stride) >> bit) & 1
    return row, (tl.load(alive + row * row_stride) != 0) & (on != 0)


@jit
def _copy_kernel(
    logits: Arg, copy: Arg, sums: Arg, stride: Arg,
    VOCAB: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr, PDL: tl.constexpr,
) -> None:
    piece, lane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = piece * PIECE + tl.arange(0, PIECE)
    pdl_begin(PDL)
    value = tl.load(logits + lane * stride + token, mask=token < VOCAB, other=0.0).to(tl.float32)
    tl.store(copy + lane * VOCAB + token, value, mask=token < VOCAB)
    tl.store(sums + lane * PIECES + piece, tl.sum(value, 0))


@jit_with(do_not_specialize=("row_stride", "bit"))
def _allow_kernel(
    logits: Arg, rows: Arg, alive: Arg, features: Arg, row_stride: Arg, bit: Arg,
    masks: Arg, mask_stride: Arg, lengths: Arg, row_lengths: Arg,
    VOCAB: tl.constexpr, PIECE: tl.constexpr, PLACES: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
) -> None:
    lane = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * PIECE + tl.arange(0, PIECE)
    pdl_begin(PDL)
    row, used = _uses(lane, rows, alive, features, row_stride, bit)
    if used:
        start = masks + row * mask_stride
        if PLACES > 1:
            place = tl.load(lengths + lane) - tl.load(row_lengths + row * row_stride)
            start += tl.minimum(tl.maximum(place, 0), PLACES - 1) * WORDS
        word = tl.load(start + token // 32, mask=token < VOCAB, other=-1)
        clear = ((word >> (token % 32)) & 1) == 0
        tl.store(logits + lane * VOCAB + token, float("-inf"), mask=clear & (token < VOCAB))


@jit_with(do_not_specialize=("row_stride", "bit"))
def _add_kernel(
    logits: Arg, rows: Arg, alive: Arg, features: Arg, row_stride: Arg, bit: Arg,
    ids: Arg, biases: Arg, list_stride: Arg,
    VOCAB: tl.constexpr, ENTRIES: tl.constexpr, PAD: tl.constexpr, PDL: tl.constexpr,
) -> None:
    lane = tl.program_id(0).to(tl.int64)
    entry = tl.arange(0, PAD)
    pdl_begin(PDL)
    row, used = _uses(lane, rows, alive, features, row_stride, bit)
    if used:
        at = row * list_stride + entry
        token = tl.load(ids + at, mask=entry < ENTRIES, other=0)
        bias = tl.load(biases + at, mask=entry < ENTRIES, other=0.0)
        named = (bias != 0.0) & (token >= 0) & (token < VOCAB)
        to = logits + lane * VOCAB + token
        tl.store(to, tl.load(to, mask=named, other=0.0) + bias, mask=named)


@jit_with(do_not_specialize=("row_stride", "bit"))
def _ban_ends_kernel(
    logits: Arg, rows: Arg, alive: Arg, features: Arg, row_stride: Arg, bit: Arg,
    lengths: Arg, min_lens: Arg, ids: Arg, list_stride: Arg,
    VOCAB: tl.constexpr, ENTRIES: tl.constexpr, PAD: tl.constexpr, PDL: tl.constexpr,
) -> None:
    lane = tl.program_id(0).to(tl.int64)
    entry = tl.arange(0, PAD)
    pdl_begin(PDL)
    row, used = _uses(lane, rows, alive, features, row_stride, bit)
    early = tl.load(lengths + lane) < tl.load(min_lens + row * row_stride)
    if used & early:
        token = tl.load(ids + row * list_stride + entry, mask=entry < ENTRIES, other=-1)
        tl.store(logits + lane * VOCAB + token, float("-inf"), mask=(token >= 0) & (token < VOCAB))


@jit
def _larger(left: Arg, right: Arg) -> Any:
    return tl.maximum(left, right)


@jit_with(do_not_specialize=("row_stride", "bit"))
def _ban_words_kernel(
    logits: Arg, rows: Arg, alive: Arg, features: Arg, row_stride: Arg, bit: Arg,
    lengths: Arg, tokens: Arg, words: Arg, backs: Arg, tokens_stride: Arg, list_stride: Arg,
    VOCAB: tl.constexpr, ENTRIES: tl.constexpr, PAD: tl.constexpr, PDL: tl.constexpr,
) -> None:
    lane = tl.program_id(0).to(tl.int64)
    entry = tl.arange(0, PAD)
    pdl_begin(PDL)
    row, used = _uses(lane, rows, alive, features, row_stride, bit)
    if used:
        at = row * list_stride + entry
        word = tl.load(words + at, mask=entry < ENTRIES, other=0)
        back = tl.load(backs + at, mask=entry < ENTRIES, other=-1)
        before = tl.load(backs + at - 1, mask=(entry > 0) & (entry < ENTRIES), other=0)
        position = tl.load(lengths + lane) - back
        held = (back > 0) & (position >= 0)
        seen = tl.load(tokens + row * tokens_stride + position, mask=held, other=-1)
        # A word has matched where no token since its first one, which follows another's last, has differed.
        first = tl.associative_scan(tl.where(before <= 0, entry, 0), 0, _larger)
        differed = tl.associative_scan(tl.where((back > 0) & (seen != word), entry, -1), 0, _larger)
        banned = (back == 0) & (differed < first) & (word >= 0) & (word < VOCAB)
        tl.store(logits + lane * VOCAB + word, float("-inf"), mask=banned)


@jit_with(do_not_specialize=("row_stride", "bit"))
def _count_kernel(
    counts: Arg, rows: Arg, alive: Arg, features: Arg, row_stride: Arg, bit: Arg,
    lengths: Arg, tokens: Arg, tokens_stride: Arg, prompt_lens: Arg,
    VOCAB: tl.constexpr, SPLITS: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
) -> None:
    """Add 2 for every place of a token in the output, and set bit 0 for those in the prompt."""
    lane = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    pdl_begin(PDL)
    row, used = _uses(lane, rows, alive, features, row_stride, bit)
    length, prompt_len = tl.load(lengths + lane), tl.load(prompt_lens + row * row_stride)
    for begin in range(0, tl.where(used, length, 0), SPLITS * TOKENS):
        position = begin + place
        token = tl.load(tokens + row * tokens_stride + position, mask=position < length, other=-1)
        known = (token >= 0) & (token < VOCAB)
        to = counts + lane * VOCAB + token
        tl.atomic_add(to, 2, mask=known & (position >= prompt_len), sem="relaxed")
        tl.atomic_or(to, 1, mask=known & (position < prompt_len), sem="relaxed")


@jit_with(do_not_specialize=("row_stride", "bit"))
def _penalise_kernel(
    logits: Arg, counts: Arg, rows: Arg, alive: Arg, features: Arg, row_stride: Arg, bit: Arg,
    lengths: Arg, tokens: Arg, tokens_stride: Arg, repetitions: Arg, frequencies: Arg, presences: Arg,
    VOCAB: tl.constexpr, SPLITS: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
) -> None:
    """Whoever takes a token's count first, leaving zero, penalises it; the others find nothing to do."""
    lane = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    pdl_begin(PDL)
    row, used = _uses(lane, rows, alive, features, row_stride, bit)
    length = tl.load(lengths + lane)
    repetition = tl.load(repetitions + row * row_stride)
    frequency, presence = tl.load(frequencies + row * row_stride), tl.load(presences + row * row_stride)
    for begin in range(0, tl.where(used, length, 0), SPLITS * TOKENS):
        position = begin + place
        token = tl.load(tokens + row * tokens_stride + position, mask=position < length, other=-1)
        known = (token >= 0) & (token < VOCAB)
        count = tl.atomic_xchg(counts + lane * VOCAB + token, 0, mask=known, sem="relaxed")
        mine = known & (count > 0)
        to = logits + lane * VOCAB + token
        value = tl.load(to, mask=mine, other=0.0)
        value = tl.where(value > 0.0, value / repetition, value * repetition)
        in_output = count >> 1
        value -= frequency * in_output.to(tl.float32)
        value -= tl.where(in_output > 0, presence, 0.0)
        tl.store(to, value, mask=mine)
