"""`slipstream serve` outlives its engine, and ends with the reason where no engine will do."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
from openai import OpenAI
from test_commands import Server
from text_model import make_text_model
from waiting import wait_for

from slipstream.engine import engine_process


def test_a_stream_outlives_its_engine_and_a_crash_loop_ends_the_server(
    tiny_model: Callable[..., Path],
) -> None:
    server = Server(make_text_model(tiny_model), "--max-engine-restarts", "1", "--shutdown-timeout", "2")
    try:
        main = psutil.Process(server.process.pid)

        def health() -> httpx.Response:
            return httpx.get(f"{server.url}/health", timeout=30)

        def kill_engine() -> None:
            (engine,) = (each for each in main.children() if engine_process.__name__ in each.cmdline())
            engine.send_signal(signal.SIGKILL)

        with OpenAI(base_url=f"{server.url}/v1", api_key="one", max_retries=0, timeout=60) as client:
            asked = {"model": "tiny", "prompt": "on and on", "temperature": 0, "max_tokens": 200}
            extra = {"extra_body": {"ignore_eos": True}, "stream_options": {"include_usage": True}}
            calm = client.completions.create(**asked, extra_body=extra["extra_body"])
            text, usage, killed = "", None, False
            for chunk in client.completions.create(**asked, **extra, stream=True):
                text += chunk.choices[0].text if chunk.choices else ""
                usage = chunk.usage or usage
                if not killed and len(text) > 20:
                    kill_engine()
                    assert wait_for(lambda: health().status_code == 503)
                    told = health().json()
                    assert (told["status"], told["live"], told["replacing"]) == ("restarting", True, "engine")
                    killed = True
        assert text == calm.choices[0].text and usage.completion_tokens == 200
        assert health().status_code == 200 and health().json()["restarts"] == 1
        assert 'slipstream:engine_restarts_total{engine="0",model_name="tiny"} 1.0' in (
            httpx.get(f"{server.url}/metrics").text
        )
        kill_engine()
        assert wait_for(lambda: health().json()["restarts"] == 2)
        kill_engine()
        assert server.process.wait(30) == 1
    finally:
        server.close()
    assert "2 engines in a row were lost" in server.lines[-1] and "signal 9" in server.lines[-1]
