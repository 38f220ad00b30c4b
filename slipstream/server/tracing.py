"""OpenTelemetry: a span for each request, with the names of attributes that vLLM gives them, sent over OTLP.
The packages are an extra (slipstream[otel]) and loaded only where an endpoint is given."""

from __future__ import annotations

import importlib.util
import os
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Receive, Scope, Send

from slipstream.observe.version import package_version

if TYPE_CHECKING:
    from slipstream.server.metrics import Ended

PROTOCOL_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
_EXPORTERS = {  # grpc unless the variable says otherwise, as in vLLM
    "grpc": "opentelemetry.exporter.otlp.proto.grpc",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http",
}
_HEADERS = (b"traceparent", b"tracestate")
# Of the request that the running task answers; W3C's headers.
_parent: ContextVar[dict[str, str] | None] = ContextVar("slipstream_trace_parent", default=None)


def check_tracing(endpoint: str) -> None:
    """Raises ValueError where spans could not be sent."""
    package = _exporter()
    try:
        found = importlib.util.find_spec("opentelemetry.sdk") and importlib.util.find_spec(package)
    except ModuleNotFoundError:
        found = None
    if not found:
        raise ValueError(
            f"--otlp-traces-endpoint={endpoint}: {package} is not installed (pip install 'slipstream[otel]')"
        )


def _exporter() -> str:
    protocol = os.environ.get(PROTOCOL_VARIABLE, "grpc")
    if protocol not in _EXPORTERS:
        raise ValueError(f"{PROTOCOL_VARIABLE}={protocol}: must be one of {', '.join(_EXPORTERS)}")
    return _EXPORTERS[protocol]


class TraceParent:
    """ASGI middleware: remembers the trace that a request belongs to."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]
                       if name in _HEADERS}
            _parent.set(headers or None)
        await self._app(scope, receive, send)


class Spans:
    """Sends a span for each prompt that ends, in batches, from a thread of OpenTelemetry's own."""

    def __init__(self, endpoint: str, model: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporter: Any = importlib.import_module(f"{_exporter()}.trace_exporter").OTLPSpanExporter
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES come first.
        service = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "slipstream"}
        self._provider = TracerProvider(resource=Resource.create(service))
        self._provider.add_span_processor(BatchSpanProcessor(exporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("slipstream", package_version())
        self._model = model

    def ended(self, ended: Ended) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = _parent.get()
        context = None if parent is None else TraceContextTextMapPropagator().extract(parent)
        meter = ended.meter
        to_epoch = time.time_ns() - time.monotonic_ns()

        def moment(monotonic: float) -> int:
            return to_epoch + int(monotonic * 1e9)

        span = self._tracer.start_span(
            "llm_request", context, SpanKind.SERVER, attributes(ended, self._model),
            start_time=moment(meter.arrival),
        )
        scheduled = None if meter.times is None else meter.times.scheduled_time
        for name, when in (("scheduled", scheduled), ("first_token", meter.first)):
            if when is not None:
                span.add_event(name, timestamp=moment(when))
        if "error" in meter.reasons:
            span.set_status(Status(StatusCode.ERROR))
        span.end(moment(meter.ended))

    def close(self) -> None:
        """Send what waits."""
        self._provider.shutdown()


def attributes(ended: Ended, model: str) -> dict[str, Any]:
    """vLLM's, and where OpenTelemetry's conventions have other names by now, those too."""
    params, meter = ended.params, ended.meter
    found: dict[str, Any] = {
        "gen_ai.request.id": ended.request_id,
        "gen_ai.response.id": ended.request_id,
        "gen_ai.response.model": model,
        "gen_ai.request.model": model,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.n": params.n,
        "gen_ai.usage.prompt_tokens": ended.prompt_tokens,
        "gen_ai.usage.input_tokens": ended.prompt_tokens,
        "gen_ai.usage.completion_tokens": meter.tokens,
        "gen_ai.usage.output_tokens": meter.tokens,
        "gen_ai.response.finish_reasons": meter.reasons,
    }
    if params.max_tokens is not None:
        found["gen_ai.request.max_tokens"] = params.max_tokens
    return found | {f"gen_ai.latency.{name}": seconds for name, seconds in ended.latencies.items()}
