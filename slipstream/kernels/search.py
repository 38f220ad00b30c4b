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
# Noise spans less than 20 nats (noise.py): a token this far below the highest is never drawn.
NEVER_DRAWN = tl.constexpr(32.0)


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
def last_kept(bits_C: Arg, weight_C: Arg, target: Arg) -> Any:
    """The largest t for which the weight of bits < t is below the target: the bits of the number that reaches
    it, FAR where none does. A bit at a time; weight: float32, so up to 2^24 ones count exactly."""
    last = target.to(tl.int32) * 0
    for bit in range(31):
        tried = last + (1 << (30 - bit))
        before = tl.sum(tl.where(bits_C < tried, weight_C, 0.0), 0)
        last = tl.where(before < target, tried, last)
    return last


@jit
def first_highest(value_C: Arg, token_C: Arg) -> Any:
    """The lowest token id (int32) among those of the highest value."""
    return tl.min(tl.where(value_C == tl.max(value_C, 0), token_C, FAR), 0)


@jit
def draw_among(
    bits_C: Arg, token_C: Arg, top_k: Arg, top_p: Arg, target: Arg, key0: Arg, key1: Arg
) -> Any:
    """top_k (0: off), top_p and the draw. target: the weight that top_p must reach, or negative for top_p of
    what top_k leaves. Returns a token id, int32."""
    weight_C = tl.where(bits_C < FAR, tl.exp(-bits_C.to(tl.float32, bitcast=True)), 0.0)
    if top_k > 0:
        ones_C = tl.where(bits_C < FAR, 1.0, 0.0)
        bits_C = tl.where(bits_C > last_kept(bits_C, ones_C, top_k.to(tl.float32)), FAR, bits_C)
    if top_p < 1.0:
        kept = tl.sum(tl.where(bits_C < FAR, weight_C, 0.0), 0)
        goal = tl.where(target < 0.0, top_p * kept, target)
        bits_C = tl.where(bits_C > last_kept(bits_C, weight_C, goal), FAR, bits_C)
    cost_C = token_cost(mix_word(token_C.to(tl.uint32)), key0, key1)
    # The order of weight / cost is that of logit + Gumbel noise, and saves a logarithm.
    return first_highest(tl.where(bits_C < FAR, weight_C / cost_C, -1.0), token_C)
