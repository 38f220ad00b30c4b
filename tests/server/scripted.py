"""A scripted engine behind the server's Engine protocol: text over bytes, no model. It answers what a test
tells it.

Token ids: 0 ends, 1 + b is the byte b. It checks requests as the real one does, and keeps books that tests
read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.contracts.errors import EngineError
from slipstream.contracts.limits import ModelLimits, check_request
from slipstream.contracts.outputs import EngineStats
from slipstream.contracts.sampling_params import RequestOutputKind, SamplingParams
from slipstream.engine.client import EngineHealth, EngineInfo
from slipstream.engine.outputs import CompletionOutput, Logprob, RequestOutput, TokenScores

VOCAB = 300
LIMITS = ModelLimits(vocab_size=VOCAB, max_model_len=256, block_size=16, num_blocks=12)


class ByteTokenizer:
    vocab_size = VOCAB

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1 + byte for byte in text.encode()]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True, **_: Any) -> str:
        return bytes(i - 1 for i in ids if 1 <= i <= 256).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token - 1]) if 1 <= token <= 256 else b""

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        return [f"<{i}>" for i in ids]


def scores(token: int, count: int) -> TokenScores:
    """The token at -0.5, then `count` alternatives at -1, -2, ..., of which the first is the token itself."""
    tokenizer = ByteTokenizer()
    found = {token: Logprob(-0.5, 1, tokenizer.decode([token]))}
    for rank in range(2, count + 1):
        other = (token + rank) % VOCAB
        found[other] = Logprob(-float(rank), rank, tokenizer.decode([other]))
    return found


@dataclass
class ScriptedEngine:
    """reply: the text of every answer; a sample's index is appended to it. fail_after: tokens until an
    EngineError."""

    reply: str = "Hello, world"
    fail_after: int | None = None
    delay: float = 0.0
    info: EngineInfo = field(default_factory=lambda: EngineInfo(LIMITS, (0,)))
    errored: bool = False
    running: set[str] = field(default_factory=set)
    aborted: list[str] = field(default_factory=list)
    seen: list[tuple[dict[str, Any], SamplingParams, str, int]] = field(default_factory=list)

    @property
    def stats(self) -> EngineStats:
        used = len(self.running)
        return EngineStats(
            num_running=used, free_blocks=LIMITS.num_blocks - used, num_blocks=LIMITS.num_blocks
        )

    @property
    def health(self) -> EngineHealth:
        return EngineHealth(not self.errored, reason="gone" if self.errored else "")

    def shutdown(self) -> None:
        self.errored = True

    async def generate(
        self,
        prompt: dict[str, Any],
        sampling_params: SamplingParams,
        request_id: str,
        priority: int = 0,
        max_wait: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        params = sampling_params
        ids = list(prompt["prompt_token_ids"])
        check_request(ids, params, LIMITS, (0,))
        assert request_id not in self.running, "two live requests of one id"
        self.seen.append((prompt, params, request_id, priority))
        self.running.add(request_id)
        done = False
        try:
            whole: dict[int, CompletionOutput] = {}
            for output in self._steps(ids, params, request_id):
                await _sleep(self.delay)
                self._maybe_fail()
                if params.output_kind == RequestOutputKind.DELTA:
                    yield output
                else:
                    _add(whole, output.outputs[0])
            if params.output_kind != RequestOutputKind.DELTA:
                prompt_scores = _prompt_scores(ids, params)
                yield RequestOutput(
                    request_id, None, ids, list(whole.values()), True, prompt_logprobs=prompt_scores
                )
            done = True
        finally:
            self.running.discard(request_id)
            if not done:
                self.aborted.append(request_id)

    def _maybe_fail(self) -> None:
        if self.fail_after is not None:
            self.fail_after -= 1
            if self.fail_after < 0:
                self.fail_after = None
                raise EngineError("row 3: no token was left to choose")

    def _steps(self, ids: list[int], params: SamplingParams, request_id: str) -> list[RequestOutput]:
        tokenizer = ByteTokenizer()
        limit = params.max_tokens if params.max_tokens is not None else LIMITS.max_model_len - len(ids)
        replies = [tokenizer.encode(self.reply + (str(i) if i else "")) for i in range(params.n)]
        steps: list[RequestOutput] = []
        for position in range(max(1, min(limit, max(map(len, replies))))):
            for sample, reply in enumerate(replies):
                if position >= max(1, len(reply)):
                    continue
                tokens = reply[position : position + 1][:limit]
                last = position + 1 >= min(limit, len(reply))
                reason = ("length" if limit < len(reply) else "stop") if last else None
                found = None if params.logprobs is None else [scores(t, params.logprobs) for t in tokens]
                text = bytes(t - 1 for t in tokens).decode(errors="replace")
                piece = CompletionOutput(sample, text, tokens, None, found, reason)
                first = _prompt_scores(ids, params) if position == 0 else None
                steps.append(RequestOutput(request_id, None, ids, [piece], last, prompt_logprobs=first))
        return steps


async def _sleep(seconds: float) -> None:
    """No less than this: timers of event loops may be up to a millisecond early."""
    due = time.perf_counter() + seconds
    await asyncio.sleep(seconds)
    while (left := due - time.perf_counter()) > 0:
        await asyncio.sleep(left)


def _add(whole: dict[int, CompletionOutput], piece: CompletionOutput) -> None:
    kept = whole.setdefault(
        piece.index, CompletionOutput(piece.index, "", [], None, None if piece.logprobs is None else [])
    )
    kept.text += piece.text
    kept.token_ids = [*kept.token_ids, *piece.token_ids]
    if kept.logprobs is not None:
        kept.logprobs += piece.logprobs or []
    kept.finish_reason = piece.finish_reason


def _prompt_scores(ids: list[int], params: SamplingParams) -> list[TokenScores | None] | None:
    if params.prompt_logprobs is None:
        return None
    return [None, *(scores(token, params.prompt_logprobs) for token in ids[1:])]
