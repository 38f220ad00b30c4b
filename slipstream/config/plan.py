"""The frozen plan of an engine: every choice with its reason. resolve() makes it once; nothing re-decides
later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slipstream.config.args import EngineArgs
from slipstream.config.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A decision: its value, why, and the flag that changes it (empty where none does)."""

    value: Any
    reason: str
    flag: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """What runs. Numbers are final, strings have no "auto" left.

    device: "cpu" or "cuda". dtype: torch's name of the weights' type. steps_in_flight: 1 is synchronous.
    num_blocks: None until the memory plan sized the pool (runner/memory.py), else fixed by a flag.
    choices: decision name -> Choice, in the order that `slipstream explain` prints.
    """

    args: EngineArgs
    spec: ModelSpec
    device: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    steps_in_flight: int
    num_blocks: int | None
    max_logprobs: int
    choices: dict[str, Choice]
