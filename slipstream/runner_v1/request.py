"""A request as the old runner keeps it: an object with Python lists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from slipstream.contracts.limits import MAX_END_TOKEN_IDS, count_logprobs
from slipstream.contracts.step import Admission, Finish
from slipstream.rows.columns import LEGAL, Column
from slipstream.sampling.pipeline import Pipeline

Array = np.ndarray
Declared = Mapping[str, Column]

# What sampling features read of a request beside their own columns; tokens and lengths change every step.
BASE_COLUMNS = (
    Column("prompt_len"),
    Column("min_len"),
    Column("seed_lo"),
    Column("seed_hi"),
    Column("end_ids", width=MAX_END_TOKEN_IDS),
)


@dataclass(slots=True)
class LiveRequest:
    """The owner of a row, from its admission until its row is released.

    tokens: prompt and output; drafts: what may follow them; blocks: of the KV cache, in order; num_computed:
    KV positions filled. num_logprobs, num_prompt_logprobs: -1 for none. features: as Pipeline.admit gave
    them; sampling: what it wrote, by column.
    """

    generation: int
    tokens: list[int]
    blocks: list[int]
    num_computed: int
    prompt_len: int
    max_len: int
    seed: int
    end_ids: frozenset[int]
    num_logprobs: int
    num_prompt_logprobs: int
    features: int
    sampling: dict[str, float | Array]
    finish: Finish = Finish.NONE
    drafts: list[int] = field(default_factory=list)

    @property
    def room(self) -> int:
        """Drafts that could be taken: one token more always comes."""
        return max(self.max_len - len(self.tokens) - 1, 0) if not self.finish else 0

    def constrain(self, legal: Array) -> None:
        """The tokens that may be next; drafts were not held against them."""
        self.sampling[LEGAL] = legal
        self.drafts = []

    def append(self, token: int, ok: bool) -> bool:
        """Take what was sampled; the request may end by it. False where there was no room or no token."""
        if len(self.tokens) >= self.max_len:
            self.finish = Finish.LENGTH
            return False
        if not ok:
            self.finish = Finish.ERROR
            return False
        self.tokens.append(token)
        if token in self.end_ids:
            self.finish = Finish.STOP
        elif len(self.tokens) >= self.max_len:
            self.finish = Finish.LENGTH
        return True


class RequestWriter:
    """See RowWriter: columns become entries of a dictionary."""

    def __init__(self, declared: Declared) -> None:
        self._declared = declared
        self.values: dict[str, float | Array] = {}

    def scalar(self, name: str, value: float) -> None:
        self.values[name] = value

    def span(self, name: str, values: Array, start: int = 0) -> None:
        column = self._declared[name]
        whole = np.zeros(column.width, np.float32 if column.dtype == "f32" else np.int32)
        whole[start : start + len(values)] = values
        self.values[name] = whole


def admit_request(
    admission: Admission, pipeline: Pipeline, declared: Declared, vocab_size: int
) -> LiveRequest:
    """declared: BASE_COLUMNS and the pipeline's, by name."""
    request, params = admission.request, admission.request.params
    write, prompt_len = RequestWriter(declared), len(request.prompt_token_ids)
    seed_lo, seed_hi = np.array([request.seed & (2**64 - 1)], "<u8").view("<i4").tolist()
    write.scalar("prompt_len", prompt_len)
    write.scalar("min_len", prompt_len + params.min_tokens)
    write.scalar("seed_lo", seed_lo)
    write.scalar("seed_hi", seed_hi)
    free = MAX_END_TOKEN_IDS - len(request.end_token_ids)
    write.span("end_ids", np.array([*request.end_token_ids, *[-1] * free], np.int32))
    features = pipeline.admit(request, write)
    return LiveRequest(
        generation=admission.generation,
        tokens=admission.tokens.tolist(),
        blocks=admission.blocks.tolist(),
        num_computed=admission.num_cached,
        prompt_len=prompt_len,
        max_len=request.max_len,
        seed=request.seed,
        end_ids=frozenset(request.end_token_ids),
        num_logprobs=count_logprobs(params.logprobs, vocab_size),
        num_prompt_logprobs=count_logprobs(params.prompt_logprobs, vocab_size),
        features=features,
        sampling=write.values,
    )
