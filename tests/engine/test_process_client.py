"""The engine's process: how it starts, fails to start, ends, and what it leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
import zmq
from waiting import wait_for

from slipstream import EngineArgs, EngineDeadError, EngineError, SamplingParams
from slipstream.contracts.outputs import EngineOutputs
from slipstream.contracts.request import EngineRequest
from slipstream.contracts.step import Finish, PromptLogprobs, TokenLogprobs
from slipstream.engine import engine_process, wire
from slipstream.engine.process_client import ProcessClient

SMALL = {
    "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 256, "max_num_seqs": 4,
    "num_gpu_blocks_override": 65,
}
ROOT = Path(engine_process.__file__).parents[2]


def make_request(key: int = 1, max_len: int = 10) -> EngineRequest:
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    return EngineRequest(key, np.array([5, 6, 7], np.int32), params, 0, (), max_len)


@pytest.fixture(autouse=True)
def scratch(monkeypatch, tmp_path_factory) -> Path:
    """A folder for temporary files that nobody else uses."""
    folder = tmp_path_factory.mktemp("t")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_a_request_runs_in_another_process_and_nothing_but_its_trace_is_left_of_it(
    tiny_model, scratch, tmp_path
):
    trace = tmp_path / "trace.json"
    client = ProcessClient(EngineArgs(model=str(tiny_model("llama")), trace=str(trace), **SMALL))
    (folder,) = scratch.glob("slipstream-*")  # torch may keep a folder there too
    assert folder.stat().st_mode & 0o777 == 0o700, "others could run requests"
    assert client.info.limits.max_model_len == 256
    assert client.info.plan["device"]["value"] in ("cpu", "cuda")
    assert client.receive(0) is None
    assert client.receive(0.01) is None
    client.add([make_request()])
    tokens, finish = [], 0
    while not finish:
        outputs = client.receive(10)
        assert isinstance(outputs, EngineOutputs)
        tokens += outputs.tokens.tolist()
        finish = outputs.finish.max(initial=0)
    assert (len(tokens), finish) == (7, Finish.LENGTH)
    pid = client._process.pid
    assert Path(f"/proc/{pid}").exists()
    client.close()
    client.close()
    assert not Path(f"/proc/{pid}").exists()
    assert not list(scratch.glob("slipstream-*"))
    assert '"traceEvents"' in trace.read_text()
    with pytest.raises(EngineDeadError, match="shut down"):
        client.receive(0)


def test_flags_that_cannot_be_honoured_raise_here_what_they_raise_there(tmp_path, tiny_model, scratch):
    with pytest.raises(ValueError, match="--dtype='int3'"):
        ProcessClient(EngineArgs(model=str(tiny_model("llama")), **(SMALL | {"dtype": "int3"})))
    with pytest.raises(ValueError, match="nowhere"):
        ProcessClient(EngineArgs(model=str(tmp_path / "nowhere"), **SMALL))
    assert not list(scratch.glob("slipstream-*"))


def test_an_engine_that_breaks_while_it_starts_says_how(tiny_model):
    """A drafter of one's own that raises what it likes."""
    drafting = {"method": "custom_class", "model": "drafters.Broken", "num_speculative_tokens": 2}
    with pytest.raises(EngineError, match="RuntimeError: no drafts today"):
        ProcessClient(EngineArgs(model=str(tiny_model("llama")), speculative_config=drafting, **SMALL))


def test_a_dead_process_is_told_from_a_silent_one(tiny_model):
    client = ProcessClient(EngineArgs(model=str(tiny_model("llama")), **SMALL))
    os.kill(client._process.pid, signal.SIGTERM)
    with pytest.raises(EngineDeadError, match="signal 15"):
        client.receive(10)
    client.add([make_request()])
    client.abort([1])
    client.close()


PARENT = """
    import sys, time
    from slipstream import EngineArgs
    from slipstream.engine.process_client import ProcessClient
    client = ProcessClient(EngineArgs(model=sys.argv[1], skip_tokenizer_init=True, dtype="float32",
                                      max_model_len=256, max_num_seqs=4, num_gpu_blocks_override=65))
    print(client._process.pid, client._folder.name, flush=True)
    time.sleep(60)
"""


