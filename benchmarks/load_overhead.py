"""What `slipstream bench serve` itself adds: a server that knows nothing but the clock sends every stream a
chunk at set times, in a process of its own; the generator must report those times.

    python benchmarks/load_overhead.py [--streams 1000] [--every-ms 50] [--chunks 200]

Prints the gaps that were meant and those that were measured, on either side, and processor time a chunk.
Each side times its own chunks, so what the server itself sent late is not counted against the generator.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import resource
import time
from multiprocessing.connection import Connection

import numpy as np

from slipstream.cli.bench_serve import quick_loop
from slipstream.cli.serve_client import Run, Target
from slipstream.cli.serve_load import Ask

CHUNK = b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,' \
        b'"text":" word","logprobs":null,"finish_reason":null}]}\n\n'  # fmt: skip
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


class Stream(asyncio.Protocol):
    """One connection: after the request's head, chunks at fixed times from then on, each noted."""

    def __init__(self, every: float, chunks: int, sent: list[float]) -> None:
        self._every, self._left, self._sent = every, chunks, sent
        self._last = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if data.startswith(b"POST"):
            self._transport.write(HEAD)
            self._next = asyncio.get_running_loop().time() + self._every
            self._again()

    def _again(self) -> None:
        asyncio.get_running_loop().call_at(self._next, self._send)

    def _send(self) -> None:
        if self._last:
            self._sent.append(time.perf_counter() - self._last)
        self._last = time.perf_counter()
        self._transport.write(chunked(CHUNK))
        self._left -= 1
        self._next += self._every
        if self._left:
            self._again()
        else:
            self._transport.write(chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def serve(pipe: Connection, every: float, chunks: int) -> None:
    """Tells its port; when it is told to end, the gaps it sent."""

    async def run() -> None:
        loop, gaps = asyncio.get_running_loop(), []
        server = await loop.create_server(lambda: Stream(every, chunks, gaps), "127.0.0.1", 0, backlog=4096)
        pipe.send(server.sockets[0].getsockname()[1])
        await asyncio.to_thread(pipe.recv)
        pipe.send(gaps)

    asyncio.run(run())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--every-ms", type=float, default=50.0)
    parser.add_argument("--chunks", type=int, default=200)
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=serve, args=(theirs, options.every_ms / 1e3, options.chunks))
    process.start()
    url = f"http://127.0.0.1:{ours.recv()}"
    target = Target(base_url=url, endpoint="/v1/completions", body={"model": "m"})
    # Begun over one interval, so that chunks of all streams are spread over time.
    asks = [Ask("hi", 1, i * options.every_ms / 1e3 / options.streams) for i in range(options.streams)]
    before = time.process_time()
    run = Run(target, asks, None)
    with asyncio.Runner(loop_factory=quick_loop()) as runner:
        seconds = runner.run(run.run())
    spent = time.process_time() - before
    ours.send(None)
    sent = np.array(ours.recv())
    process.join()
    assert not run.failed, next(record.error for record in run.records if record.error)
    seen = np.array([gap for record in run.records for gap in record.gaps()])
    report = {
        "streams": options.streams, "chunks": run.chunks, "chunks_per_second": round(run.chunks / seconds),
        "meant_ms": options.every_ms,
        "sent_ms": [round(1e3 * float(np.percentile(sent, p)), 2) for p in (50, 90, 99)],
        "measured_ms": [round(1e3 * float(np.percentile(seen, p)), 2) for p in (50, 90, 99)],
        "processor_us_per_chunk": round(1e6 * spent / run.chunks, 1),
        "processor_share_of_a_core": round(spent / seconds, 2),
        "machine": platform.processor() or platform.machine(), "cores": os.cpu_count(),
    }  # fmt: skip
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
