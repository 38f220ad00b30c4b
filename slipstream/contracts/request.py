"""A request as the engine sees it: integers and arrays, no text. The front end owns string ids and text."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from slipstream.contracts.sampling_params import SamplingParams

Array = np.ndarray


@dataclass(slots=True)
class EngineRequest:
    """One sequence to generate; a request with n samples becomes n of these.

    key: unique for the life of the engine, given by the front end.
    prompt_token_ids: int32 [prompt_len].
    seed: 64-bit, always set: the user's (mixed with the sample index where n > 1) or one drawn at the door.
    end_token_ids: the ids that end the row: the model's end tokens unless ignore_eos, and stop_token_ids.
    max_len: prompt_len + max_tokens, at most max_model_len. The row ends when it holds this many tokens.
    bad_word_token_ids: every banned word as token sequences (tokenised by the front end).
    priority: lower is served first (policy "priority"); arrival: time.monotonic() seconds at the door.
    resumed_token_ids: int32; tokens already produced and delivered by an engine that is gone: they go on from
    there.
    admit_by: time.monotonic() seconds, which all processes of a host share, as arrival: from then on it is
    refused, unless it has had a row. first: key of the sample 0 of its request; once that one has had a row,
    so may this, however late.
    grammar: what params.structured_outputs became at the door (grammar/form.py); empty where nothing
    constrains the text.
    """

    key: int
    prompt_token_ids: Array
    params: SamplingParams
    seed: int
    end_token_ids: tuple[int, ...]
    max_len: int
    bad_word_token_ids: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    arrival: float = 0.0
    cache_salt: str | None = None
    resumed_token_ids: Array = field(default_factory=lambda: np.empty(0, np.int32))
    grammar: str = ""
    admit_by: float = math.inf
    first: int = -1
