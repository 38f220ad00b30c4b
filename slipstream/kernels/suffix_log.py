"""Past outputs and where their n-grams stand, on the device: what suffix drafts learn from other requests.

The log is a ring of tokens, each output followed by -1, and a token's place is counted from the first ever
logged, so that it is never given twice. The index is buckets of 16 slots: the last 1, 2, 4 and 8 tokens
before a token are hashed to a bucket each, its place to a slot, and a slot keeps the latest place. So nothing
is ever removed: who looks a place up compares the tokens there, and ignores places before the floor, which
are overwritten, or too old. Every result is the same in any order of the programs.

Legend: S tokens of the log, B buckets, W slots, Q outputs at most, R rows, M max_model_len.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.kernels.backend import Arg, jit, next_power_of_2, pdl_begin, pdl_options, tl, use_triton
from slipstream.kernels.noise import mix32, mix_word

Tensor = torch.Tensor

SLOTS, MOST_HASHED, NUM_LEVELS = 16, 8, 4
SEPARATOR = -1
PARTS, TOKENS_AT_ONCE = 4, 256
# Buckets for four entries a token, a quarter of the log's length, are filled about once.
_LEAST_BUCKETS = 64

_SLOTS, _MOST_HASHED = tl.constexpr(SLOTS), tl.constexpr(MOST_HASHED)


@dataclass(frozen=True, slots=True)
class SuffixLog:
    """token_S: int32; place_BW: int64, 0 for none; start_Q: int64, the first places of the last outputs.
    state_3: int64, tokens ever logged, outputs ever logged, and the first place that is still valid."""

    token_S: Tensor
    place_BW: Tensor
    start_Q: Tensor
    state_3: Tensor

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in (self.token_S, self.place_BW, self.start_Q, self.state_3))


def make_log(outputs: int, tokens: int, device: torch.device) -> SuffixLog:
    """A log of at most so many outputs and tokens; tokens: a power of two."""
    if outputs < 1 or tokens != next_power_of_2(tokens):
        raise ValueError(f"a log of {outputs} outputs and {tokens} tokens: both positive, a power of two")
    buckets = max(tokens * NUM_LEVELS // SLOTS, _LEAST_BUCKETS)
    return SuffixLog(
        torch.full((tokens,), SEPARATOR, dtype=torch.int32, device=device),
        torch.zeros(buckets, SLOTS, dtype=torch.int64, device=device),
        torch.zeros(outputs, dtype=torch.int64, device=device),
        torch.zeros(3, dtype=torch.int64, device=device),
    )


def log_outputs(
    log: SuffixLog,
    *,
    tokens_RM: Tensor,
    alive_R: Tensor,
    length_R: Tensor,
    prompt_len_R: Tensor,
    logged_R: Tensor,
) -> None:
    """Log the outputs of rows that are dead, but were not when this was last called: logged is 0, and becomes
    1. Rows in order; the last row is the padding row. All int32, scalar columns of one stride."""
    scalars = (alive_R, length_R, prompt_len_R, logged_R)
    if len({each.stride(0) for each in scalars}) != 1:
        raise ValueError("the scalar columns of a row must have one stride")
    if not use_triton(tokens_RM):
        log_outputs_reference(log, tokens_RM, *scalars)
        return
    rows, options = tokens_RM.shape[0] - 1, pdl_options(tokens_RM)
    start_R = torch.empty(rows, dtype=torch.int64, device=tokens_RM.device)
    _plan_kernel[(1,)](
        *scalars, start_R, log.start_Q, log.state_3, alive_R.stride(0), ROWS=rows,
        PAD=next_power_of_2(rows), LOG=log.token_S.shape[0], OUTPUTS=log.start_Q.shape[0], **options,
        num_warps=4,
    )  # fmt: skip
    _log_kernel[(PARTS, rows)](
        tokens_RM, length_R, prompt_len_R, start_R, log.token_S, log.place_BW, log.state_3,
        alive_R.stride(0), tokens_RM.stride(0), LOG=log.token_S.shape[0], BUCKETS=log.place_BW.shape[0],
        PARTS=PARTS, TOKENS=TOKENS_AT_ONCE, **options, num_warps=4,
    )  # fmt: skip


def log_outputs_reference(
    log: SuffixLog,
    tokens_RM: Tensor,
    alive_R: Tensor,
    length_R: Tensor,
    prompt_len_R: Tensor,
    logged_R: Tensor,
) -> None:
    """The same in torch operations."""
    new_R = (alive_R == 0) & (logged_R == 0) & (length_R > prompt_len_R)
    new_R[-1] = False
    logged_R[new_R] = 1
    size, outputs = log.token_S.shape[0], log.start_Q.shape[0]
    logged, count, floor = log.state_3.tolist()
    for row in new_R.nonzero()[:, 0].tolist():
        output = tokens_RM[row, int(prompt_len_R[row]) : int(length_R[row])]
        place = torch.arange(logged, logged + len(output) + 1, device=output.device)
        log.start_Q[count % outputs] = logged
        log.token_S[place % size] = torch.nn.functional.pad(output, (0, 1), value=SEPARATOR)
        word_N = torch.zeros_like(output[1:])
        for back in range(min(MOST_HASHED, len(word_N))):
            word_N[back:] = mix32(word_N[back:] ^ output[: len(word_N) - back])
            if back & (back + 1) == 0:
                after = place[back + 1 : -1]
                entry = (word_N[back:] & (len(log.place_BW) - 1)) * SLOTS + slot_of(after)
                log.place_BW.view(-1).scatter_reduce_(0, entry.long(), after, "amax")
        logged, count = logged + len(place), count + 1
    if count >= outputs:
        floor = int(log.start_Q[count % outputs])
    log.state_3.copy_(torch.tensor([logged, count, max(floor, logged - size)]))


def slot_of(place: Tensor) -> Tensor:
    """int32, of int64 places."""
    return mix32(place.to(torch.int32)) & (SLOTS - 1)


@jit
def _plan_kernel(
    alive: Arg, lengths: Arg, prompt_lens: Arg, logged: Arg, start_out: Arg, starts: Arg, state: Arg,
    row_stride: Arg, ROWS: tl.constexpr, PAD: tl.constexpr, LOG: tl.constexpr, OUTPUTS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Gives every new output its places."""
    row = tl.arange(0, PAD)
    inside = row < ROWS
    at = row * row_stride
    pdl_begin(PDL)
    size = tl.load(lengths + at, mask=inside, other=0) - tl.load(prompt_lens + at, mask=inside, other=0)
    done = tl.load(alive + at, mask=inside, other=1) | tl.load(logged + at, mask=inside, other=1)
    new = inside & (done == 0) & (size > 0)
    places = tl.where(new, size + 1, 0)
    first, before, floor = tl.load(state), tl.load(state + 1), tl.load(state + 2)
    start = first + tl.cumsum(places, 0) - places
    number = before + tl.cumsum(new.to(tl.int32), 0) - 1
    end, count = first + tl.sum(places, 0), before + tl.sum(new.to(tl.int32), 0)
    tl.store(start_out + row, tl.where(new, start, -1), mask=inside)
    tl.store(logged + at, 1, mask=new)
    tl.store(starts + number % OUTPUTS, start, mask=new & (number >= count - OUTPUTS))
    # The first valid output may be one of these, stored by another thread.
    tl.debug_barrier()
    oldest = tl.load(starts + count % OUTPUTS, mask=count >= OUTPUTS, other=0)
    tl.store(state, end)
    tl.store(state + 1, count)
    tl.store(state + 2, tl.maximum(tl.maximum(floor, oldest), end - LOG))


