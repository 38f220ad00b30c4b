"""Who may ask, how much and for how long: CORS, TLS, concurrency, queue deadlines, the drain at SIGTERM."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from conftest import render
from live import Live, serve
from openai import OpenAI, RateLimitError
from real import real_server
from scripted import ByteTokenizer, ScriptedEngine
from test_commands import Server
from text_model import make_text_model
from waiting import wait_for

from slipstream.cli.main import main
from slipstream.contracts.limits import check_prompt
from slipstream.server import context
from slipstream.server.app import build_app
from slipstream.server.options import ServerOptions

HI: list[Any] = [{"role": "user", "content": "hi"}]


def over(engine: ScriptedEngine, **options: Any) -> Any:
    made = ServerOptions(**options)
    return serve(build_app(engine, "scripted", tokenizer=ByteTokenizer(), render=render, options=made))


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return make_text_model(tiny_model)


def test_requests_over_the_limit_get_a_429_and_those_inside_finish() -> None:
    engine = ScriptedEngine(reply="x" * 40, delay=0.5)
    with over(engine, max_concurrent_requests=3) as live, ThreadPoolExecutor(3) as pool:
        ask = {"prompt": "hi", "max_tokens": 40, "stream": True}
        inside = [pool.submit(live.events, "/v1/completions", ask) for _ in range(3)]
        assert wait_for(lambda: len(engine.running) == 3)
        for body in ({"prompt": "hi"}, {"prompt": "x" * 3_000_000}, {"messages": HI}):
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            answer = live.http.post(path, json=body)
            assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
            error = answer.json()["error"]
            assert error["type"] == "rate_limit_error" and "--max-concurrent-requests" in error["message"]
        with pytest.raises(RateLimitError):
            live.openai.completions.create(model="scripted", prompt="hi")
        assert live.http.get("/health").status_code == 200, "a full server is healthy"
        engine.delay = 0.0
        assert all(len(events.result()) == 40 for events in inside)
        assert len(engine.seen) == 3
        assert live.http.post("/v1/completions", json={"prompt": "hi"}).status_code == 200


def test_a_client_that_retries_gets_in() -> None:
    engine = ScriptedEngine(reply="x" * 20, delay=0.02)
    with over(engine, max_concurrent_requests=1) as live, ThreadPoolExecutor(1) as pool:
        first = pool.submit(
            live.events, "/v1/completions", {"prompt": "hi", "stream": True, "max_tokens": 20}
        )
        assert wait_for(lambda: engine.running)
        with OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=10) as client:
            assert client.completions.create(model="scripted", prompt="hi").choices[0].finish_reason
        first.result()


def test_clients_that_leave_make_room() -> None:
    engine = ScriptedEngine(reply="x" * 200, delay=0.02)
    with over(engine, max_concurrent_requests=2) as live:
        for _ in range(6):
            ask = {"prompt": "hi", "stream": True, "max_tokens": 150}
            with live.http.stream("POST", "/v1/completions", json=ask) as answer:
                assert answer.status_code == 200
                next(answer.iter_lines())
            assert wait_for(lambda: not engine.running)


def test_a_body_may_be_as_large_as_the_flag_says() -> None:
    with over(ScriptedEngine(), max_request_bytes=500) as live:
        assert (
            live.http.post("/v1/completions", json={"prompt": "x" * 400, "max_tokens": 1}).status_code == 400
        )
        assert (
            live.http.post("/v1/completions", json={"prompt": "x" * 40, "user": "u" * 300}).status_code == 200
        )
        answer = live.http.post("/v1/completions", json={"prompt": "x", "user": "u" * 600})
        assert "larger than 500 bytes" in answer.json()["error"]["message"]


class WatchedTokenizer(ByteTokenizer):
    """threads: those that it worked on; sizes: characters or ids, a call."""

    def __init__(self) -> None:
        self.threads: list[int] = []
        self.sizes: list[int] = []

    def _note(self, size: int) -> None:
        self.threads.append(threading.get_ident())
        self.sizes.append(size)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self._note(len(text))
        return super().encode(text, add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True, **others: Any) -> str:
        self._note(len(ids))
        return super().decode(ids, skip_special_tokens, **others)


@pytest.fixture
def watched() -> Iterator[tuple[Live, WatchedTokenizer, int]]:
    """A server, its tokenizer, and the thread of the event loop."""
    tokenizer = WatchedTokenizer()
    with serve(build_app(ScriptedEngine(), "scripted", tokenizer=tokenizer, render=render)) as live:
        assert live.http.post("/tokenize", json={"prompt": "short"}).status_code == 200
        [loop] = tokenizer.threads
        tokenizer.threads.clear()
        tokenizer.sizes.clear()
        yield live, tokenizer, loop


def test_many_short_prompts_are_read_and_checked_off_the_loop(
    watched: tuple[Live, WatchedTokenizer, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    live, tokenizer, loop = watched
    lengths, checkers = [], []

    def check(ids: Sequence[int], *others: Any) -> None:
        lengths.append(len(ids))
        checkers.append(threading.get_ident())
        check_prompt(ids, *others)

    monkeypatch.setattr(context, "check_prompt", check)
    body = {"prompt": ["x" * 100] * 50, "max_tokens": 1}
    assert live.http.post("/v1/completions", json=body).status_code == 200
    assert tokenizer.sizes == [100] * 50 and loop not in tokenizer.threads
    assert lengths == [100] * 100 and loop not in checkers[50:]
    live.refused("/v1/completions", {"prompt": [1] * 200_000}, "prompt")
    assert lengths[100:] == [200_000] and checkers[-1] != loop


def test_a_prompt_that_is_too_long_is_refused_before_the_next_is_read(
    watched: tuple[Live, WatchedTokenizer, int]
) -> None:
    live, tokenizer, _ = watched
    message = live.refused("/v1/completions", {"prompt": ["a", "\u00e9" * 200, *["b" * 100] * 50]}, "prompt")
    assert "prompt of 400 tokens" in message and tokenizer.sizes == [1, 200]


@pytest.mark.parametrize("start", ["", "a", "\u20ac\u00e9"])
def test_many_ids_are_decoded_a_piece_at_a_time_off_the_loop(
    watched: tuple[Live, WatchedTokenizer, int], start: str
) -> None:
    live, tokenizer, loop = watched
    text = start + "\u20ac" * 70_000
    ids = ByteTokenizer().encode(text)
    assert live.raw_json("/detokenize", {"tokens": ids})["prompt"] == text
    assert max(tokenizer.sizes) < 2 * context.PIECE < len(ids) and loop not in tokenizer.threads
    broken = [*ids[:-1], 256] * 2
    assert live.raw_json("/detokenize", {"tokens": broken})["prompt"] == ByteTokenizer().decode(broken)
    live.refused("/detokenize", {"tokens": [*ids, -1]}, "tokens")


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_waits_too_long_for_a_row_gets_a_503(
    tiny_model: Callable[..., Path], stream: bool
) -> None:
    """A long answer takes several times as long as others wait."""
    model = make_text_model(tiny_model, max_position_embeddings=1024)
    options, flags = ServerOptions(max_queue_seconds=0.2), {"max_num_seqs": 1, "max_model_len": 1024}
    with real_server(model, options, **flags) as live, ThreadPoolExecutor(1) as pool:
        long = {"prompt": "hi", "max_tokens": 1000, "min_tokens": 1000, "temperature": 0}
        alone = live.raw_json("/v1/completions", long)["choices"]
        first = pool.submit(lambda: [live.raw_json("/v1/completions", long) for _ in range(4)])
        assert wait_for(lambda: live.metric("num_requests_running") == 1)
        refused = 0
        while not first.done():
            answer = live.http.post(
                "/v1/completions", json={"prompt": "a", "max_tokens": 1, "stream": stream}
            )
            if answer.status_code != 200:
                assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
                assert answer.json()["error"]["code"] == "queue_timeout"
                refused += 1
        assert refused, "the engine was too fast for this test"
        assert [answer["choices"] for answer in first.result()] == [alone] * 4
        assert wait_for(lambda: live.metric("kv_blocks_free") == live.metric("kv_blocks_total"))
        assert live.metric("num_requests_waiting") == 0


def test_overload_is_refused_and_what_is_accepted_finishes(model: Path) -> None:
    """Many more clients than rows for some seconds: 429 and 503 with Retry-After, nothing else; then calm."""
    options = ServerOptions(max_queue_seconds=0.5, max_concurrent_requests=12)
    with real_server(model, max_num_seqs=4, options=options) as live:
        statuses: list[int] = []
        deadline = time.monotonic() + 4

        def go_on() -> bool:
            return time.monotonic() < deadline or min(statuses.count(200), statuses.count(429)) <= 4

        async def client(http: httpx.AsyncClient) -> None:
            while go_on():
                body = {"prompt": "over and over", "max_tokens": 60, "min_tokens": 60}
                answer = await http.post("/v1/completions", json=body)
                statuses.append(answer.status_code)
                if answer.status_code == 200:
                    assert answer.json()["usage"]["completion_tokens"] == 60
                else:
                    assert answer.headers["retry-after"]
                    await asyncio.sleep(0.05)

        async def run() -> None:
            async with httpx.AsyncClient(base_url=live.url, timeout=60) as http:
                await asyncio.gather(*(client(http) for _ in range(32)))

        asyncio.run(run())
        assert {200, 429} <= set(statuses) <= {200, 429, 503}
        assert live.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        assert wait_for(lambda: live.metric("kv_blocks_free") == live.metric("kv_blocks_total"))


def test_cors_follows_the_flags_and_lets_refusals_be_read() -> None:
    origin = {"Origin": "https://a.example"}
    ask = origin | {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    with over(ScriptedEngine(), api_keys=["k"], allowed_origins=["https://a.example"]) as live:
        preflight = live.http.options("/v1/completions", headers=ask)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://a.example"
        denied = live.http.post("/v1/completions", headers=origin, json={"prompt": "hi"})
        assert denied.status_code == 401
        assert denied.headers["access-control-allow-origin"] == "https://a.example"
        other = live.http.options("/v1/completions", headers=ask | {"Origin": "https://b.example"})
        assert other.status_code == 400 and "access-control-allow-origin" not in other.headers
    with over(ScriptedEngine(), allowed_methods=["GET"], allow_credentials=True) as live:
        assert live.http.options("/v1/completions", headers=ask).status_code == 400
        listed = live.http.get("/v1/models", headers=origin)
        assert listed.headers["access-control-allow-credentials"] == "true"


class TlsFiles:
    """A certificate authority, a server's certificate and a client's, as files."""

    def __init__(self, folder: Path) -> None:
        authority = trustme.CA()
        server, client = authority.issue_cert("127.0.0.1"), authority.issue_cert("client@example.org")
        self.ca, self.cert, self.key, self.client = (
            str(folder / f"{n}.pem") for n in ("ca", "cert", "key", "client")
        )
        authority.cert_pem.write_to_path(self.ca)
        server.cert_chain_pems[0].write_to_path(self.cert)
        server.private_key_pem.write_to_path(self.key)
        client.private_key_and_cert_chain_pem.write_to_path(self.client)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return TlsFiles(tmp_path_factory.mktemp("tls"))


def test_serve_speaks_https_and_asks_clients_for_certificates(model: Path, tls: TlsFiles) -> None:
    flags = [
        "--ssl-certfile",
        tls.cert,
        "--ssl-keyfile",
        tls.key,
        "--ssl-ca-certs",
        tls.ca,
        "--ssl-cert-reqs",
        "2",
    ]
    server = Server(model, *flags)
    try:
        assert server.url.startswith("https://")
        known = ssl.create_default_context(cafile=tls.ca)
        with pytest.raises(httpx.TransportError), httpx.Client(verify=known) as stranger:
            stranger.get(f"{server.url}/health")
        known.load_cert_chain(tls.client)
        with httpx.Client(verify=known, headers={"Authorization": "Bearer one"}) as client:
            assert client.get(f"{server.url}/v1/models").json()["data"][0]["id"] == "tiny"
            body = {"messages": HI, "max_tokens": 3, "stream": True}
            assert client.post(f"{server.url}/v1/chat/completions", json=body).text.endswith(
                "data: [DONE]\n\n"
            )
    finally:
        server.close()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--ssl-keyfile", "/no/such/key"], "--ssl-keyfile: of no use without --ssl-certfile"),
        (["--ssl-keyfile-password", "p"], "--ssl-keyfile-password: of no use without --ssl-certfile"),
        (["--ssl-ca-certs", "a"], "--ssl-ca-certs: of no use without --ssl-certfile"),
        (["--ssl-cert-reqs", "2"], "--ssl-cert-reqs: of no use without --ssl-certfile"),
        (["--ssl-ciphers", "HIGH"], "--ssl-ciphers: of no use without --ssl-certfile"),
        (["--ssl-certfile", "/no/such/cert"], "/no/such/cert"),
        (["--ssl-certfile", __file__], "--ssl-certfile"),
        (["--max-queue-seconds", "0"], "--max-queue-seconds"),
        (["--max-concurrent-requests", "-1"], "--max-concurrent-requests"),
        (["--max-request-bytes", "0"], "--max-request-bytes"),
        (["--shutdown-timeout", "-1"], "--shutdown-timeout"),
        (["--enable-auto-tool-choice"], "--tool-call-parser"),
    ],
)
def test_flags_that_cannot_be_honoured_are_one_line_before_the_model_is_read(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "/no/such/model", *flags]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("error: ") and words in last


@pytest.mark.parametrize(
    "flags", [["--allowed-origins", "a"], ["--allowed-origins", "[1]"], ["--ssl-cert-reqs", "3"]]
)
def test_flags_that_cannot_be_read_are_named(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "m", *flags])
    assert flags[0] in capsys.readouterr().err


def stream_slowly(server: Server, tokens: int) -> Iterator[str]:
    headers = {"Authorization": "Bearer one"}
    body = {"prompt": "hi", "stream": True, "max_tokens": tokens, "min_tokens": tokens}
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=body, headers=headers, timeout=60
    ) as answer:
        yield from (line for line in answer.iter_lines() if line)


def test_sigterm_lets_streams_finish_takes_no_more_and_ends_with_0(model: Path) -> None:
    server = Server(model)
    try:
        lines = stream_slowly(server, 200)
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        rest = list(lines)
        assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
        port = int(server.url.rsplit(":", 1)[1])
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)
        assert server.process.wait(30) == 0
    finally:
        server.close()


def test_at_the_deadline_streams_end_with_an_error_that_says_why(tiny_model: Callable[..., Path]) -> None:
    model = make_text_model(tiny_model, max_position_embeddings=4096)
    sizes = ["--max-model-len", "4K", "--num-gpu-blocks-override", "513"]
    server = Server(model, "--shutdown-timeout", "0", *sizes)
    try:
        lines = stream_slowly(server, 4000)
        next(lines)
        threading.Timer(0.1, server.process.send_signal, [signal.SIGTERM]).start()
        rest = list(lines)
        assert rest[-1] == "data: [DONE]" and "shutting down" in rest[-2]
        assert server.process.wait(30) == 0
    finally:
        server.close()
