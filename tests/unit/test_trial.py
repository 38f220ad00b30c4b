"""Grammars are tried in processes that end with their time and memory, whatever a library does."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

import faulty_trial
import psutil
import pytest
from scripted_engine import LIMITS
from text_model import write_tokenizer
from waiting import wait_for

from slipstream.config.structured_outputs import StructuredOutputsConfig
from slipstream.contracts.errors import BadRequest, EngineError, QueueTimeoutError
from slipstream.contracts.sampling_params import SamplingParams
from slipstream.contracts.structured_outputs import StructuredOutputsParams
from slipstream.engine.client import EngineInfo
from slipstream.engine.input_processor import InputProcessor
from slipstream.engine.processes import spawn
from slipstream.grammar.compiler import WORKERS
from slipstream.grammar.trial import TOO_LARGE, Trials, share_trials
from slipstream.text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def trials(tokenizer: Tokenizer) -> Callable[..., Trials]:
    def spawn_faulty(_: str, *words: str, filenos: tuple[int, ...]) -> Any:
        return spawn(faulty_trial.__name__, *words, filenos=filenos)

    return lambda backend="guidance", vocab=300: share_trials(backend, tokenizer, vocab, [2], spawn_faulty)


def check(trials: Trials, regex: str, seconds: float = 60.0) -> Any:
    config = StructuredOutputsConfig(backend="guidance", compile_timeout=seconds)
    return trials.check(StructuredOutputsParams(regex=regex), config)


def test_an_answer_says_the_text_and_the_first_tokens(trials) -> None:
    text, legal = check(trials(), "fine")
    assert text == "fine" and legal.shape == (300,) and legal.nonzero()[0].tolist() == [0, 2]
    with pytest.raises(BadRequest, match=r"^structured_outputs\.regex='wrong': is wrong$"):
        check(trials(), "wrong")


def test_what_takes_too_long_or_too_much_is_refused_and_harms_nobody(trials) -> None:
    one = trials()
    check(one, "fine")
    process = one._process
    for number in range(2 * WORKERS + 1):
        with pytest.raises(BadRequest, match=r"regex='slow 600.*takes longer to compile than 0.1 s"):
            check(one, f"slow 600{number}", 0.1)
        with pytest.raises(BadRequest, match=f"regex='hungry': {TOO_LARGE}"):
            check(one, "hungry")
        with pytest.raises(BadRequest, match=f"regex='hungrier': {TOO_LARGE}"):
            check(one, "hungrier")
        assert check(one, f"fine {number}")[0] == f"fine {number}"
    assert one._process is process, "copies ended, not what they were copied from"
    mother = psutil.Process(process._popen.pid)
    assert wait_for(lambda: not mother.children()), "the kernel ends those whom nobody waits for"


def test_who_gets_no_turn_in_time_is_told_so(trials) -> None:
    one = trials()
    check(one, "fine")
    busy = [threading.Thread(target=check, args=(one, f"slow 2.{number}")) for number in range(WORKERS)]
    for thread in busy:
        thread.start()
    assert wait_for(lambda: one._turns._value == 0)
    with pytest.raises(QueueTimeoutError):
        check(one, "late", 0.05)
    for thread in busy:
        thread.join()
    assert check(one, "late", 0.5)[0] == "late"


def test_no_right_grammar_is_refused_while_processes_die(trials) -> None:
    one, done = trials(), threading.Event()
    check(one, "fine")

    def kill() -> None:
        while not done.wait(0.3):
            one._process._popen.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        for number in range(100):
            with contextlib.suppress(EngineError):  # two deaths in a row
                assert check(one, f"fine {number}")[0] == f"fine {number}"
    finally:
        done.set()
        killer.join()


def test_an_interrupt_in_the_middle_of_a_message_harms_no_later_one(trials, monkeypatch) -> None:
    one = trials()
    check(one, "fine")
    sendall = socket.socket.sendall

    def half(channel: socket.socket, data: bytes) -> None:
        sendall(channel, data[: len(data) // 2])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(socket.socket, "sendall", half)
        check(one, "never")
    for number in range(5):
        assert check(one, f"fine {number}")[0] == f"fine {number}"


def test_an_answer_that_breaks_off_is_none(trials) -> None:
    one = trials()
    with pytest.raises(BadRequest, match=f"regex='broken off': {TOO_LARGE}"):
        check(one, "broken off")
    with pytest.raises(EngineError, match="grammars cannot be tried"):
        check(trials("ends"), "fine")


def test_another_process_takes_the_place_of_one_that_is_gone(trials) -> None:
    one = trials()
    known = check(one, "fine")
    os.kill(one._process._popen.pid, signal.SIGKILL)
    one._process._popen.wait()
    assert check(one, "fine")[0] == known[0], "what was said is known"
    assert check(one, "fine, too")[0] == "fine, too"


def test_a_vocabulary_that_a_library_cannot_read_is_every_requests_error(trials) -> None:
    for _ in range(2):
        with pytest.raises(BadRequest, match=r"regex='fine': this vocabulary is none"):
            check(trials("bad"), "fine")


def test_front_ends_of_one_vocabulary_share_a_process_which_ends_with_them(trials) -> None:
    one, same, other = trials(), trials(), trials(vocab=310)
    assert one is same and one is not other
    check(one, "fine")
    pid = one._process._popen.pid
    del one, same
    gc.collect()
    assert wait_for(lambda: not psutil.pid_exists(pid))


def test_a_front_end_that_is_closed_has_no_process(tokenizer: Tokenizer) -> None:
    plan = {"structured_outputs": {"value": {"backend": "guidance"}}}
    inputs = InputProcessor(tokenizer, EngineInfo(LIMITS, (2,), plan=plan), seed=0)
    constrained = SamplingParams(structured_outputs=StructuredOutputsParams(regex="ok"))
    mine = psutil.Process()
    before = mine.children()
    assert inputs.prepare([5], SamplingParams()).grammar == "" and mine.children() == before
    assert inputs.prepare([5], constrained).grammar
    assert len(mine.children()) == len(before) + 1
    inputs.close()
    gc.collect()
    assert wait_for(lambda: mine.children() == before)
