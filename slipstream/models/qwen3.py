"""Qwen3 (Yang et al., 2025): Llama's maths with q and k normalised head by head, and a head size of its
own."""

from __future__ import annotations

from dataclasses import replace

from slipstream.models.decoder import Decoder


class Qwen3(Decoder):
    """Adds the two head norms' weights."""

    names = replace(Decoder.names, head_norms=("self_attn.q_norm", "self_attn.k_norm"))
