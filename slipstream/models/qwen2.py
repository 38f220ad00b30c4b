"""Qwen2 and Qwen2.5 (Yang et al., 2024): Llama's maths with a bias on q, k and v."""

from __future__ import annotations

from slipstream.models.decoder import Decoder


class Qwen2(Decoder):
    """Names and maths are the shared decoder's."""
