"""One table of limits: what a request may ask, checked at the door by the Python API and the server alike.

Static rules (type, range, finiteness) hold for every model; ModelLimits adds what depends on the model and
the KV pool. Whatever passes here cannot make a step fail.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.contracts.errors import BadRequest

if TYPE_CHECKING:
    from slipstream.contracts.sampling_params import SamplingParams

Array = np.ndarray

GREEDY_TEMPERATURE = 1e-5

# Capacities of the row table's list columns, and caps that keep one request from harming the others.
MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_END_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 1024
MAX_LOGPROBS = 20
MAX_CONSTRAINT_CHARS = 2**17  # of a schema, regex, structural tag or list of choices, as text
MAX_GRAMMAR_CHARS = 2**15  # turning EBNF into Lark takes seconds for more
MAX_CHOICES = 4096
MAX_SEQUENCES = 4096  # prompts times n of one HTTP request
SEED_RANGE = (-(2**63), 2**63 - 1)


@dataclass(frozen=True, slots=True)
class Number:
    """An inclusive range of a numeric field; low_open excludes the low end itself."""

    field: str
    integer: bool
    low: float
    high: float
    optional: bool = False
    low_open: bool = False

    @property
    def limit(self) -> str:
        """The rule in words, as errors and docs print it."""
        kind, digits = ("an integer", "d") if self.integer else ("a finite number", "g")
        bounds = f"{'over' if self.low_open else 'at least'} {self.low:{digits}}"
        bounds += f" and at most {self.high:{digits}}"
        return f"must be {kind}, {bounds}" + (", or null" if self.optional else "")

    def check(self, value: Any) -> None:
        if value is None and self.optional:
            return
        kinds = (int,) if self.integer else (int, float)
        good = isinstance(value, kinds) and not isinstance(value, bool)
        if not good or not self.low <= value <= self.high:
            raise BadRequest(self.field, value, self.limit)
        if self.low_open and value == self.low:
            raise BadRequest(self.field, value, self.limit)


NUMBERS: tuple[Number, ...] = (
    Number("n", True, 1, MAX_N),
    Number("presence_penalty", False, -2.0, 2.0),
    Number("frequency_penalty", False, -2.0, 2.0),
    Number("repetition_penalty", False, 0.0, 1e4, low_open=True),
    Number("temperature", False, 0.0, 1e4),
    Number("top_p", False, 0.0, 1.0, low_open=True),
    Number("top_k", True, -1, 2**31 - 1),
    Number("min_p", False, 0.0, 1.0),
    Number("seed", True, *SEED_RANGE, optional=True),
    Number("max_tokens", True, 0, 2**31 - 1, optional=True),
    Number("min_tokens", True, 0, 2**31 - 1),
    Number("logprobs", True, -1, 2**31 - 1, optional=True),
    Number("prompt_logprobs", True, -1, 2**31 - 1, optional=True),
)
# Fields that only the HTTP API has; the server turns them into the ones above.
SERVER_NUMBERS: tuple[Number, ...] = (
    Number("top_logprobs", True, 0, 2**31 - 1, optional=True),
    Number("max_completion_tokens", True, 0, 2**31 - 1, optional=True),
    Number("max_output_tokens", True, 1, 2**31 - 1, optional=True),
    Number("best_of", True, 1, MAX_N, optional=True),
    Number("truncate_prompt_tokens", True, -1, 2**31 - 1, optional=True),
    Number("priority", True, -(2**31), 2**31 - 1, optional=True),
)
BOOLS = (
    "include_stop_str_in_output",
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What depends on the model and its start-up. kv_tokens: tokens that the whole KV pool can hold."""

    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    max_logprobs: int = MAX_LOGPROBS


def check_params(params: SamplingParams) -> None:
    """Static rules over every field. Raises BadRequest."""
    for rule in NUMBERS:
        rule.check(getattr(params, rule.field))
    for name in BOOLS:
        if not isinstance(getattr(params, name), bool):
            raise BadRequest(name, getattr(params, name), "must be true or false")
    _check_strings("stop", params.stop, MAX_STOP_STRINGS, MAX_STOP_STRING_CHARS)
    _check_strings("bad_words", params.bad_words, MAX_BAD_WORDS, MAX_STOP_STRING_CHARS)
    _check_ids("stop_token_ids", params.stop_token_ids, MAX_END_TOKEN_IDS)
    _check_ids("allowed_token_ids", params.allowed_token_ids, None, empty_ok=False)
    _check_bias(params.logit_bias)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise BadRequest("min_tokens", params.min_tokens, f"must be at most max_tokens={params.max_tokens}")
    if params.stop and not params.detokenize:
        raise BadRequest("stop", params.stop, "stop strings need detokenize=True")


def count_logprobs(asked: int | None, vocab_size: int) -> int:
    """Number of top logprobs: -1 where none are asked for; the vocabulary where all are (-1 of the API)."""
    if asked is None:
        return -1
    return vocab_size if asked == -1 else min(asked, vocab_size)


