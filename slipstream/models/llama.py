"""Llama (Touvron et al., 2023, and Meta's later releases): biases only where the configuration asks."""

from __future__ import annotations

from slipstream.models.decoder import Decoder


class Llama(Decoder):
    """Names and maths are the shared decoder's."""
