"""A real HTTP server in a thread: what disconnects, streams and keep-alive need that an in-process client
cannot show."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import uvicorn
from fastapi import FastAPI
from openai import OpenAI


class Live:
    """A running server. url: its root; http: a client of it; openai: the official client of it."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=60)
        self.openai = OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"slipstream:{name}{{"))

    def raw(self, path: str, body: str | bytes) -> httpx.Response:
        return self.http.post(path, content=body, headers={"content-type": "application/json"})


@contextmanager
def serve(app: FastAPI) -> Iterator[Live]:
    """The app on a free port, until the block ends."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.started, "the server did not start"
    try:
        yield Live(listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()


def wait_for(condition: object, seconds: float = 5.0) -> bool:
    """True as soon as condition() holds."""
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())
