"""Stateless noise: a hash of (seed, position, purpose, token id). No generator, no state, no order of calls.

All integers are 32-bit words that wrap, so any device computes the same bits. mix32 is "lowbias32" (C.
Wellons, hash-prospector, public domain): x ^= x >> 16, x *= 0x7feb352d, x ^= x >> 15, x *= 0x846ca68b, x ^= x
>> 16, with logical shifts. A lane's key is two words, each h = mix32(h ^ word) over seed_lo, seed_hi,
position and purpose, from its own start. A token's noise is x = mix32(id) ^ key0, x *= 0x7feb352d, x ^= x >>
15, x += key1, x *= 0x846ca68b, x ^= x >> 16. The top 24 bits make the uniform number.

Legend: n lanes, K token ids (or V, the vocabulary).
"""

from __future__ import annotations

from typing import Any

import torch

from slipstream.kernels.backend import INTERPRETED, Arg, jit, tl

Tensor = torch.Tensor

# Purposes keep apart what one (seed, position) is asked for.
PURPOSE_TOKEN = 0
PURPOSE_ACCEPT = 1  # of a draft, by chance: kernels/commit_drafts.py

MULTIPLY_A = 0x7FEB352D
MULTIPLY_B = 0x846CA68B - (1 << 32)
KEY_STARTS = (0x3C6EF372, 0x9E3779B9 - (1 << 32))


def lane_keys(seed_lo_n: Tensor, seed_hi_n: Tensor, position_n: Tensor, purpose: int) -> Tensor:
    """int32 [n] each; position: of the token to be drawn. Returns int32 [2, n], 64 bits of key a lane."""
    if not seed_lo_n.shape == seed_hi_n.shape == position_n.shape or position_n.dtype != torch.int32:
        raise ValueError("seeds and positions must be int32 [n]")
    start = torch.zeros(2, 1, dtype=torch.int32, device=position_n.device)
    for chain, value in enumerate(KEY_STARTS):
        start[chain] = value
    key_2n = mix32(start ^ seed_lo_n)
    key_2n = mix32(key_2n ^ seed_hi_n)
    key_2n = mix32(key_2n ^ position_n)
    return mix32(key_2n ^ purpose)


def gumbel_cost(key_2n: Tensor, id_K: Tensor) -> Tensor:
    """-log of uniform numbers keyed by token id: float32 [n, K], positive and finite (Exp(1) distributed).

    id_K: int32 [K], or [n, K] for ids of each lane. Adding -log of the cost to logits is the Gumbel-max
    trick.
    """
    if key_2n.dim() != 2 or key_2n.shape[0] != 2 or id_K.dtype != torch.int32:
        raise ValueError("keys must be int32 [2, n] and ids int32")
    return uniform(noise_bits(key_2n, id_K)).log_().neg_()


def noise_bits(key_2n: Tensor, id_K: Tensor) -> Tensor:
    """int32 [n, K], all 32 bits random."""
    bits_nK = mix32(id_K) ^ key_2n[0].unsqueeze(1)
    bits_nK.mul_(MULTIPLY_A).bitwise_xor_(_shift_right(bits_nK, 15))
    bits_nK.add_(key_2n[1].unsqueeze(1))
    return bits_nK.mul_(MULTIPLY_B).bitwise_xor_(_shift_right(bits_nK, 16))


def uniform(bits: Tensor) -> Tensor:
    """float32 in (0, 1), never 0 or 1: the top 24 bits as k / 2**24, with half a step for k = 0."""
    return _shift_right(bits, 8).float().clamp_(min=0.5).mul_(2.0**-24)


def mix32(words: Tensor) -> Tensor:
    """A bijection of int32 words whose output bits each depend on every input bit."""
    mixed = words ^ _shift_right(words, 16)
    mixed.mul_(MULTIPLY_A)
    mixed.bitwise_xor_(_shift_right(mixed, 15))
    mixed.mul_(MULTIPLY_B)
    return mixed.bitwise_xor_(_shift_right(mixed, 16))


def _shift_right(words: Tensor, count: int) -> Tensor:
    """Logical shift: torch's own copies the sign bit."""
    return (words >> count).bitwise_and_((1 << (32 - count)) - 1)


_A, _B = tl.constexpr(MULTIPLY_A), tl.constexpr(MULTIPLY_B & 0xFFFFFFFF)
_HALF_STEP = tl.constexpr(2.0**-25)
_NATIVE = tl.constexpr(not INTERPRETED)
_START_0, _START_1 = (tl.constexpr(start & 0xFFFFFFFF) for start in KEY_STARTS)


@jit
def mix_word(word: Arg) -> Any:
    """mix32 of uint32 words, in a kernel."""
    word ^= word >> 16
    word *= _A
    word ^= word >> 15
    word *= _B
    return word ^ (word >> 16)


@jit
def lane_key(seed_lo: Arg, seed_hi: Arg, position: Arg, PURPOSE: tl.constexpr) -> Any:
    """The two words of lane_keys, uint32, of one lane in a kernel; seeds and position: int32."""
    lo, hi, place = seed_lo.to(tl.uint32), seed_hi.to(tl.uint32), position.to(tl.uint32)
    key0 = mix_word(mix_word(mix_word(lo ^ _START_0) ^ hi) ^ place)
    key1 = mix_word(mix_word(mix_word(lo ^ _START_1) ^ hi) ^ place)
    return mix_word(key0 ^ PURPOSE), mix_word(key1 ^ PURPOSE)


@jit
def token_cost(mixed: Arg, key0: Arg, key1: Arg) -> Any:
    """gumbel_cost in a kernel, to a few parts in a million; mixed: mix_word of the token ids, which lanes may
    share."""
    bits = (mixed ^ key0) * _A
    bits ^= bits >> 15
    bits = bits * _B + key1 * _B
    # The top 24 bits of bits ^ bits >> 16, counted from the float 1: in steps of 2**-23 up to 2, of 2**-22
    # from there. Conversion from int runs in the GPU's slow unit, as logarithms and exponentials do.
    counted = (((bits >> 8) ^ (bits >> 24)) + 0x3F800000).to(tl.float32, bitcast=True)
    share = tl.maximum(tl.minimum(counted * 0.25, counted * 0.5 - 0.5), _HALF_STEP)
    # Near 1 the fast logarithm has no digits left, but there rest is exact and its series short.
    rest = 1.0 - share
    series = 0.5 + rest * (0.3333333333 + rest * (0.25 + rest * 0.2))
    series = rest + rest * rest * series
    return tl.where(rest < 0.0625, series, fast_log2(share) * -0.6931471805599453)


@jit
def fast_log2(value: Arg) -> Any:
    """To 2**-22: absolute from 0.5 to 2, relative elsewhere. float32, positive, not subnormal."""
    if _NATIVE:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(value)


@jit
def fast_exp2(value: Arg) -> Any:
    """To 2**-22, relative; float32; 0 where the power is subnormal."""
    if _NATIVE:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(value)
