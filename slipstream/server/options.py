"""What the server is told, apart from its engine: who may ask, how much, and how answers are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.server.tracing import check_tracing

ANY = ("*",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Raises ValueError that names the flag.

    api_keys: any of them opens the door; none: no key is asked. max_concurrent_requests: answers in the
    making at once, more are refused with 429; 0: no limit. max_queue_seconds: how long a request may wait for
    a row before it is refused with 503; None: for ever. max_request_bytes: of a body. allowed_* and
    allow_credentials: CORS, as vLLM has it. tool_call_parser, reasoning_parser: how text is read;
    enable_auto_tool_choice: the model may call tools when it likes. enable_log_requests: a line for each
    request that ended. otlp_traces_endpoint: where a span of each request is sent.
    """

    api_keys: Sequence[str] = ()
    max_concurrent_requests: int = 4096
    max_queue_seconds: float | None = None
    max_request_bytes: int = 16 * 2**20
    allowed_origins: Sequence[str] = ANY
    allowed_methods: Sequence[str] = ANY
    allowed_headers: Sequence[str] = ANY
    allow_credentials: bool = False
    tool_call_parser: str | None = None
    enable_auto_tool_choice: bool = False
    reasoning_parser: str | None = None
    enable_log_requests: bool = False
    otlp_traces_endpoint: str | None = None

    def __post_init__(self) -> None:
        if not all(self.api_keys):
            raise ValueError("--api-key='': must not be empty")
        if self.max_concurrent_requests < 0:
            raise ValueError(f"--max-concurrent-requests={self.max_concurrent_requests}: must be at least 0")
        if self.max_queue_seconds is not None and not 0 < self.max_queue_seconds < 1e6:
            raise ValueError(f"--max-queue-seconds={self.max_queue_seconds}: must be over 0 and under 1e6")
        if self.max_request_bytes < 1:
            raise ValueError(f"--max-request-bytes={self.max_request_bytes}: must be at least 1")
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ValueError("--enable-auto-tool-choice: needs --tool-call-parser")
        if self.otlp_traces_endpoint is not None:
            check_tracing(self.otlp_traces_endpoint)
