"""Shapes of the answers, as typed dictionaries, and the parts that several endpoints build: usage and
logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NotRequired

from typing_extensions import TypedDict

from slipstream.server.assistant import Call, CallDelta

if TYPE_CHECKING:
    from slipstream.engine.outputs import Logprob, RequestOutput, TokenScores
    from slipstream.text.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0  # JSON has no infinity


class CachedTokens(TypedDict):
    cached_tokens: int


class CompletionDetails(TypedDict, total=False):
    """reasoning_tokens: where thoughts are told apart. The others where drafts were verified (speculation):
    those that were taken and those that were not."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(TypedDict):
    """Counts of tokens. A prompt counts once, whatever n is; cached_tokens came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: NotRequired[CompletionDetails]


class CompletionLogprobs(TypedDict):
    """Parallel lists over tokens. The first prompt token (with echo) has no probability: null."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptScore(TypedDict):
    logprob: float
    rank: int | None
    decoded_token: str | None


PromptScores = list[dict[str, PromptScore] | None]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: NotRequired[PromptScores | None]
    prompt_token_ids: NotRequired[list[int]]
    token_ids: NotRequired[list[int]]


class Completion(TypedDict):
    """Answer of /v1/completions; with stream=true also every event, whose choice holds only what is new."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage]


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]


class ChatMessage(TypedDict):
    """content: null beside calls or thoughts where there is none. tool_calls: whole in a message, in pieces
    in deltas."""

    role: NotRequired[str]
    content: NotRequired[str | None]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[Call] | list[CallDelta]]


class ChatChoice(TypedDict):
    """message in an answer, delta in an event of a stream."""

    index: int
    message: NotRequired[ChatMessage]
    delta: NotRequired[ChatMessage]
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[int | str | None]
    token_ids: NotRequired[list[int]]


class ChatCompletion(TypedDict):
    """Answer of /v1/chat/completions, and every event of its stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: NotRequired[Usage]
    prompt_logprobs: NotRequired[PromptScores | None]
    prompt_token_ids: NotRequired[list[int]]


class UsageCount:
    """Adds up usage over the outputs of a request's prompts, whole or in pieces."""

    def __init__(self) -> None:
        self._prompt: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        self._drafts: dict[int, tuple[int, int]] = {}
        self._completion = 0

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        self._prompt[prompt_index] = len(output.prompt_token_ids or ())
        self._cached[prompt_index] = max(self._cached.get(prompt_index, 0), output.num_cached_tokens or 0)
        self._completion += sum(len(piece.token_ids) for piece in output.outputs)
        if output.metrics is not None and output.metrics.draft_tokens:
            self._drafts[prompt_index] = output.metrics.draft_tokens, output.metrics.accepted_tokens

    def usage(self, thought_tokens: int | None = None) -> Usage:
        """thought_tokens: of thoughts, where they are told apart."""
        prompt = sum(self._prompt.values())
        usage: Usage = {
            "prompt_tokens": prompt,
            "completion_tokens": self._completion,
            "total_tokens": prompt + self._completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }
        details: CompletionDetails = {}
        if thought_tokens is not None:
            details["reasoning_tokens"] = thought_tokens
        if self._drafts:
            verified, taken = (sum(counts) for counts in zip(*self._drafts.values(), strict=True))
            details["accepted_prediction_tokens"] = taken
            details["rejected_prediction_tokens"] = verified - taken
        if details:
            usage["completion_tokens_details"] = details
        return usage


class CompletionScores:
    """Builds logprobs of one choice of /v1/completions, over one call or several (text offsets go on).
    by_id: tokens are named by their ids."""

    def __init__(self, by_id: bool = False) -> None:
        self._by_id, self._offset = by_id, 0

    def build(
        self, token_ids: Sequence[int], scores: Sequence[TokenScores | None], first_text: str = ""
    ) -> CompletionLogprobs:
        """scores[i] belongs to token_ids[i] and holds it. first_text: the token whose score is None."""
        built: CompletionLogprobs = {
            "text_offset": [],
            "token_logprobs": [],
            "tokens": [],
            "top_logprobs": [],
        }
        for token, score in zip(token_ids, scores, strict=True):
            text = first_text if score is None else score[token].decoded_token or ""
            built["tokens"].append(_named(token) if self._by_id else text)
            built["text_offset"].append(self._offset)
            built["token_logprobs"].append(None if score is None else finite(score[token].logprob))
            tops = None if score is None else _by_id(score) if self._by_id else _by_text(score)
            built["top_logprobs"].append(tops)
            self._offset += len(text)
        return built


def _named(token: int) -> str:
    """As vLLM names a token by its id."""
    return f"token_id:{token}"


def _by_id(score: TokenScores) -> dict[str, float]:
    best = sorted(score.items(), key=lambda item: -item[1].logprob)
    return {_named(token): finite(entry.logprob) for token, entry in best}


def _by_text(score: TokenScores) -> dict[str, float]:
    """Best first, so that of two ids with one text the likelier stays."""
    texts: dict[str, float] = {}
    for entry in sorted(score.values(), key=lambda entry: -entry.logprob):
        texts.setdefault(entry.decoded_token or "", finite(entry.logprob))
    return texts


class ChatScores:
    """Builds logprobs of chat: an entry a token, with its `top` likeliest alternatives, best first. by_id:
    tokens are named by their ids."""

    def __init__(self, tokenizer: Tokenizer | None, top: int, by_id: bool = False) -> None:
        self._tokenizer, self._top, self._by_id = tokenizer, top, by_id

    def build(self, token_ids: Sequence[int], scores: Sequence[TokenScores]) -> ChatLogprobs:
        content: list[TokenLogprob] = []
        for token, score in zip(token_ids, scores, strict=True):
            best = sorted(score, key=lambda other: -score[other].logprob)[: self._top]
            tops = [self._entry(other, score[other]) for other in best]
            content.append({**self._entry(token, score[token]), "top_logprobs": tops})
        return {"content": content}

    def _entry(self, token: int, score: Logprob) -> TopLogprob:
        """bytes: the token's own, though its text shows U+FFFD where they are a part of a character."""
        text = score.decoded_token or ""
        own = None if self._tokenizer is None else self._tokenizer.token_bytes(token)
        name = _named(token) if self._by_id else text
        return {"token": name, "logprob": finite(score.logprob), "bytes": list(own or text.encode())}


def prompt_scores(scores: Sequence[TokenScores | None] | None) -> PromptScores | None:
    """vLLM's prompt_logprobs: for every prompt token a map of token id to its score; null for the first."""
    if scores is None:
        return None
    return [
        None if score is None else {str(token): _prompt_score(entry) for token, entry in score.items()}
        for score in scores
    ]


def _prompt_score(entry: Logprob) -> PromptScore:
    return {"logprob": finite(entry.logprob), "rank": entry.rank, "decoded_token": entry.decoded_token}


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
