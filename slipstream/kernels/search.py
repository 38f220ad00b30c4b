"""Finding a threshold among numbers held in registers, and drawing from what is left: no sort.

Distances are (highest - logit) / temperature, float32 and never negative, so that their bits, as int32, have
their order. FAR stands for a place that holds no token. Everything here runs inside a kernel, by all threads
of one program.

Legend: C places of candidates.
"""

from __future__ import annotations

from typing import Any

from slipstream.kernels.backend import Arg, jit, tl
from slipstream.kernels.noise import mix_word, token_cost

FAR = tl.constexpr(2147483647)
LOWEST = tl.constexpr(-3.4028234663852886e38)
LOG2_E = tl.constexpr(1.4426950408889634)
# Noise spans less than 20 nats (noise.py): a token this far below the highest is never drawn.
NEVER_DRAWN = tl.constexpr(32.0)
# An octave of float32, as a difference of bits.
OCTAVE = tl.constexpr(1 << 23)


@jit
def distance_bits(value: Arg, highest: Arg, cold: Arg) -> Any:
    """Distances of logits as ordered int32. cold: 1 / temperature."""
    return ((highest - value) * cold).to(tl.int32, bitcast=True)


@jit
def farthest_bits(min_p: Arg) -> Any:
    """Bits of the distance at which min_p, or the noise's span, ends what can be drawn."""
    # Adding 0 turns the -0.0 of min_p = 1 into 0.0, whose bits are in order.
    return (tl.minimum(-tl.log(min_p), NEVER_DRAWN) + 0.0).to(tl.int32, bitcast=True)


@jit
def first_lowest(value_C: Arg, token_C: Arg) -> Any:
    """The lowest token id (int32) among those of the lowest value."""
    return tl.min(tl.where(value_C == tl.min(value_C, 0), token_C, FAR), 0)


@jit
def nth_of_few(bits_C: Arg, wanted: Arg) -> Any:
    """The wanted-th lowest of about a hundred, each compared with all; FAR where there are fewer."""
    within_CC = tl.expand_dims(bits_C, 0) <= tl.expand_dims(bits_C, 1)
    return tl.min(tl.where(tl.sum(within_CC.to(tl.int32), 1) >= wanted, bits_C, FAR), 0)


@jit
def bracket(bits_C: Arg, wanted: Arg, enough: Arg, bound: Arg) -> Any:
    """(t, n): n places have bits <= t; wanted <= n <= enough, or else t is the wanted-th lowest itself.

    bound: at or above the wanted-th, or FAR. Where there are fewer than wanted, t is at or above all.
    """
    within, beyond = tl.minimum(bound, FAR - 1), wanted * 0 - 1
    count = tl.sum((bits_C <= within).to(tl.int32), 0)
    step = wanted * 0 + OCTAVE
    while (count > enough) & (within - beyond > 1):
        # Down from the bound in growing steps first: it is often near, and most of the floats are tiny.
        tried = tl.maximum(beyond + (within - beyond) // 2, within - step)
        found = tl.sum((bits_C <= tried).to(tl.int32), 0)
        count = tl.where(found >= wanted, found, count)
        within = tl.where(found >= wanted, tried, within)
        beyond = tl.where(found >= wanted, beyond, tried)
        step = tl.minimum(step, 1 << 29) * 2
    return within, count


@jit
def last_kept(bits_C: Arg, weight_C: Arg, target: Arg) -> Any:
    """The largest t for which the weight of bits < t is below the target: the bits of the number that reaches
    it, FAR where none does. A bit at a time."""
    last = target.to(tl.int32) * 0
    for bit in range(31):
        tried = last + (1 << (30 - bit))
        before = tl.sum(tl.where(bits_C < tried, weight_C, 0.0), 0)
        last = tl.where(before < target, tried, last)
    return last


@jit
def draw_among(bits_C: Arg, token_C: Arg, top_k: Arg, top_p: Arg, key0: Arg, key1: Arg) -> Any:
    """top_k, top_p and the draw among many. Returns a token id, int32."""
    last, _ = bracket(bits_C, top_k, top_k, FAR)
    bits_C = tl.where(bits_C > last, FAR, bits_C)
    if top_p < 1.0:
        weight_C = tl.where(bits_C < FAR, tl.exp(-bits_C.to(tl.float32, bitcast=True)), 0.0)
        goal = top_p * tl.sum(weight_C, 0)
        bits_C = tl.where(bits_C > last_kept(bits_C, weight_C, goal), FAR, bits_C)
    return first_lowest(_noisy(bits_C, token_C, key0, key1), token_C)


@jit
def draw_among_few(bits_C: Arg, token_C: Arg, top_k: Arg, top_p: Arg, key0: Arg, key1: Arg) -> Any:
    """The same among about a hundred: each is compared with all, which needs no search."""
    bits_C = tl.where(bits_C > nth_of_few(bits_C, top_k), FAR, bits_C)
    if top_p < 1.0:
        weight_C = tl.where(bits_C < FAR, tl.exp(-bits_C.to(tl.float32, bitcast=True)), 0.0)
        nearer_CC = tl.expand_dims(bits_C, 0) < tl.expand_dims(bits_C, 1)
        before_C = tl.sum(tl.where(nearer_CC, tl.expand_dims(weight_C, 0), 0.0), 1)
        reached = tl.where(bits_C < FAR, before_C, float("inf")) >= top_p * tl.sum(weight_C, 0)
        bits_C = tl.where(reached, FAR, bits_C)
    return first_lowest(_noisy(bits_C, token_C, key0, key1), token_C)


@jit
def _noisy(bits_C: Arg, token_C: Arg, key0: Arg, key1: Arg) -> Any:
    """Noise cost times exp(distance): the least is drawn. Infinite at FAR."""
    cost_C = token_cost(mix_word(token_C.to(tl.uint32)), key0, key1)
    noisy_C = cost_C * tl.exp(bits_C.to(tl.float32, bitcast=True))
    return tl.where(bits_C < FAR, noisy_C, float("inf"))
