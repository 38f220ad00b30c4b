"""An engine without a model behind the EngineClient protocol: tokens come from a script, in steps that a
random number generator chooses. It keeps books that tests read."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from slipstream.contracts.limits import ModelLimits
from slipstream.contracts.outputs import EngineOutputs, EngineStats
from slipstream.contracts.request import EngineRequest
from slipstream.contracts.step import Finish, PromptLogprobs, TokenLogprobs
from slipstream.engine.client import EngineHealth, EngineInfo

LIMITS = ModelLimits(vocab_size=320, max_model_len=256, block_size=16, num_blocks=100)
News = tuple[int, Sequence[int], Finish]


def make_outputs(news: Sequence[News], **fields) -> EngineOutputs:
    """(key, tokens, finish) of each request with news, as a step's arrays."""
    return EngineOutputs(
        keys=np.array([key for key, _, _ in news], np.int64),
        num_tokens=np.array([len(tokens) for _, tokens, _ in news], np.int32),
        tokens=np.array([token for _, tokens, _ in news for token in tokens], np.int32),
        finish=np.array([finish for *_, finish in news], np.int32),
        **fields,
    )


def made_up_scores(token: int, width: int) -> tuple[list[int], list[float], int]:
    """(ids, values, rank) of a token and `width` alternatives, the first of which is the token + 1."""
    others = [(token + 1 + i) % LIMITS.vocab_size for i in range(width)]
    return [token, *others], [-9.0 - token, *(-0.5 - i for i in range(width))], 10 + token


@dataclass
class ScriptedClient:
    """reply: the tokens of a request; it ends with LENGTH after them or at max_len, with STOP at an end
    token, and with ERROR where the token is None. most: tokens of a request in one step. late: news of a
    request that still comes after its abort, as what was on its way does."""

    reply: Callable[[EngineRequest], list[int | None]]
    seed: int = 0
    most: int = 1
    late: bool = True
    info: EngineInfo = field(default_factory=lambda: EngineInfo(LIMITS, (2,)))
    live: dict[int, tuple[EngineRequest, list[int | None]]] = field(default_factory=dict)
    seen: list[EngineRequest] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    closed: bool = False
    up: bool = True
    pid: int | None = None

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._dying: list[News] = []
        self._pipe = os.pipe()
        self._resting = False

    def filenos(self) -> tuple[int, ...]:
        return (self._pipe[0],)

    @property
    def health(self) -> EngineHealth:
        return EngineHealth(self.up)

    def tend(self, busy: bool) -> bool:
        return False

    def add(self, requests: Sequence[EngineRequest]) -> None:
        for request in requests:
            assert request.key not in self.live
            self.live[request.key] = (request, list(self.reply(request)))
            self.seen.append(request)
        os.write(self._pipe[1], b"x")

    def abort(self, keys: Sequence[int]) -> None:
        for key in keys:
            if self.live.pop(key, None) is not None:
                self.aborted.append(key)
                if self.late:
                    self._dying.append((key, [7], Finish.NONE))

    def receive(self, timeout: float | None = None) -> EngineOutputs | None:
        """A step; at timeout 0 every second call says that nothing has come yet."""
        self._resting = not self._resting
        if not (self.live or self._dying) or (timeout == 0 and self._resting):
            if not self.live and not self._dying and timeout == 0:
                os.set_blocking(self._pipe[0], False)
                while self._drained():
                    pass
            return None
        news, errors = list(self._dying), []
        self._dying = []
        for key, (request, script) in list(self.live.items()):
            tokens, finish = self._advance(request, script)
            if finish:
                del self.live[key]
            if finish == Finish.ERROR:
                errors.append((key, f"request {key} failed alone"))
            if tokens or finish:
                news.append((key, tokens, finish))
        outputs = make_outputs(news, errors=errors)
        outputs.stats = EngineStats(num_running=len(self.live))
        return outputs

    def _drained(self) -> bool:
        try:
            return bool(os.read(self._pipe[0], 4096))
        except BlockingIOError:
            return False

    def _advance(self, request: EngineRequest, script: list[int | None]) -> tuple[list[int], Finish]:
        tokens: list[int] = []
        for _ in range(self._random.randint(0, self.most)):
            room = request.max_len - len(request.prompt_token_ids)
            if room <= 0 or not script:
                return tokens, Finish.LENGTH
            token = script.pop(0)
            if token is None:
                return tokens, Finish.ERROR
            tokens.append(token)
            request.max_len -= 1
            if token in request.end_token_ids:
                return tokens, Finish.STOP
        return tokens, Finish.NONE

    def close(self) -> None:
        self.closed = True
        for end in self._pipe:
            os.close(end)


def token_logprobs(rows: Sequence[Sequence[int]], columns: int, width: int) -> TokenLogprobs:
    """made_up_scores of each row's tokens, padded to `columns` tokens a row."""
    ids = np.zeros((len(rows), columns, 1 + width), np.int32)
    values = np.zeros((len(rows), columns, 1 + width), np.float32)
    rank = np.zeros((len(rows), columns), np.int32)
    for i, tokens in enumerate(rows):
        for q, token in enumerate(tokens):
            ids[i, q], values[i, q], rank[i, q] = made_up_scores(token, width)
    return TokenLogprobs(ids, values, rank)


def prompt_logprobs(start: int, tokens: Sequence[int], width: int) -> PromptLogprobs:
    """made_up_scores of prompt tokens from position start on."""
    found = token_logprobs([tokens], len(tokens), width)
    return PromptLogprobs(0, 0, start, found.ids[0], found.values[0], found.rank[0])