def test_the_engine_ends_with_a_parent_that_is_killed_and_tidies_up_for_it(tiny_model):
    """The parent's script has no guard around its main code: the engine does not run it again."""
    script = [sys.executable, "-c", textwrap.dedent(PARENT), str(tiny_model("llama"))]
    with subprocess.Popen(script, stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        pid, folder = parent.stdout.readline().split()
        assert Path(f"/proc/{pid}").exists()
        assert Path(folder).exists()
        parent.kill()
    assert wait_for(lambda: not Path(f"/proc/{pid}").exists() or _is_zombie(pid))
    assert not Path(folder).exists()


def _is_zombie(pid: str) -> bool:
    """Nobody may collect an orphan in a container without an init."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


class Core:
    """Counts down its work; breaks at the step that it is told to."""

    def __init__(self, steps: int, breaks: bool = False) -> None:
        self.left, self.breaks, self.added, self.aborted, self.steps = 0, breaks, [], [], steps

    @property
    def has_work(self) -> bool:
        return self.left > 0

    ears = ()

    def check(self) -> None:
        """There is no worker."""

    def add(self, requests) -> None:
        self.added += requests
        self.left = self.steps

    def abort(self, keys) -> None:
        self.aborted += keys

    def step(self) -> EngineOutputs | None:
        self.left -= 1
        if self.breaks and self.left == 0:
            raise RuntimeError("the device is gone")
        none = np.zeros(0, np.int32)
        return EngineOutputs(np.array([self.left]), none, none, none) if self.left % 2 == 0 else None


def connected(context: zmq.Context) -> tuple[zmq.Socket, zmq.Socket, zmq.Socket, zmq.Socket]:
    """(to the engine, from the engine, the engine's inbox, its outbox)."""
    ours_in, ours_out = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for end, other, name in ((ours_in, inbox, "in"), (outbox, ours_out, "out")):
        other.bind(f"inproc://{name}")
        end.connect(f"inproc://{name}")
    return ours_in, ours_out, inbox, outbox


def test_the_loop_takes_messages_between_steps_sends_news_and_waits_without_work():
    context, core = zmq.Context(), Core(steps=6)
    ours_in, ours_out, inbox, outbox = connected(context)
    counted: list[int] = []
    arguments = (core, inbox, outbox, lambda: counted.append(core.left))
    thread = threading.Thread(target=engine_process.run, args=arguments)
    thread.start()
    ours_in.send_multipart((wire.ABORT, wire.encode([3, 2**40])))
    ours_in.send_multipart((wire.ADD, wire.encode([make_request(key=2**40)])))
    read = wire.decoder(EngineOutputs)
    messages = [ours_out.recv_multipart() for _ in range(3)]
    assert [kind for kind, _ in messages] == [wire.OUTPUTS] * 3
    assert [read(body).keys.tolist() for _, body in messages] == [[4], [2], [0]]
    assert not ours_out.poll(50)
    ours_in.send_multipart((wire.CLOSE, b""))
    thread.join(5)
    assert not thread.is_alive()
    assert core.aborted == [3, 2**40]
    assert core.added[0].key == 2**40
    assert len(counted) == 2 + 3, "two messages, and the steps that had news"
    context.destroy(linger=0)


def test_everything_that_crosses_the_border_arrives_as_it_was():
    params = SamplingParams(
        n=2, stop=["a", "b"], logit_bias={3: 1.5}, allowed_token_ids=(1, 2), logprobs=-1, bad_words=["x"],
        stop_token_ids=[4], max_tokens=None,
    )
    request = EngineRequest(
        key=2**40 + 1, prompt_token_ids=np.arange(5, dtype=np.int32), params=params, seed=-(2**63),
        end_token_ids=(1, 2), max_len=77, bad_word_token_ids=((1, 2), (3,)), priority=-4, arrival=1.25,
        cache_salt="salt", resumed_token_ids=np.array([9], np.int32),
    )
    (there,) = wire.decoder(list[EngineRequest])(wire.encode([request]))
    for name in ("prompt_token_ids", "resumed_token_ids"):
        ours, theirs = getattr(request, name), getattr(there, name)
        assert (ours.dtype, ours.tolist()) == (theirs.dtype, theirs.tolist())
    assert there.params == params.clone(allowed_token_ids=[1, 2])
    rest = set(EngineRequest.__dataclass_fields__) - {"prompt_token_ids", "resumed_token_ids", "params"}
    assert {name: getattr(there, name) for name in rest} == {name: getattr(request, name) for name in rest}

    ids = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    outputs = EngineOutputs(
        keys=np.array([2**40, 7]), num_tokens=np.array([1, 0], np.int32), tokens=np.array([5], np.int32),
        finish=np.array([0, 3], np.int32), logprobs=TokenLogprobs(ids, -ids.astype(np.float32), ids[..., 0]),
        prompt_logprobs=[(7, PromptLogprobs(1, 2, 3, ids[0], ids[0] / np.float32(3), ids[0, :, 0]))],
        num_cached=[(np.int64(7), np.int32(16))], errors=[(7, "why")],
    )
    there = wire.decoder(EngineOutputs)(wire.encode(outputs))
    scores = ("ids", "values", "rank")
    for ours, theirs, names in (
        (outputs, there, ("keys", "num_tokens", "tokens", "finish")),
        (outputs.logprobs, there.logprobs, scores),
        (outputs.prompt_logprobs[0][1], there.prompt_logprobs[0][1], scores),
    ):
        for name in names:
            assert getattr(ours, name).dtype == getattr(theirs, name).dtype
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
    assert (there.num_cached, there.errors, there.stats) == ([(7, 16)], [(7, "why")], outputs.stats)


def test_a_failure_in_a_step_ends_the_loop_and_is_told_with_its_place():
    """From outside it looks like the failure of a real device."""
    context, core = zmq.Context(), Core(steps=3, breaks=True)
    ours_in, _, inbox, outbox = connected(context)
    ours_in.send_multipart((wire.ADD, wire.encode([make_request()])))
    with pytest.raises(RuntimeError) as caught:
        engine_process.run(core, inbox, outbox, lambda: None)
    failure = engine_process._failure(caught.value)
    assert not failure.users
    assert "in step" in failure.text
    assert failure.text.endswith("RuntimeError: the device is gone")
    context.destroy(linger=0)
