"""--speculative-config as one frozen object. Keys and meaning follow vLLM; what cannot be honoured is a
ValueError that names the key."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from slipstream.config.json_flag import METHODS, JsonFlag, Method, method_of, read_object

# Methods whose `model` is a folder of weights.
WITH_WEIGHTS = ("draft_model", "eagle", "eagle3", "medusa", "mlp_speculator")
# Methods without attention layers of their own. A custom class may have some.
WITHOUT_KV = ("ngram", "suffix", "medusa", "mlp_speculator")
LOOKUPS = ("ngram", "suffix")
# Tokens of the longest match that kernels/history.py looks for (a test compares them).
LONGEST_MATCH = 63
# vLLM's names of what is one thing here: our n-gram runs on the device anyway.
ALIASES = {"ngram_gpu": "ngram"}
MAX_SPECULATIVE_TOKENS = 16
# Where neither the user nor the drafter says: lookups cost little, a pass of a model costs more.
DEFAULT_TOKENS = {"ngram": 8, "suffix": MAX_SPECULATIVE_TOKENS}
OTHER_TOKENS = 4
DEFAULT_LOOKUP = 5
STRICT = ("strict", "standard")  # vLLM's older and newer name of sampling that changes no distribution
SYNTHETIC = "synthetic"
RATE_KEYS = ("synthetic_acceptance_rates", "synthetic_acceptance_length", "synthetic_acceptance_rate")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """model: a folder or GGUF file of the drafter, the import path of a class for custom_class, else empty.
    num_speculative_tokens: drafts of a row and step at most, K. The lookup and suffix fields hold vLLM's
    defaults where the method is another.

    acceptance: empty with rejection_sample_method "strict"; with "synthetic" K probabilities, of draft j
    being taken where all before it were.
    """

    method: Method
    model: str
    num_speculative_tokens: int
    prompt_lookup_min: int = DEFAULT_LOOKUP
    prompt_lookup_max: int = DEFAULT_LOOKUP
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    rejection_sample_method: Literal["strict", "synthetic"] = "strict"
    acceptance: tuple[float, ...] = ()

    @property
    def uneven(self) -> bool:
        """Rows have unlike many drafts, and making more of them than are used costs nothing."""
        return self.method in LOOKUPS

    @property
    def lookahead(self) -> int:
        """KV positions past those of a step that the drafter may write: see DraftStep.num_drafts."""
        return 0 if self.method in WITHOUT_KV else 1 + self.num_speculative_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterFacts:
    """What a drafter's config says, read without its weights; None: it does not say. hidden_size: of the
    target it was made for. num_tokens: drafts it was made to give; max_tokens: the most it can give.
    kv_width: elements of K and V a token over its own layers."""

    vocab_size: int | None = None
    hidden_size: int | None = None
    num_tokens: int | None = None
    max_tokens: int | None = None
    kv_width: int = 0


NO_FACTS = DrafterFacts()


def _integer(least: int, most: int | None = None) -> tuple[Callable[[Any], bool], str]:
    limit = f"must be an integer of at least {least}" + ("" if most is None else f" and at most {most}")
    return lambda value: type(value) is int and least <= value and (most is None or value <= most), limit


def _number(low: float, high: float) -> tuple[Callable[[Any], bool], str]:
    limit = f"must be a number, at least {low:g}" + (f" and at most {high:g}" if high < float("inf") else "")
    return lambda value: type(value) in (int, float) and low <= value <= high, limit


def _is_rates(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(type(r) in (int, float) and 0 <= r <= 1 for r in value)


_TEXT: tuple[Callable[[Any], bool], str] = (
    lambda value: isinstance(value, str) and bool(value),
    "must be a text that is not empty",
)
# Key -> (is it well formed?, the rule in words).
_FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "method": _TEXT,
    "model": _TEXT,
    "num_speculative_tokens": _integer(1),
    "prompt_lookup_min": _integer(1, LONGEST_MATCH),
    "prompt_lookup_max": _integer(1, LONGEST_MATCH),
    "suffix_decoding_max_tree_depth": _integer(2, LONGEST_MATCH + 1),
    "suffix_decoding_max_cached_requests": _integer(0),
    "suffix_decoding_max_spec_factor": _number(0.0, float("inf")),
    "suffix_decoding_min_token_prob": _number(0.0, 1.0),
    "rejection_sample_method": _TEXT,
    "synthetic_acceptance_rates": (_is_rates, "must be a list of numbers from 0 to 1"),
    "synthetic_acceptance_length": _number(1.0, MAX_SPECULATIVE_TOKENS + 1),
    "synthetic_acceptance_rate": _number(0.0, 1.0),
    "draft_tensor_parallel_size": _integer(1),
}
# Keys that mean something for one method alone, by their beginning.
_OWNERS = {"prompt_lookup_": "ngram", "suffix_decoding_": "suffix"}


class SpeculationError(ValueError):
    """--speculative-config cannot be honoured. The text names the flag and the key."""

    def __init__(self, key: str, value: Any, rule: str) -> None:
        super().__init__(f"--speculative-config: {key}={value!r}: {rule}")


def asked_method(flag: JsonFlag) -> tuple[Method, dict[str, Any]] | None:
    """The method and the object's fields, each well formed; None without the flag. Raises ValueError."""
    if flag is None:
        return None
    fields = read_object("speculative_config", flag)
    asked = method_of(fields, flag)
    method = ALIASES.get(asked, asked)
    if method not in METHODS:
        raise SpeculationError("method", asked, f"is not there; methods are {', '.join(METHODS)}")
    for key, value in fields.items():
        if key not in _FORMS:
            raise SpeculationError(key, value, f"unknown key; keys are {', '.join(_FORMS)}")
        is_right, rule = _FORMS[key]
        if not is_right(value):
            raise SpeculationError(key, value, rule)
        owner = next((name for start, name in _OWNERS.items() if key.startswith(start)), method)
        if owner != method:
            raise SpeculationError(key, value, f"is for method {owner}, and the method is {method}")
    if (size := fields.get("draft_tensor_parallel_size", 1)) != 1:
        raise SpeculationError("draft_tensor_parallel_size", size, "must be 1: a drafter runs on one device")
    _check_model(method, fields)
    return method, fields


