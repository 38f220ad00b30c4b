"""Mistral (Jiang et al., 2023): Llama's maths with a sliding window, which the spec states layer by layer."""

from __future__ import annotations

from slipstream.models.decoder import Decoder


class Mistral(Decoder):
    """Names and maths are the shared decoder's."""
