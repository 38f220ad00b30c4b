"""The commands as a user runs them, on a tiny model: serve in a process of its own, generate and chat in
this one."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from openai import AuthenticationError, OpenAI
from text_model import make_text_model
from waiting import wait_for

from slipstream.cli.main import main

SMALL = [
    "--dtype",
    "float32",
    "--max-model-len",
    "256",
    "--num-gpu-blocks-override",
    "65",
    "--max-num-seqs",
    "8",
]

FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return make_text_model(tiny_model)


class Server:
    """`slipstream serve` and what it wrote to stderr."""

    def __init__(self, model: Path, *flags: str) -> None:
        argv = ["serve", str(model), "--port", "0", "--served-model-name", "tiny", "--api-key", "one", *SMALL]
        argv += ["--no-spare-processes", *flags]  # they would come in the middle of what is measured
        self.process = subprocess.Popen(
            [sys.executable, "-m", "slipstream.cli", *argv],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"SLIPSTREAM_API_KEY": "two"},
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        assert wait_for(lambda: any(" ready " in line for line in self.lines), 120), self.lines
        found = re.search(r"url=(\S+)", next(line for line in self.lines if " ready " in line))
        assert found is not None
        self.url = found[1]

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(iter(self.process.stderr.readline, ""))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def memory(self) -> int:
        """Bytes resident, engine included."""
        mine = psutil.Process(self.process.pid)
        return sum(each.memory_info().rss for each in [mine, *mine.children(recursive=True)])


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    started = Server(model)
    try:
        yield started
    finally:
        started.close()


def test_serve_answers_the_official_client_under_its_name_and_keys(server: Server) -> None:
    for key in ("one", "two"):
        with OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["tiny"]
            chunks = list(
                client.chat.completions.create(
                    model="tiny",
                    messages=[{"role": "user", "content": "hi"}],
                    stream=True,
                    max_tokens=5,
                )
            )
            assert chunks[-1].choices[0].finish_reason in ("stop", "length")
    with (
        OpenAI(base_url=f"{server.url}/v1", api_key="three", max_retries=0) as client,
        pytest.raises(AuthenticationError),
    ):
        client.models.list()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["generate", "nowhere", "--prompt", "a"], "model='nowhere': no such folder or file"),
        (["serve", "m", "--served-model-name", "a", ""], "--served-model-name=['a', '']: must not be empty"),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_flag(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert f"error: {says}" in capsys.readouterr().err


def test_the_readmes_client_reaches_the_readmes_server(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    command = re.search(r"slipstream serve (.+)", readme)
    code = re.search(r"```python\n(from openai .+?)```", readme, re.DOTALL)
    assert command is not None and code is not None
    started = Server(model, *shlex.split(command[1])[1:], "--port", "0", "--api-key", "none")
    try:
        exec(code[1].replace("http://localhost:8000", started.url), {})
    finally:
        started.close()
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "hi", "n": 3_000_000, "max_tokens": 1},
        {"prompt": ["hi"] * 200_000},
        {"prompt": [0.5] * 500_000},
        {"prompt": "x" * 5_000_000},
        {"prompt": "hi", "logit_bias": dict.fromkeys(map(str, range(100_000)), 1)},
        {"prompt": "hi", "stop": ["x"] * 500_000},
        {"messages": [{"role": "user", "content": "hi"}], "tools": [FUNCTION] * 50_000},
        {"messages": [{"role": "user", "content": 5}] * 100_000},
        {"input": [{"role": "user", "content": "hi"}] * 100_000},
        {"input": [{"type": "reasoning", "content": []}, 5] * 100_000},
    ],
    ids=lambda body: ",".join(body),
)
def test_what_is_far_too_large_leaves_memory_flat(server: Server, body: object) -> None:
    """Row 13 of the reported faults, and its neighbours: 20 times, of which every other client leaves at
    once."""
    headers = {"Authorization": "Bearer one"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as client:
        assert isinstance(body, dict)
        paths = {"messages": "/v1/chat/completions", "input": "/v1/responses"}
        path = next((paths[field] for field in body if field in paths), "/v1/completions")
        assert client.post(path, json=body).status_code == 400
        before = server.memory()
        for number in range(8):
            if number % 2:
                assert client.post(path, json=body).status_code == 400
            else:
                with contextlib.suppress(httpx.TimeoutException):
                    client.post(path, json=body, timeout=0.02)
        assert wait_for(lambda: server.memory() < before + 48 * 2**20), server.memory() - before
        assert client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2}).status_code == 200


def test_sigterm_ends_serve_and_its_engine(model: Path) -> None:
    server = Server(model)
    children = psutil.Process(server.process.pid).children(recursive=True)
    assert children
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(30)
    server.close()
    assert wait_for(lambda: not any(child.is_running() for child in children))


def test_generate_streams_text_and_tells_its_speed(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", str(model), "--prompt", "hi", "--temperature", "0", "--max-tokens", "20", *SMALL]
    assert main(argv) == 0
    streamed = capsys.readouterr()
    assert re.search(r"\[\d+ prompt tokens, \d+ tokens, TTFT [\d.]+ s, [\d.]+ tok/s\]", streamed.err)
    assert main([*argv, "--no-stream"]) == 0
    assert capsys.readouterr().out == streamed.out != "\n"


def test_generate_takes_several_prompts_and_files_in_one_batch(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompt.txt").write_text("from a file")
    monkeypatch.setattr(sys, "stdin", io.StringIO("from stdin"))
    argv = [
        "generate",
        str(model),
        "--prompt",
        "a",
        "--prompt-file",
        str(tmp_path / "prompt.txt"),
        "--prompt-file",
        "-",
        "--raw",
        "--no-stream",
        "--max-tokens",
        "4",
        *SMALL,
    ]
    assert main(argv) == 0
    lengths = [int(n) for n in re.findall(r"\[(\d+) prompt tokens", capsys.readouterr().err)]
    assert lengths == [len("a"), len("from a file"), len("from stdin")]


def test_chat_keeps_the_conversation_until_reset(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\nagain\n/nonsense\n/reset\nhi\n/exit\nnever read\n"))
    assert main(["chat", str(model), "--temperature", "0", "--max-tokens", "8", *SMALL]) == 0
    err = capsys.readouterr().err
    first, second, third = [int(n) for n in re.findall(r"\[(\d+) prompt tokens", err)]
    assert first == third == len("<user>hi\n<assistant>") < second
    assert "/nonsense: commands are /reset and /exit" in err


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--max-model-len", "100000"], "max_model_len"),
        (["--dtype", "float8"], "dtype"),
        (["--block-size", "0"], "block_size"),
        (["--chat-template", "/no/such/template"], "/no/such/template"),
        (["--skip-tokenizer-init"], "--skip-tokenizer-init"),
        (["--system", "x", "--raw"], "--system"),
        (["--prompt", ""], "prompt"),
    ],
)
def test_what_cannot_be_honoured_is_one_line(
    model: Path, extra: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = ["--raw"] if extra[0] == "--prompt" else ["--prompt", "hi"]
    small = [] if extra[0] in SMALL else SMALL
    assert main(["generate", str(model), *small, *prompt, *extra]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("error: ") and words.replace("-", "_") in last.replace("-", "_")
