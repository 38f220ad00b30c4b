"""From what users give (text or ids, SamplingParams) to what the engine takes: arrays, end ids, lengths,
checked against the table of limits."""

from __future__ import annotations

import functools
import logging
import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

import numpy as np

from slipstream.config.args import EngineArgs
from slipstream.config.structured_outputs import DECISION, NONE, config_of
from slipstream.contracts.errors import BadRequest, EngineDeadError, EngineError
from slipstream.contracts.limits import MAX_END_TOKEN_IDS, check_request, check_text
from slipstream.contracts.sampling_params import SamplingParams
from slipstream.engine import processes
from slipstream.engine.client import EngineInfo
from slipstream.text.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from slipstream.grammar.trial import Trials

log = logging.getLogger("slipstream.engine")

Array = np.ndarray
_CACHED_WORDS = 4096


class TextPrompt(TypedDict):
    """A prompt as text. cache_salt: only requests of the same salt share KV blocks."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids. prompt: its text, if known; only carried along."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that passed every check. token_ids: as a list for people, tokens: int32 for the engine; seed:
    of sample 0; max_len: prompt and output together."""

    text: str | None
    token_ids: list[int]
    tokens: Array
    params: SamplingParams
    seed: int
    end_token_ids: tuple[int, ...]
    max_len: int
    bad_word_token_ids: tuple[tuple[int, ...], ...]
    priority: int
    cache_salt: str | None
    grammar: str = ""


