"""Flags whose value is a JSON object, as text or read already; and what vLLM's rules read of the one for
speculation (speculation.py has ours)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from slipstream.config.args import flag_name

JsonFlag = str | dict[str, Any] | None
Method = Literal[
    "ngram", "suffix", "draft_model", "eagle", "eagle3", "medusa", "mlp_speculator", "custom_class"
]
METHODS: tuple[Method, ...] = (
    "ngram", "suffix", "draft_model", "eagle", "eagle3", "medusa", "mlp_speculator", "custom_class",
)  # fmt: skip
# vLLM's other names, of which ngram_gpu is ngram here; a model's own `..._mtp` is one, too.
VLLM_METHODS = ("ngram_gpu", "mtp", "dflash", "dspark", "extract_hidden_states")


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """--speculative-config, as far as vLLM's rules depend on it. method: one that vLLM has."""

    method: str
    parallel_drafting: bool = False
    disable_padded_drafter_batch: bool = False


def read_object(field: str, value: JsonFlag) -> dict[str, Any]:
    """The caller's own. Raises ValueError that names the field's flag."""
    start = f"{flag_name(field)}={value!r}: "
    try:
        fields = json.loads(value) if isinstance(value, str) else value or {}
    except json.JSONDecodeError as error:
        raise ValueError(f"{start}not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f'{start}must be an object such as {{"key": "value"}}')
    return dict(fields)


def method_of(fields: dict[str, Any], shown: JsonFlag) -> str:
    """Ours, or one that vLLM alone has. Without a method, a model named ngram is that method and any other a
    draft model, as in vLLM. Raises ValueError; shown: the flag's value, for its text."""
    start = f"--speculative-config={shown!r}: "
    model = fields.get("model")
    implied = "ngram" if model in ("ngram", "[ngram]") else None if model is None else "draft_model"
    method = fields.get("method", implied)
    if method is None:
        raise ValueError(f"{start}method (or model) is missing; methods are {', '.join(METHODS)}")
    if not isinstance(method, str) or not (method in METHODS + VLLM_METHODS or method.endswith("_mtp")):
        raise ValueError(f"{start}method must be one of {', '.join(METHODS)}")
    return method


def read_speculation(value: JsonFlag) -> Speculation | None:
    """Raises ValueError."""
    if value is None:
        return None
    fields = read_object("speculative_config", value)
    start = f"--speculative-config={value!r}: "
    method = method_of(fields, value)
    tokens = fields.get("num_speculative_tokens", 1)
    if type(tokens) is not int or tokens < 1:
        raise ValueError(f"{start}num_speculative_tokens must be an integer of at least 1")
    names = ("parallel_drafting", "disable_padded_drafter_batch")
    switches = {name: fields.get(name, False) for name in names}
    for name, on in switches.items():
        if type(on) is not bool:
            raise ValueError(f"{start}{name} must be true or false")
    return Speculation(method=method, **switches)