def _check_model(method: str, fields: Mapping[str, Any]) -> None:
    model = fields.get("model")
    if model is None and method in WITH_WEIGHTS:
        raise SpeculationError("model", None, f"method {method} needs the drafter's folder")
    if method == "custom_class" and (model is None or not _is_import_path(model)):
        rule = "must be the import path of a Drafter's class, such as package.module.Class"
        raise SpeculationError("model", model, rule)
    if method in ("ngram", "suffix") and model not in (None, method, f"[{method}]"):
        raise SpeculationError("model", model, f"method {method} has none")


def _is_import_path(text: str) -> bool:
    return "." in text and all(word.isidentifier() for word in text.split("."))


def read_speculative_config(
    flag: JsonFlag, facts: DrafterFacts, *, vocab_size: int, hidden_size: int
) -> SpeculativeConfig | None:
    """facts: of the drafter's own files; vocab_size, hidden_size: of the target. None without the flag.
    Raises ValueError that names the key."""
    found = asked_method(flag)
    if found is None:
        return None
    method, fields = found
    _check_facts(fields.get("model"), facts, vocab_size, hidden_size)
    tokens = _num_tokens(method, fields, facts)
    low, high = _lookup(fields)
    sampling = fields.get("rejection_sample_method", "strict")
    if sampling not in (*STRICT, SYNTHETIC):
        rule = f"must be one of {', '.join((*STRICT, SYNTHETIC))}"
        raise SpeculationError("rejection_sample_method", sampling, rule)
    synthetic = sampling == SYNTHETIC
    return SpeculativeConfig(
        method=method,
        model=fields.get("model", "") if method not in ("ngram", "suffix") else "",
        num_speculative_tokens=tokens,
        prompt_lookup_min=low,
        prompt_lookup_max=high,
        rejection_sample_method="synthetic" if synthetic else "strict",
        acceptance=_acceptance(fields, tokens, synthetic),
        **{key: value for key, value in fields.items() if key.startswith("suffix_decoding_")},
    )


