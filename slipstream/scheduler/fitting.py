"""Whether a request can ever be served by the blocks and positions there are."""

from __future__ import annotations

import dataclasses

from slipstream.contracts.request import EngineRequest
from slipstream.scheduler.config import SchedulerConfig


def within_pool(request: EngineRequest, config: SchedulerConfig) -> EngineRequest:
    """A request without max_tokens may use what there is: its length limit is then at most the pool."""
    room = config.usable_blocks * config.block_size
    if request.params.max_tokens is None and len(request.prompt_token_ids) < room < request.max_len:
        return dataclasses.replace(request, max_len=room)
    return request


def refusal(request: EngineRequest, length: int, config: SchedulerConfig) -> str | None:
    """Why the request, of so many tokens so far, can never be served; None where it can."""
    if not 0 < length <= request.max_len <= config.max_model_len:
        return (
            f"prompt={length} tokens: must be at least 1, at most max_len={request.max_len} and "
            f"max_model_len={config.max_model_len}"
        )
    open_ended = request.params.max_tokens is None
    most = min(length + 1 + config.lookahead, request.max_len) if open_ended else request.max_len
    needed = config.blocks_for(most)
    if needed > config.usable_blocks:
        return (
            f"prompt={length} tokens: needs {needed} KV blocks of {config.block_size} tokens to grow "
            f"to {most}, and {config.usable_blocks} exist"
        )
    return None
