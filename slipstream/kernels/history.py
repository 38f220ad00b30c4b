"""Where the last tokens of a row have stood before, in the row itself: what n-gram and suffix drafts share.

A row is read in parts side by side, each as long as the row is, not as it may become. An occurrence is a key:
how many tokens match, then the place after them, so that the largest is the longest, and the most recent of
those.

Legend: L lanes, R rows, M max_model_len, P parts of a row, k keys kept of each part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from slipstream.kernels.backend import Arg, jit, pdl_begin, pdl_options, tl, use_triton

Tensor = torch.Tensor

AFTER_BITS = 25
MOST_TOKENS, LONGEST_MATCH = (1 << AFTER_BITS) - 1, 63
CHUNK = 512
# Parts of a row in a batch of at most FEW lanes, and in a larger one: with 4 warps each, 64 or 256 lanes are
# as many programs as an H200 holds at once. Two choices only: each is a kernel to compile.
FEW, PARTS_OF_FEW, PARTS_OF_MANY = 64, 32, 8

_AFTER_BITS = tl.constexpr(AFTER_BITS)


@dataclass(frozen=True, slots=True)
class Histories:
    """Lanes and the texts of their rows: row_L int64; appended_L int32; tokens_RM int32; length_R and alive_R
    int32, with one stride. A lane has a text where its row is alive and gained tokens in this step."""

    row_L: Tensor
    appended_L: Tensor
    tokens_RM: Tensor
    length_R: Tensor
    alive_R: Tensor

    def __post_init__(self) -> None:
        if self.row_L.dim() != 1 or self.appended_L.shape != self.row_L.shape:
            raise ValueError("row and appended must be [L]")
        if self.tokens_RM.dtype != torch.int32 or self.tokens_RM.stride(1) != 1:
            raise ValueError("tokens must be int32, those of a row adjacent")
        if self.length_R.stride(0) != self.alive_R.stride(0):
            raise ValueError("the scalar columns of a row must have one stride")
        if self.tokens_RM.shape[1] > MOST_TOKENS:
            raise ValueError(f"rows of more than {MOST_TOKENS} tokens have no lookup")

    def text_length_L(self) -> Tensor:
        """int32 [L], 0 where there is no text to continue."""
        lives_L = (self.appended_L > 0) & (self.alive_R[self.row_L] != 0)
        return self.length_R[self.row_L] * lives_L

    def columns(self) -> tuple[Tensor, ...]:
        """As kernels take them."""
        return self.row_L, self.appended_L, self.alive_R, self.length_R, self.tokens_RM

    def strides(self) -> tuple[int, int]:
        return self.length_R.stride(0), self.tokens_RM.stride(0)


def find_matches(histories: Histories, least: int, most: int, kept: int) -> Tensor:
    """Keys int32 [L, C], in any order, 0 for none, among them the `kept` largest of each lane: earlier places
    whose last tokens, at least `least` and counted up to `most`, are the row's last. kept: a power of two."""
    if not 1 <= least <= most <= LONGEST_MATCH:
        raise ValueError(f"matches must have 1 to {LONGEST_MATCH} tokens, not {least} to {most}")
    if not use_triton(histories.tokens_RM):
        return find_matches_reference(histories, least, most, kept)
    lanes = histories.row_L.shape[0]
    parts = PARTS_OF_FEW if lanes <= FEW else PARTS_OF_MANY
    key_LC = torch.empty(lanes, parts * kept, dtype=torch.int32, device=histories.tokens_RM.device)
    _find_kernel[(parts, lanes)](
        *histories.columns(), key_LC, *histories.strides(), LEAST=least, MOST=most, KEPT=kept, PARTS=parts,
        CHUNK=CHUNK, **pdl_options(key_LC), num_warps=4,
    )  # fmt: skip
    return key_LC


def find_matches_reference(histories: Histories, least: int, most: int, kept: int) -> Tensor:
    """The same in torch operations."""
    length_L1 = histories.text_length_L().unsqueeze(1).long()
    width = max(int(length_L1.max()), kept + 1)
    token_LM = histories.tokens_RM[histories.row_L, :width]
    after_M = torch.arange(1, width, device=token_LM.device)
    running_LM = after_M < length_L1
    count_LM = torch.zeros_like(running_LM, dtype=torch.int32)
    for back in range(most):
        last_L1 = token_LM.gather(1, (length_L1 - 1 - back).clamp(min=0))
        running_LM[:, :back] = False
        running_LM[:, back:] &= token_LM[:, : width - 1 - back] == last_L1
        if not running_LM.any():
            break
        count_LM += running_LM
    key_LM = ((count_LM << AFTER_BITS) | after_M.int()) * (count_LM >= least)
    return key_LM.topk(kept, 1).values


@jit
def text_of(
    lane: Arg, rows: Arg, appended: Arg, alive: Arg, lengths: Arg, tokens: Arg, row_stride: Arg, stride: Arg
) -> Any:
    """A lane's tokens and how many they are, 0 where there is nothing to continue."""
    row = tl.load(rows + lane)
    lives = (tl.load(appended + lane) > 0) & (tl.load(alive + row * row_stride) != 0)
    return tokens + row * stride, tl.where(lives, tl.load(lengths + row * row_stride), 0)


@jit
def _match_lengths(tokens: Arg, after: Arg, length: Arg, MOST: tl.constexpr) -> Any:
    """How many tokens before each place are the text's last ones. No place reaches before the first token."""
    running = after < length
    count = tl.zeros_like(after)
    back = length * 0 + 1
    while (back <= MOST) & (tl.max(running.to(tl.int32), 0) > 0):
        last = tl.load(tokens + length - back)
        seen = tl.load(tokens + after - back, mask=running & (after >= back), other=-1)
        running = running & (seen == last)
        count += running.to(tl.int32)
        back += 1
    return count


@jit
def _find_kernel(
    rows: Arg, appended: Arg, alive: Arg, lengths: Arg, tokens: Arg, keys_out: Arg, row_stride: Arg,
    stride: Arg, LEAST: tl.constexpr, MOST: tl.constexpr, KEPT: tl.constexpr, PARTS: tl.constexpr,
    CHUNK: tl.constexpr, PDL: tl.constexpr,
) -> None:
    part, lane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    place, slot = tl.arange(0, CHUNK), tl.arange(0, KEPT)
    pdl_begin(PDL)
    tokens, length = text_of(lane, rows, appended, alive, lengths, tokens, row_stride, stride)
    kept = tl.zeros([KEPT], tl.int32)
    lowest = length * 0
    for begin in range(part * CHUNK, length - 1, PARTS * CHUNK):
        after = begin + 1 + place
        count = _match_lengths(tokens, after, length, MOST)
        key = tl.where(count >= LEAST, (count << _AFTER_BITS) | after, 0)
        top = tl.max(key, 0)
        while top > lowest:
            # It takes the place of the lowest. What is left at or below the new lowest never will.
            given = tl.min(tl.where(kept == lowest, slot, KEPT), 0)
            kept = tl.where(slot == given, top, kept)
            lowest = tl.min(kept, 0)
            key = tl.where(key == top, 0, key)
            top = tl.max(key, 0)
    tl.store(keys_out + (lane * PARTS + part) * KEPT + slot, kept)
