"""A real HTTP server in a thread: what disconnects, streams and keep-alive need that an in-process client
cannot show."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from openai import OpenAI
from waiting import wait_for


class Live:
    """A running server. url: its root; http: a client of it; openai: the official client of it."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=60)
        self.openai = OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def metric(self, name: str, label: str = "") -> float:
        """The sum of a metric over its labels, or over those that hold a text."""
        lines = self.http.get("/metrics").text.splitlines()
        heads = tuple(f"{owner}:{name}{{" for owner in ("vllm", "slipstream"))
        found = [line for line in lines if line.startswith(heads) and label in line]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    def raw_json(self, path: str, body: Any) -> Any:
        """The answer to a body that must be taken."""
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def events(self, path: str, body: Any) -> list[Any]:
        """All events of a stream, which must end with [DONE]."""
        lines = [line for line in self.http.post(path, json=body).text.split("\n\n") if line]
        assert lines[-1] == "data: [DONE]", lines[-1]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def refused(self, path: str, body: Any, field: str) -> str:
        """The message of a 400 that names the field, in OpenAI's shape."""
        answer = self.http.post(path, json=body) if isinstance(body, dict) else self.raw(path, body)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
        assert error["param"] == field and field in error["message"], error
        return str(error["message"])

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
    assert wait_for(lambda: server.started), "the server did not start"
    live = Live(listener.getsockname()[1])
    try:
        yield live
    finally:
        live.http.close()
        live.openai.close()
        server.should_exit = True
        thread.join(10)
        listener.close()