class InputProcessor:
    """tokenizer: None where only ids are taken. seed: of the seeds that unseeded requests get."""

    def __init__(self, tokenizer: Tokenizer | None, info: EngineInfo, seed: int) -> None:
        self._tokenizer = tokenizer
        self._limits = info.limits
        own = tokenizer.end_token_ids if tokenizer is not None else ()
        vocab = info.limits.vocab_size
        self._end_token_ids = tuple(i for i in dict.fromkeys((*info.end_token_ids, *own)) if i < vocab)
        self._by_priority = info.plan.get("scheduling_policy", {}).get("value") == "priority"
        self._random = random.Random(seed)
        self._structured = config_of(info.plan)
        self._opening, self._closed = threading.Lock(), False
        self._trials: Trials | None = None
        self._constrains = tokenizer is not None and self._structured.backend != NONE
        # A banned word is tokenised once, not once a prompt.
        self._word_ids = functools.lru_cache(_CACHED_WORDS)(self._tokenise_word)

    def _tried(self) -> Trials:
        """What tries grammars. Not needed where texts are free."""
        from slipstream.grammar.trial import share_trials

        assert self._tokenizer is not None
        with self._opening:
            if self._closed:
                raise EngineDeadError("the engine was shut down")
            if self._trials is None:
                vocab, ends, backend = self._limits.vocab_size, self._end_token_ids, self._structured.backend
                self._trials = share_trials(backend, self._tokenizer, vocab, ends, processes.spawn)
            return self._trials

    def begin_trials(self) -> None:
        """What takes a second or two of the first grammar; see Trials.begin."""
        if not self._constrains:
            return
        try:
            self._tried().begin()
        except (ValueError, EngineError) as error:
            log.warning("%s: %s", DECISION, error)

    def close(self) -> None:
        """End the process that tries grammars, unless others have it too."""
        with self._opening:
            self._closed, self._trials = True, None

    def prepare(self, prompt: Prompt, params: SamplingParams, priority: int = 0) -> PreparedRequest:
        """Raises BadRequest that names the field, its value and the limit. Waits until a grammar is compiled,
        so an event loop has another thread call it for one."""
        if priority and not self._by_priority:
            raise BadRequest("priority", priority, "must be 0 unless --scheduling-policy=priority")
        text, given, salt = _parts(prompt)
        token_ids = self._encode(text) if given is None else given
        # Where a grammar is at its end nothing but an end token is legal, so it ends the text.
        endless = params.ignore_eos and params.structured_outputs is None
        ends = () if endless else self._end_token_ids
        ends = tuple(dict.fromkeys((*ends, *(params.stop_token_ids or ()))))
        if len(ends) > MAX_END_TOKEN_IDS:
            limit = f"must be at most {MAX_END_TOKEN_IDS}, together with the model's end tokens"
            raise BadRequest("stop_token_ids", len(ends), limit)
        banned = self._banned(params)
        if params.stop and self._tokenizer is None:
            raise BadRequest("stop", params.stop, "needs a tokenizer: the engine runs without one")
        try:
            tokens = np.array(token_ids, np.int32)
        except OverflowError:  # no vocabulary is that large, which the check says
            tokens = np.array(token_ids, object)
        check_request(tokens, params, self._limits, ends, banned)
        grammar = self._grammar(params, banned)
        most = self._limits.max_model_len
        return PreparedRequest(
            text=text,
            token_ids=token_ids,
            tokens=tokens,
            params=params,
            seed=params.seed if params.seed is not None else self._random.getrandbits(64) - 2**63,
            end_token_ids=ends,
            max_len=most if params.max_tokens is None else min(len(token_ids) + params.max_tokens, most),
            bad_word_token_ids=banned,
            priority=priority,
            cache_salt=salt,
            grammar=grammar,
        )

    def _encode(self, text: str | None) -> list[int]:
        assert text is not None
        if self._tokenizer is None:
            raise BadRequest("prompt", text, "must be token ids: the engine runs without a tokenizer")
        check_text("prompt", text)
        return self._tokenizer.encode(text, add_special_tokens=True)

    def _grammar(self, params: SamplingParams, banned: Sequence[Sequence[int]]) -> str:
        """What constrains the text; empty where nothing does."""
        asked = params.structured_outputs
        if asked is None:
            return ""
        if not self._constrains:
            needs = "a tokenizer" if self._tokenizer is None else "llguidance"
            raise asked.wrong(f"needs {needs}: the engine runs without")
        grammar, legal = self._tried().check(asked, self._structured)
        legal[[word[0] for word in banned if len(word) == 1]] = False
        allowed = params.allowed_token_ids
        if not (legal if allowed is None else legal[list(allowed)]).any():
            limit = "allows no first token that allowed_token_ids and bad_words leave"
            raise asked.wrong(limit)
        return grammar

    def _banned(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Each bad word as it is spelled at the start of a text and, where that has as many tokens, after a
        space (vLLM's rule)."""
        if not params.bad_words:
            return ()
        if self._tokenizer is None:
            raise BadRequest("bad_words", params.bad_words, "needs a tokenizer: the engine runs without one")
        return tuple(ids for word in params.bad_words for ids in self._word_ids(word))

    def _tokenise_word(self, word: str) -> list[tuple[int, ...]]:
        assert self._tokenizer is not None
        bare = word.lstrip() or word
        plain = tuple(self._tokenizer.encode(bare, add_special_tokens=False))
        if not plain:
            raise BadRequest("bad_words", word, "must have a token in the vocabulary")
        spaced = tuple(self._tokenizer.encode(" " + bare, add_special_tokens=False))
        another = len(spaced) == len(plain) and spaced[0] != plain[0]
        return [plain, spaced] if another else [plain]


def open_tokenizer(args: EngineArgs) -> Tokenizer | None:
    """The tokenizer that the flags name; None with skip_tokenizer_init. Raises ValueError."""
    if args.skip_tokenizer_init:
        return None
    return load_tokenizer(args.tokenizer) if args.tokenizer else load_tokenizer(args.model, "model")


def mix_seed(seed: int, index: int) -> int:
    """The seed of sample `index`: sample 0 has the request's own, the others 64 mixed bits of both (the
    finaliser of SplitMix64; Steele, Lea and Flood, 2014), as a signed number."""
    if index == 0:
        return seed
    mask = 2**64 - 1
    x = (seed + index * 0x9E3779B97F4A7C15) & mask
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    x ^= x >> 31
    return x - 2**64 if x >= 2**63 else x


def _parts(prompt: Prompt) -> tuple[str | None, list[int] | None, str | None]:
    """(text, token ids, cache salt) of any kind of prompt."""
    if isinstance(prompt, str):
        return prompt, None, None
    if not isinstance(prompt, Mapping):
        return None, _ids(prompt), None
    fields: dict[str, Any] = dict(prompt)
    text, ids, salt = (fields.pop(name, None) for name in ("prompt", "prompt_token_ids", "cache_salt"))
    if fields:
        known = "a prompt has the fields prompt, prompt_token_ids and cache_salt"
        raise BadRequest("prompt", sorted(map(str, fields)), known)
    if not isinstance(text, str) and (text is not None or ids is None):
        raise BadRequest("prompt", text, "must be a string, or token ids in prompt_token_ids")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise BadRequest("cache_salt", salt, "must be a string that is not empty")
    check_text("cache_salt", salt or "")
    return text, None if ids is None else _ids(ids), salt


def _ids(given: Sequence[int]) -> list[int]:
    """Token ids as a list of Python integers."""
    if isinstance(given, np.ndarray):
        given = given.tolist()
    if not isinstance(given, list | tuple | range) or not set(map(type, given)) <= {int}:
        raise BadRequest("prompt", given, "must be text or a list of token ids")
    return given if isinstance(given, list) else list(given)
