"""What a user asks of the sampler. Names, defaults and meaning follow vLLM; limits.py checks them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from slipstream.contracts import limits
from slipstream.contracts.structured_outputs import StructuredOutputsParams


class RequestOutputKind(IntEnum):
    """CUMULATIVE: every output holds all text so far; DELTA: only what is new; FINAL_ONLY: one output at the
    end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(slots=True)
class SamplingParams:
    """How to choose tokens and when to end. Raises BadRequest (a ValueError) that names the field.

    The order in which features act on a row's logits is stated in docs/sampling.md: allowed ids, bias,
    minimum length, bad words, repetition, frequency and presence penalties, temperature, min_p, top_k, top_p.
    `logprobs` counts the alternatives a generated token returns (values are of the unmodified distribution);
    `top_k` of 0 or -1 means all tokens; `seed` makes a request repeatable, alone or in any batch;
    `structured_outputs` constrains the text.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        limits.check_params(self)

    @property
    def greedy(self) -> bool:
        """True where the most likely token is taken: temperatures under 1e-5 count as zero."""
        return self.temperature < limits.GREEDY_TEMPERATURE

    def clone(self, **changes: object) -> SamplingParams:
        """A copy with some fields changed, checked again."""
        return replace(self, **changes)  # type: ignore[arg-type]