def _check_facts(model: Any, facts: DrafterFacts, vocab_size: int, hidden_size: int) -> None:
    if facts.vocab_size not in (None, vocab_size):
        rule = f"the drafter's vocabulary has {facts.vocab_size} tokens, the model's {vocab_size}"
        raise SpeculationError("model", model, rule)
    if facts.hidden_size not in (None, hidden_size):
        rule = f"the drafter was made for a hidden size of {facts.hidden_size}, the model's is {hidden_size}"
        raise SpeculationError("model", model, rule)


def _num_tokens(method: str, fields: Mapping[str, Any], facts: DrafterFacts) -> int:
    key = "num_speculative_tokens"
    most = facts.max_tokens or MAX_SPECULATIVE_TOKENS
    default = facts.num_tokens or min(DEFAULT_TOKENS.get(method, OTHER_TOKENS), most)
    tokens: int = fields.get(key, min(default, MAX_SPECULATIVE_TOKENS))
    if tokens > MAX_SPECULATIVE_TOKENS:
        raise SpeculationError(key, tokens, f"must be at most {MAX_SPECULATIVE_TOKENS}")
    if tokens > most:
        raise SpeculationError(key, tokens, f"must be at most {most}, which the drafter at model can give")
    return tokens


def _lookup(fields: Mapping[str, Any]) -> tuple[int, int]:
    """As in vLLM: one that is missing is the other one."""
    low, high = (fields.get(f"prompt_lookup_{end}") for end in ("min", "max"))
    low, high = low or high or DEFAULT_LOOKUP, high or low or DEFAULT_LOOKUP
    if low > high:
        raise SpeculationError("prompt_lookup_min", low, f"must be at most prompt_lookup_max={high}")
    return low, high


def _acceptance(fields: Mapping[str, Any], tokens: int, synthetic: bool) -> tuple[float, ...]:
    """Conditional probabilities, out of vLLM's unconditional ones."""
    given = [key for key in RATE_KEYS if key in fields]
    if not synthetic:
        if given:
            rule = "needs rejection_sample_method=synthetic"
            raise SpeculationError(given[0], fields[given[0]], rule)
        return ()
    if len(given) != 1:
        rule = f"needs one of {', '.join(RATE_KEYS)}" + (f", not {len(given)}" if given else "")
        raise SpeculationError("rejection_sample_method", SYNTHETIC, rule)
    key, value = given[0], fields[given[0]]
    if key == "synthetic_acceptance_rate":
        return (_geometric(value, tokens),) * tokens
    if key == "synthetic_acceptance_length":
        if value > tokens + 1:
            raise SpeculationError(key, value, f"must be at most num_speculative_tokens + 1 = {tokens + 1}")
        rates = [min(max(value - 1 - place, 0.0), 1.0) for place in range(tokens)]
    else:
        rates = list(value)
        if len(rates) != tokens:
            raise SpeculationError(key, value, f"must be num_speculative_tokens={tokens} numbers")
        if any(later > earlier for earlier, later in itertools.pairwise(rates)):
            raise SpeculationError(key, value, "must not rise: each is of all drafts so far being taken")
    before = [1.0, *rates[:-1]]
    return tuple(rate / earlier if earlier else 0.0 for rate, earlier in zip(rates, before, strict=True))


def _geometric(mean: float, tokens: int) -> float:
    """The p whose powers p .. p^tokens have this mean."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**power for power in range(1, tokens + 1)) / tokens < mean:
            low = middle
        else:
            high = middle
    return high
