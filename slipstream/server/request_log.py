"""--enable-log-requests: a line for each prompt that ended, with its id, counts and times."""

from __future__ import annotations

from typing import Any

from slipstream.observe.log import get_logger
from slipstream.server.metrics import Ended

log = get_logger(__name__)


def log_request(ended: Ended) -> None:
    """Texts are not logged: they belong to the user."""
    fields: dict[str, Any] = {
        "request": ended.request_id,
        "reason": ",".join(sorted(set(ended.meter.reasons))),
        "prompt_tokens": ended.prompt_tokens,
        "output_tokens": ended.meter.tokens,
        "n": ended.params.n,
        **{name: round(seconds, 6) for name, seconds in ended.latencies.items()},
    }
    log.info("request ended", **fields)
