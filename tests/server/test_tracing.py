"""Spans as a collector gets them, over OTLP, and the log of requests."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from live import Live, serve
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from real import SMALL
from scripted import ByteTokenizer, ScriptedEngine
from text_model import make_text_model

from slipstream.config.args import EngineArgs
from slipstream.engine.async_llm import AsyncLLM
from slipstream.server.app import build_app
from slipstream.server.options import ServerOptions

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


class Collector:
    """An OTLP endpoint. spans: what it was sent."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    collector.services |= {values(resource.resource.attributes)["service.name"]}
                    for scope in resource.scope_spans:
                        collector.spans += scope.spans
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Quiet."""

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def values(attributes: Any) -> dict[str, Any]:
    """OTLP's attributes as Python's values."""

    def value(one: Any) -> Any:
        kind = one.WhichOneof("value")
        if kind == "array_value":
            return [value(each) for each in one.array_value.values]
        return getattr(one, kind)

    return {attribute.key: value(attribute.value) for attribute in attributes}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    started = Collector()
    yield started
    started.close()


@contextmanager
def traced(engine: Any, collector: Collector, tokenizer: Any = None) -> Iterator[Live]:
    options = ServerOptions(otlp_traces_endpoint=collector.endpoint)
    with serve(build_app(engine, "traced", tokenizer=tokenizer or ByteTokenizer(), options=options)) as live:
        yield live


def test_a_real_requests_span_has_its_times_counts_and_parent(
    collector: Collector, tiny_model: Callable[..., Path]
) -> None:
    args = EngineArgs(model=str(make_text_model(tiny_model)), **SMALL)
    engine = AsyncLLM.from_engine_args(args)
    with traced(engine, collector, engine.get_tokenizer()) as live:
        body = {"prompt": "hey", "max_tokens": 20, "ignore_eos": True, "temperature": 0.5, "top_p": 0.9}
        answer = live.http.post("/v1/completions", json=body, headers=HEADERS).json()
    (span,) = collector.spans
    found = values(span.attributes)
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == ("llm_request", TRACE, PARENT)
    assert collector.services == {"slipstream"}
    assert found["gen_ai.request.id"].startswith(answer["id"])
    expected = {
        "gen_ai.response.model": "traced", "gen_ai.request.max_tokens": 20, "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9, "gen_ai.request.n": 1, "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.completion_tokens": 20, "gen_ai.response.finish_reasons": ["length"],
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    times = {name.removeprefix("gen_ai.latency."): found[name] for name in found if ".latency." in name}
    parts = times["time_in_model_prefill"] + times["time_in_model_decode"]
    assert parts == pytest.approx(times["time_in_model_inference"])
    before = times["time_in_queue"] + times["time_in_model_prefill"]
    assert before == pytest.approx(times["time_to_first_token"])
    lasted = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    assert lasted == pytest.approx(times["e2e"], abs=1e-5)
    assert times["time_to_first_token"] < lasted
    moments = {event.name: event.time_unix_nano for event in span.events}
    ends = span.start_time_unix_nano, span.end_time_unix_nano
    assert ends[0] <= moments["scheduled"] <= moments["first_token"] <= ends[1]


def test_every_prompt_has_a_span_and_a_failure_is_an_error(collector: Collector) -> None:
    engine = ScriptedEngine(reply="abc")
    with traced(engine, collector) as live:
        live.raw_json("/v1/completions", {"prompt": ["one", "two"], "n": 2})
        engine.fail_after = 1
        assert live.http.post("/v1/completions", json={"prompt": "hi"}).status_code == 500
    assert len(collector.spans) == 3
    assert len({span.trace_id for span in collector.spans}) == 3, "nobody sent a parent"
    codes = [span.status.code for span in collector.spans]
    assert codes == [0, 0, 2]
    reasons = [values(span.attributes)["gen_ai.response.finish_reasons"] for span in collector.spans]
    assert reasons == [["stop", "stop"], ["stop", "stop"], ["error"]]


def test_a_server_that_cannot_send_spans_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "pigeon")
    with pytest.raises(ValueError, match="OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=pigeon"):
        ServerOptions(otlp_traces_endpoint="http://x")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"--otlp-traces-endpoint=http://x: .*slipstream\[otel\]"):
        ServerOptions(otlp_traces_endpoint="http://x")


class Kept(logging.Handler):
    """Keeps records. caplog gets them twice where an earlier test has set up our logging."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def kept() -> Iterator[Kept]:
    """What the server logs."""
    handler, logger = Kept(), logging.getLogger("slipstream.server")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.setLevel(level)
    logger.removeHandler(handler)


def test_a_logged_request_has_its_id_and_counts_and_none_of_its_text(kept: Kept) -> None:
    options = ServerOptions(enable_log_requests=True)
    app = build_app(ScriptedEngine(reply="secret"), "s", tokenizer=ByteTokenizer(), options=options)
    with serve(app) as live:
        body = {"prompt": "private", "max_tokens": 4, "request_id": "mine"}
        live.raw_json("/v1/completions", body)
    (record,) = [record for record in kept.records if record.getMessage() == "request ended"]
    fields = record.fields  # type: ignore[attr-defined]
    assert fields["request"].startswith("cmpl-mine-")
    assert (fields["reason"], fields["prompt_tokens"], fields["output_tokens"]) == ("length", 7, 4)
    assert 0 <= fields["time_to_first_token"] <= fields["e2e"]
    assert not {"private", "secr"} & {str(value) for value in fields.values()}