@jit
def _log_kernel(
    tokens: Arg, lengths: Arg, prompt_lens: Arg, starts: Arg, log: Arg, index: Arg, state: Arg,
    row_stride: Arg, stride: Arg, LOG: tl.constexpr, BUCKETS: tl.constexpr, PARTS: tl.constexpr,
    TOKENS: tl.constexpr, PDL: tl.constexpr,
) -> None:
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    pdl_begin(PDL)
    start = tl.load(starts + row)
    if start >= 0:
        prompt_len = tl.load(prompt_lens + row * row_stride)
        size = tl.load(lengths + row * row_stride) - prompt_len
        output = tokens + row * stride + prompt_len
        # Places that this very step writes over again keep what comes last.
        first = tl.load(state) - LOG
        for begin in range(part * TOKENS, size + 1, PARTS * TOKENS):
            n = begin + tl.arange(0, TOKENS)
            token = tl.load(output + n, mask=n < size, other=-1)
            place = start + n
            tl.store(log + place % LOG, token, mask=(n <= size) & (place >= first))
            after = place + 1
            slot = mix_word(after.to(tl.uint32)) % _SLOTS
            word = tl.zeros([TOKENS], tl.uint32)
            for back in tl.static_range(_MOST_HASHED):
                held = (n >= back) & (after < start + size)
                word = mix_word(word ^ tl.load(output + n - back, mask=held, other=0).to(tl.uint32))
                if (back & (back + 1)) == 0:
                    entry = (word % BUCKETS * _SLOTS + slot).to(tl.int64)
                    tl.atomic_max(index + entry, after, mask=held, sem="relaxed")