def check_request(
    prompt_token_ids: Sequence[int] | Array,
    params: SamplingParams,
    limits: ModelLimits,
    end_token_ids: Iterable[int] = (),
    bad_word_token_ids: Iterable[Sequence[int]] = (),
) -> None:
    """Rules that need the model: ids against the vocabulary, lengths against max_model_len and the KV pool,
    and combinations that leave no legal token. Raises BadRequest."""
    check_prompt(prompt_token_ids, params, limits)
    vocab = limits.vocab_size
    for field in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        for token in getattr(params, field) or ():
            if not 0 <= token < vocab:
                raise BadRequest(field, token, f"token id is out of vocabulary, must be 0 to {vocab - 1}")
    for field in ("logprobs", "prompt_logprobs"):
        count = getattr(params, field)
        if count is not None and (
            count > limits.max_logprobs or (count == -1 and limits.max_logprobs < vocab)
        ):
            raise BadRequest(field, count, f"must be at most max_logprobs={limits.max_logprobs}")
    banned = [words for words in bad_word_token_ids]
    if sum(len(words) for words in banned) > MAX_BAD_WORD_TOKENS:
        raise BadRequest(
            "bad_words", params.bad_words, f"must be at most {MAX_BAD_WORD_TOKENS} tokens together"
        )
    _check_some_token_left(params, vocab, set(end_token_ids), {w[0] for w in banned if len(w) == 1})


def check_prompt(
    prompt_token_ids: Sequence[int] | Array,
    params: SamplingParams,
    limits: ModelLimits,
    field: str = "prompt",
) -> None:
    """The prompt's length and ids. field: what holds it. Raises BadRequest that names that or max_tokens."""
    length = len(prompt_token_ids)
    if length == 0:
        raise BadRequest(field, [], "must hold at least one token")
    ids = np.asarray(prompt_token_ids)
    low, high = ids.min(), ids.max()
    if low < 0 or high >= limits.vocab_size:
        bad = low if low < 0 else high
        raise BadRequest(
            field, int(bad), f"token id is out of vocabulary, must be 0 to {limits.vocab_size - 1}"
        )
    wanted = params.max_tokens if params.max_tokens is not None else 1
    if length + wanted > limits.max_model_len:
        raise BadRequest(
            "max_tokens" if length < limits.max_model_len else field,
            wanted if length < limits.max_model_len else length,
            f"prompt of {length} tokens and max_tokens must fit max_model_len={limits.max_model_len}",
        )
    needed = -(-(length + max(wanted, 1)) // limits.block_size)
    if needed > limits.num_blocks:
        raise BadRequest(
            field,
            f"{length} tokens",
            f"needs {needed} KV blocks of {limits.block_size} tokens with "
            f"max_tokens={wanted}, and the pool has {limits.num_blocks}",
        )


def check_text(field: str, value: str) -> None:
    """Raises BadRequest for text that no encoding can hold: JSON's escapes and Python's strings may have half
    of a character that takes two codes in UTF-16."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRequest(field, value, "must be Unicode text, without lone surrogates") from None


def _check_strings(field: str, value: Any, most: int, chars: int) -> None:
    if value is None:
        return
    if not isinstance(value, list | tuple) or not all(isinstance(s, str) and s for s in value):
        raise BadRequest(field, value, "must be a list of strings that are not empty")
    if len(value) > most:
        raise BadRequest(field, len(value), f"must be at most {most} strings")
    if any(len(s) > chars for s in value):
        raise BadRequest(field, max(value, key=len), f"must be strings of at most {chars} characters")
    for text in value:
        check_text(field, text)


def _check_ids(field: str, value: Any, most: int | None, empty_ok: bool = True) -> None:
    if value is None:
        return
    if not isinstance(value, list | tuple) or not all(type(t) is int for t in value):
        raise BadRequest(field, value, "must be a list of token ids")
    if not value and not empty_ok:
        raise BadRequest(field, value, "must not be empty: no token could be chosen")
    if most is not None and len(value) > most:
        raise BadRequest(field, len(value), f"must be at most {most} token ids")


def _check_bias(value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, Mapping):
        raise BadRequest("logit_bias", value, "must map token ids to numbers")
    if len(value) > MAX_LOGIT_BIAS:
        raise BadRequest("logit_bias", len(value), f"must be at most {MAX_LOGIT_BIAS} entries")
    for token, bias in value.items():
        if type(token) is not int:
            raise BadRequest("logit_bias", token, "keys must be token ids")
        if not isinstance(bias, int | float) or isinstance(bias, bool) or not -100 <= bias <= 100:
            raise BadRequest(
                "logit_bias", bias, "values must be finite numbers, at least -100 and at most 100"
            )


def _check_some_token_left(params: SamplingParams, vocab: int, ends: set[int], banned: set[int]) -> None:
    """Refuse what leaves no legal token at the first position (later ones end the row with an error)."""
    allowed = set(params.allowed_token_ids) if params.allowed_token_ids is not None else None
    removed = banned | (ends if params.min_tokens > 0 else set())
    if allowed is not None and not allowed - removed:
        raise BadRequest(
            "allowed_token_ids",
            sorted(allowed)[:8],
            "bad_words, or end tokens under min_tokens, ban every allowed token: no token could be chosen",
        )
    if allowed is None and len(removed) >= vocab:
        raise BadRequest("bad_words", params.bad_words, "ban every token of the vocabulary")
