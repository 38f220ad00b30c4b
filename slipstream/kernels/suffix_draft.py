"""Suffix drafts: how most occurrences of a row's end go on, in the row itself and in past outputs.

An occurrence is a place whose last tokens are the row's last; it counts by how many they are. Of the row
itself the 16 largest count, as history.py orders them; of past outputs the 16 largest that the buckets of the
row's end hold. An occurrence weighs four times as much for every token that it matches, and an own one four
times as much as a past one. Draft by draft the token of most weight is taken, and those that go on otherwise
leave. A draft is good while those left have min_prob of all weight; a match of n tokens gives at most
max_spec_factor * n drafts. An own occurrence runs on into itself, a past one ends with its output.

Source: suffix decoding (Oliaro et al. 2024, arXiv 2411.04975), whose trees choose by frequency too, but one
match length at a time.

Legend: L lanes, K drafts, C keys of a lane, O occurrences, P places of the buckets.
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
from slipstream.kernels.history import AFTER_BITS, Histories, find_matches, text_of
from slipstream.kernels.noise import mix32, mix_word
from slipstream.kernels.suffix_log import MOST_HASHED, NUM_LEVELS, SLOTS, SuffixLog

Tensor = torch.Tensor

OWN, PAST = 16, 16
# Beyond this many matched tokens fewer, all weigh the same; 32 of the heaviest fit an int32.
HEAVIEST = 12
PROB_STEPS = 1 << 20
# A past occurrence is its match length above its place.
PLACE_BITS = 48

_OWN, _PAST, _HEAVIEST = tl.constexpr(OWN), tl.constexpr(PAST), tl.constexpr(HEAVIEST)
_SLOTS, _HASHED, _PLACES = tl.constexpr(SLOTS), tl.constexpr(MOST_HASHED), tl.constexpr(NUM_LEVELS * SLOTS)
_AFTER_BITS, _AFTER_MASK = tl.constexpr(AFTER_BITS), tl.constexpr((1 << AFTER_BITS) - 1)
_PLACE_BITS, _PLACE_MASK = tl.constexpr(PLACE_BITS), tl.constexpr((1 << PLACE_BITS) - 1)
_PROB_STEPS = tl.constexpr(PROB_STEPS)


@dataclass(frozen=True, slots=True)
class SuffixRules:
    """longest: the longest match looked for; drafts: K; min_prob: of a draft; limit_N: int32 [longest + 1],
    the most drafts after a match of n tokens."""

    longest: int
    drafts: int
    min_prob: float
    limit_N: Tensor

    @property
    def min_share(self) -> int:
        """min_prob in steps, so that no rounding tells devices apart."""
        return int(self.min_prob * PROB_STEPS)


def draft_suffixes(histories: Histories, log: SuffixLog, rules: SuffixRules) -> tuple[Tensor, Tensor]:
    """token int32 [L, K] and count int32 [L]; tokens past the count mean nothing."""
    key_LC = find_matches(histories, 1, rules.longest, OWN)
    if not use_triton(histories.tokens_RM):
        return draft_suffixes_reference(histories, key_LC, log, rules)
    lanes, keys = key_LC.shape
    token_LK = torch.empty(lanes, rules.drafts, dtype=torch.int32, device=key_LC.device)
    count_L = torch.empty(lanes, dtype=torch.int32, device=key_LC.device)
    _draft_kernel[(lanes,)](
        *histories.columns(), key_LC, log.token_S, log.place_BW, log.state_3, rules.limit_N, token_LK,
        count_L, *histories.strides(), rules.min_share, KEYS=keys, LOG=log.token_S.shape[0],
        BUCKETS=log.place_BW.shape[0], LONGEST=rules.longest, BACK=next_power_of_2(rules.longest),
        DRAFTS=rules.drafts, **pdl_options(key_LC), num_warps=4,
    )  # fmt: skip
    return token_LK, count_L


def draft_suffixes_reference(
    histories: Histories, key_LC: Tensor, log: SuffixLog, rules: SuffixRules
) -> tuple[Tensor, Tensor]:
    """The same in torch operations."""
    length_L1 = histories.text_length_L().long().unsqueeze(1)
    key_LO, past_LO = key_LC.topk(OWN, 1).values.long(), _past_reference(histories, log, rules.longest)
    after_LO, place_LO = key_LO & ((1 << AFTER_BITS) - 1), past_LO & ((1 << PLACE_BITS) - 1)
    match_LO = torch.cat((key_LO >> AFTER_BITS, past_LO >> PLACE_BITS), 1)
    there_LO = match_LO > 0
    rank_LO = match_LO + (torch.arange(OWN + PAST, device=key_LC.device) < OWN)
    lead_LO = rank_LO - (rank_LO * there_LO).amax(1, keepdim=True)
    weight_LO = there_LO << (2 * (lead_LO + HEAVIEST).clamp(min=0))
    total_L = weight_LO.sum(1)
    limit_L = rules.limit_N[match_LO.amax(1)]
    period_LO = (length_L1 - after_LO).clamp(min=1)
    count_L, going_L = torch.zeros_like(limit_L), total_L > 0
    token_LK = torch.zeros(len(limit_L), rules.drafts, dtype=torch.int32, device=key_LC.device)
    for draft in range(min(rules.drafts, int(limit_L.max()))):
        own_LO = histories.tokens_RM[histories.row_L.unsqueeze(1), after_LO + draft % period_LO]
        next_LO = place_LO + draft
        past_LO = torch.where(next_LO < log.state_3[0], log.token_S[next_LO % len(log.token_S)], -1)
        text_LO = torch.cat((own_LO, past_LO), 1)
        there_LO = there_LO & (text_LO >= 0)
        same_LOO = (text_LO.unsqueeze(1) == text_LO.unsqueeze(2)) & there_LO.unsqueeze(1)
        votes_LO = (same_LOO * weight_LO.unsqueeze(1)).sum(2) * there_LO
        # argmax gives the first of equals: of the row itself, or longer, or more recent.
        votes_L = votes_LO.amax(1)
        best_L = (votes_LO == votes_L.unsqueeze(1)).int().argmax(1)
        going_L = going_L & (draft < limit_L) & (votes_L > 0)
        going_L = going_L & (votes_L * PROB_STEPS >= rules.min_share * total_L)
        if not going_L.any():
            break
        token_LK[:, draft] = text_LO.gather(1, best_L.unsqueeze(1))[:, 0]
        there_LO = there_LO & (text_LO == token_LK[:, draft : draft + 1])
        count_L = count_L + going_L.int()
    return token_LK, count_L


def _past_reference(histories: Histories, log: SuffixLog, longest: int) -> Tensor:
    """int64 [L, PAST], the largest first: match length and place of past occurrences, 0 for none."""
    length_L1, row_L1 = histories.text_length_L().long().unsqueeze(1), histories.row_L.unsqueeze(1)
    back_N = torch.arange(1, max(longest, MOST_HASHED) + 1, device=length_L1.device)
    last_LN = histories.tokens_RM[row_L1, (length_L1 - back_N).clamp(min=0)]
    held_LN = length_L1 >= back_N
    word_L, found = torch.zeros_like(last_LN[:, 0]), []
    for back in range(MOST_HASHED):
        word_L = mix32(word_L ^ last_LN[:, back])
        if back & (back + 1) == 0:
            bucket_L = (word_L & (len(log.place_BW) - 1)).long()
            found.append(log.place_BW[bucket_L] * held_LN[:, back : back + 1])
    place_LP1 = torch.cat(found, 1).sort(1, descending=True).values.unsqueeze(2)
    place_LP1[:, 1:][place_LP1[:, 1:] == place_LP1[:, :-1]] = 0
    before_LPN = place_LP1 - back_N
    same_LPN = log.token_S[before_LPN % len(log.token_S)] == last_LN.unsqueeze(1)
    same_LPN &= held_LN.unsqueeze(1) & (before_LPN >= log.state_3[2])
    match_LP = same_LPN.int().cumprod(2).sum(2).clamp(max=longest)
    key_LP = ((match_LP << PLACE_BITS) | place_LP1[:, :, 0]) * (match_LP > 0)
    return key_LP.topk(PAST, 1).values


@jit
def _largest_first(kept_O: Arg, first: Arg, key: Arg, slot_O: Arg, COUNT: tl.constexpr) -> Any:
    """Put the COUNT largest of the keys into kept_O from `first` on, 0 where there are no more. A key that is
    there more than once counts once."""
    for n in range(COUNT):
        top = tl.max(key, 0)
        kept_O = tl.where(slot_O == first + n, top, kept_O)
        key = tl.where(key == top, 0, key)
    return kept_O


@jit
def _past_keys(
    tokens: Arg, length: Arg, log: Arg, index: Arg, floor: Arg,
    LOG: tl.constexpr, BUCKETS: tl.constexpr, LONGEST: tl.constexpr, BACK: tl.constexpr,
) -> Any:
    """Match lengths above places, int64, of all that the buckets of the text's end hold."""
    entry = tl.arange(0, _PLACES)
    word = (length * 0).to(tl.uint32)
    at = tl.zeros([_PLACES], tl.int64) - 1
    level = length * 0
    for back in tl.static_range(_HASHED):
        held = length > back
        word = mix_word(word ^ tl.load(tokens + length - 1 - back, mask=held, other=0).to(tl.uint32))
        if (back & (back + 1)) == 0:
            slots = (word % BUCKETS * _SLOTS).to(tl.int64) + entry % _SLOTS
            at = tl.where((entry // _SLOTS == level) & held, slots, at)
            level += 1
    place = tl.load(index + at, mask=at >= 0, other=0)
    back = tl.arange(0, BACK)
    before = place[:, None] - 1 - back[None, :]
    last = tl.load(tokens + length - 1 - back, mask=(back < length) & (back < LONGEST), other=-1)
    seen = tl.load(log + before % LOG, mask=before >= floor, other=-1)
    same = (seen == last[None, :]) & (seen >= 0)
    match = tl.min(tl.where(same, LONGEST, tl.minimum(back, LONGEST)[None, :]), 1)
    return tl.where(match > 0, (match.to(tl.int64) << _PLACE_BITS) | place, 0)


@jit_with(do_not_specialize=("min_share",))
def _draft_kernel(
    rows: Arg, appended: Arg, alive: Arg, lengths: Arg, tokens: Arg, keys: Arg, log: Arg, index: Arg,
    state: Arg, limits: Arg, token_out: Arg, count_out: Arg, row_stride: Arg, stride: Arg, min_share: Arg,
    KEYS: tl.constexpr, LOG: tl.constexpr, BUCKETS: tl.constexpr, LONGEST: tl.constexpr,
    BACK: tl.constexpr, DRAFTS: tl.constexpr, PDL: tl.constexpr,
) -> None:
    lane = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, _OWN + _PAST)
    pdl_begin(PDL)
    tokens, length = text_of(lane, rows, appended, alive, lengths, tokens, row_stride, stride)
    count = length * 0
    if length > 0:
        logged, floor = tl.load(state), tl.load(state + 2)
        own = tl.load(keys + lane * KEYS + tl.arange(0, KEYS)).to(tl.int64)
        own = ((own >> _AFTER_BITS) << _PLACE_BITS) | (own & _AFTER_MASK)
        key = _largest_first(tl.zeros([_OWN + _PAST], tl.int64), 0, own, slot, _OWN)
        past = _past_keys(tokens, length, log, index, floor, LOG, BUCKETS, LONGEST, BACK)
        key = _largest_first(key, _OWN, past, slot, _PAST)
        is_own, match, after = slot < _OWN, (key >> _PLACE_BITS).to(tl.int32), key & _PLACE_MASK
        there = match > 0
        rank = match + is_own.to(tl.int32)
        lead = rank - tl.max(tl.where(there, rank, 0), 0)
        weight = there.to(tl.int32) << (2 * tl.maximum(lead + _HEAVIEST, 0))
        period = tl.where(is_own, tl.maximum(length - after, 1), 1)
        needed = min_share.to(tl.int64) * tl.sum(weight, 0)
        limit = tl.load(limits + tl.max(match, 0))
        going = limit > 0
        while going:
            next = after + count
            repeated = tl.load(tokens + after + count % period, mask=there & is_own, other=-1)
            logged_text = tl.load(log + next % LOG, mask=there & (slot >= _OWN) & (next < logged), other=-1)
            text = tl.where(is_own, repeated, logged_text)
            there = there & (text >= 0)
            same = (text[None, :] == text[:, None]) & there[None, :]
            votes = tl.where(there, tl.sum(tl.where(same, weight[None, :], 0), 1), 0)
            most = tl.max(votes, 0)
            # The first of equals: of the row itself, or longer, or more recent.
            first = tl.min(tl.where(votes == most, slot, _OWN + _PAST), 0)
            token = tl.max(tl.where(slot == first, text, -1), 0)
            good = (most > 0) & (most.to(tl.int64) * _PROB_STEPS >= needed)
            tl.store(token_out + lane * DRAFTS + count, token, mask=good)
            there = there & (text == token)
            count += good.to(tl.int32)
            going = good & (count < limit)
    tl.store(count_out + lane, count)
