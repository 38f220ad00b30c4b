"""Which process computes. resolve() calls this and nobody else decides."""

from __future__ import annotations

from slipstream.config.plan import Choice

FLAG = "--distributed-executor-backend"
# vLLM's names: a worker process a device, and the engine's own process.
MP, UNI = "mp", "uni"
BACKENDS = (MP, UNI)
_REASONS = {
    MP: "a worker process computes; the engine's replaces it, and its requests go on, when it dies or hangs",
    UNI: "the engine's own process computes, as LLM's does unless told otherwise; its end is the engine's",
}


def executor_choice(asked: str | None) -> Choice:
    """Raises ValueError for a backend that is not there."""
    backend = MP if asked is None else asked
    if backend not in BACKENDS:
        raise ValueError(f"{FLAG}={backend!r}: must be one of {', '.join(BACKENDS)}")
    return Choice(value=backend, reason=_REASONS[backend], flag=FLAG)
