"""`slipstream bench serve`: the load is what the flags say, what is timed is what happened, and nothing that
goes wrong is counted as served."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from live import Live, serve
from scripted import ByteTokenizer, ScriptedEngine
from text_model import write_tokenizer

from slipstream.cli.main import main
from slipstream.cli.serve_client import EventLines, Record, Run, Target
from slipstream.cli.serve_load import CHAT_INPUT_MEAN, CHAT_OUTPUT_MEAN, Ask, arrivals, chat_lengths, ramp
from slipstream.cli.serve_stats import figures
from slipstream.server.app import build_app
from slipstream.text.tokenizer import load_tokenizer

REPLY = "x" * 12
LENGTHS = ["--input-len", "8:16", "--no-progress"]


def render(messages: list[dict[str, Any]], **_: Any) -> str:
    return "".join(turn["content"] for turn in messages)


@contextmanager
def over(engine: ScriptedEngine) -> Iterator[Live]:
    with serve(build_app(engine, "scripted", tokenizer=ByteTokenizer(), render=render)) as live:
        yield live


def bench(live: Live, file: Path, *flags: str) -> dict[str, Any]:
    """The report of a run that must succeed."""
    argv = ["bench", "serve", "--base-url", live.url, "--json", str(file), *LENGTHS, *flags]
    assert main(argv) == 0
    report: dict[str, Any] = json.loads(file.read_text())
    return report


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_requests_arrive_as_asked_and_every_token_is_counted(
    endpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = ScriptedEngine(reply=REPLY, delay=0.004)
    with over(engine) as live:
        plot = tmp_path / "serve.png"
        report = bench(
            live, tmp_path / "r.json", "--endpoint", endpoint, "--num-prompts", "24", "--request-rate", "60",
            "--output-len", "4:10", "--goodput", "tpot:2000", "ttft:0.001", "--plot", str(plot),
        )  # fmt: skip
    printed = capsys.readouterr().out
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert (report["completed"], report["failed"]) == (24, 0)
    ours = engine.seen[1:]  # the first one was the warm-up
    # What the server was asked is what the report says was served.
    assert report["output_tokens"] == sum(params.max_tokens for _, params, _, _ in ours)
    assert report["input_tokens"] == sum(len(prompt["prompt_token_ids"]) for prompt, _, _, _ in ours)
    assert len({bytes(np.array(prompt["prompt_token_ids"])) for prompt, _, _, _ in ours}) == 24
    assert all(4 <= params.max_tokens <= 10 and params.ignore_eos for _, params, _, _ in ours)
    sent = [record["sent"] for record in report["records"]]
    due = arrivals(np.random.default_rng(0), 24, 60, 1.0)
    assert np.allclose([record["due"] for record in report["records"]], due)
    assert all(when >= planned for when, planned in zip(sent, due, strict=True))
    for record in report["records"]:
        streamed = record["ttft"] + record["tpot"] * (record["output_tokens"] - 1)
        # The engine sleeps before each token, so no first and no last one can come sooner.
        assert record["ttft"] >= 0.004 and streamed >= 0.004 * record["output_tokens"] - 1e-9
        assert record["ended"] - record["sent"] >= streamed - 1e-9
    assert report["goodput"]["share"] == 0
    assert "goodput 0.00 requests/s, 0.0% of all within tpot:2000" in printed
    for word in ("requests/s", "output tok/s", "TTFT", "TPOT", "ITL", "E2E", "median", "p99"):
        assert word in printed


def test_a_closed_loop_keeps_as_many_running_as_it_was_told(tmp_path: Path) -> None:
    engine = ScriptedEngine(reply=REPLY, delay=0.002)
    with over(engine) as live:
        report = bench(
            live, tmp_path / "r.json", "--num-prompts", "20", "--max-concurrency", "4", "--output-len", "10"
        )
    assert report["most_running"] == 4 and report["completed"] == 20
    moments = [(r[name], step) for r in report["records"] for name, step in (("sent", 1), ("ended", -1))]
    assert max(np.cumsum([step for _, step in sorted(moments)])) == 4


def test_failures_are_told_and_not_counted_as_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = ScriptedEngine(reply=REPLY, fail_after=30)  # one request in the middle fails in its stream
    with over(engine) as live:
        report = bench(live, tmp_path / "r.json", "--num-prompts", "8", "--output-len", "10")
        assert (report["completed"], report["failed"]) == (7, 1)
        assert report["output_tokens"] == 70
        assert "no token was left to choose" in next(iter(report["errors"]))
        assert "failed 1 times" in capsys.readouterr().out
        argv = ["bench", "serve", "--base-url", live.url, *LENGTHS]
        assert main([*argv, "--model", "another"]) == 1
        assert "status 404" in capsys.readouterr().err
        assert main([*argv, "--extra-body", '{"no_such_field": 1}']) == 1
        assert "no_such_field" in capsys.readouterr().err
    assert main(argv) == 2, "nobody listens there any more"
    assert "nobody answers at /v1/models" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--request-rate", "0"], "--request-rate"),
        (["--burstiness", "x"], "--burstiness"),
        (["--goodput", "speed:3"], "must be one of ttft, tpot, e2el"),
        (["--goodput", "ttft"], "above 0"),
        (["--extra-body", "[1]"], "must be a JSON object"),
    ],
)
def test_flags_that_mean_nothing_are_refused(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", "serve", *flags])
    assert end.value.code == 2 and words in capsys.readouterr().err


def test_conversations_of_a_file_are_asked_as_they_are(tmp_path: Path) -> None:
    question, reply = "Is this a question?", "It is, of a kind, yes."
    talk = [{"from": "human", "value": question}, {"from": "gpt", "value": reply}]
    short = [{"from": "human", "value": "?"}, {"from": "gpt", "value": "!"}]
    file = tmp_path / "talks.json"
    file.write_text(json.dumps([{"conversations": turns} for turns in (talk, short, talk[:1])]))
    engine = ScriptedEngine(reply=REPLY)
    with over(engine) as live:
        argv = ["bench", "serve", "--base-url", live.url, "--no-progress", "--num-prompts", "3"]
        assert main([*argv, "--dataset", str(file)]) == 0
        asked = {bytes(i - 1 for i in prompt["prompt_token_ids"]).decode() for prompt, *_ in engine.seen[1:]}
        assert asked == {question}
        assert {params.max_tokens for _, params, _, _ in engine.seen} == {round(len(reply) / 4.2)}
        file.write_text('{"a": 1}')
        assert main([*argv, "--dataset", str(file)]) == 2


def test_with_a_tokenizer_prompts_have_exactly_the_tokens_asked(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(folder)
    engine = ScriptedEngine(reply=REPLY)
    with over(engine) as live:
        bench(
            live, tmp_path / "r.json", "--num-prompts", "4", "--tokenizer", str(folder), "--input-len", "20",
            "--output-len", "2",
        )  # fmt: skip
    for prompt, *_ in engine.seen[1:]:
        text = bytes(i - 1 for i in prompt["prompt_token_ids"]).decode()
        assert len(tokenizer.encode(text, add_special_tokens=False)) == 20


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_burstiness_asked(burstiness: float) -> None:
    """A gamma distribution of shape k has a coefficient of variation of 1 / sqrt(k)."""
    gaps = np.diff(arrivals(np.random.default_rng(1), 40_000, 50.0, burstiness))
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_chat_lengths_have_sharegpts_means_within_what_the_cuts_take() -> None:
    inputs, outputs = chat_lengths(np.random.default_rng(2), 50_000)
    assert inputs.min() >= 4 and inputs.max() <= 1024 and (inputs + outputs).max() <= 2048
    assert 0.85 * CHAT_INPUT_MEAN < inputs.mean() <= 1.02 * CHAT_INPUT_MEAN
    assert 0.85 * CHAT_OUTPUT_MEAN < outputs.mean() <= 1.02 * CHAT_OUTPUT_MEAN


@given(
    st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=20), max_size=6),
    st.lists(st.integers(1, 9)),
    st.sampled_from(["\n", "\r\n"]),
)
def test_events_are_the_same_however_their_bytes_are_cut(texts: list[str], cuts: list[int], end: str) -> None:
    stream = "".join(f": a comment{end}{end}id: 3{end}data: {text}{end}{end}" for text in texts).encode()
    lines, place, found = EventLines(), 0, []
    for size in [*cuts, len(stream)]:
        found += list(lines.feed(stream[place : place + size]))
        place += size
    assert found == [text.encode().lstrip(b" ") for text in texts]


def test_figures_of_made_up_records_are_those_worked_out_by_hand() -> None:
    quick = Record(0.0, 0.0, 1.0, [0.1, 0.4, 1.0], prompt_tokens=5, output_tokens=4)
    slow = Record(1.0, 1.5, 4.0, [3.5], prompt_tokens=7, output_tokens=1)
    failed = Record(1.0, 1.0, 2.0, error="why")
    found = figures([quick, slow, failed], 4.0, {"ttft": 500.0, "tpot": 301.0}, 2)
    assert found["requests_per_second"] == 0.5 and found["output_tokens_per_second"] == 1.25
    assert found["total_tokens_per_second"] == 17 / 4
    spread = found["milliseconds"]
    assert spread["ttft"]["mean"] == pytest.approx(1050) and spread["e2e"]["median"] == pytest.approx(1750)
    assert spread["tpot"]["median"] == pytest.approx(300) and spread["itl"]["mean"] == pytest.approx(450)
    assert found["goodput"]["share"] == pytest.approx(1 / 3)
    assert found["errors"] == {"why": 1}


class Trickle:
    """A server that answers each request with events at set times, and knows nothing else. sent: when."""

    def __init__(self, delays: list[float]) -> None:
        self.delays = delays
        self.sent: list[float] = []

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        try:
            for delay in self.delays:
                await asyncio.sleep(delay)
                self.sent.append(time.perf_counter())
                writer.write(b'data: {"choices": [{"text": "a"}]}\n\n')
            writer.write(b"data: [DONE]\n\n")
            await writer.drain()
        finally:
            writer.close()


def run_against(trickle: Trickle, count: int, timeout: float = 10.0) -> Run:
    async def measure() -> Run:
        server = await asyncio.start_server(trickle.answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        target = Target(
            base_url=f"http://127.0.0.1:{port}", endpoint="/v1/completions", body={}, timeout=timeout
        )
        run = Run(target, [Ask("hi", 4, 0.0)] * count, None)
        await run.run()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0.01)
        return run

    return asyncio.run(measure())


def test_times_are_those_at_which_chunks_were_sent() -> None:
    trickle = Trickle([0.2, 0.1, 0.3])
    run = run_against(trickle, 1)
    (record,) = run.records
    assert record.error == "" and record.output_tokens == 3  # counted in chunks, for want of usage
    # Server and client share a loop: each chunk is read before the next one is written.
    begin = time.perf_counter() - run.clock()
    sent, seen = np.array(trickle.sent), begin + np.array(record.arrived)
    assert np.all(sent <= seen) and np.all(seen[:-1] < sent[1:])
    assert record.ttft >= 0.2 and sum(record.gaps()) == pytest.approx(seen[-1] - seen[0])


def test_requests_without_a_limit_run_all_at_once() -> None:
    run = run_against(Trickle([0.2, 0.1]), 20)
    assert run.most_running == 20 and not run.failed


def test_a_server_that_does_not_end_is_left() -> None:
    run = run_against(Trickle([0.05, 30.0]), 2, timeout=0.5)
    assert [record.error for record in run.records] == ["no end within 0.5 s"] * 2


def test_answers_without_tokens_are_failures() -> None:
    assert run_against(Trickle([]), 1).records[0].error == "the answer held no tokens"


@pytest.mark.parametrize(("strategy", "middle"), [("linear", 50.5), ("exponential", 10.0)])
def test_a_ramp_goes_from_rate_to_rate(strategy: str, middle: float) -> None:
    rates = ramp(strategy, 1.0, 100.0, 4001)
    assert (rates[0], rates[-1]) == pytest.approx((1.0, 100.0)) and rates[2000] == pytest.approx(middle)
    times = arrivals(np.random.default_rng(1), 4001, rates, 1.0)
    # Means of intervals are the inverse rates: 1,000 of them lie within 10%.
    assert np.diff(times)[-1000:].mean() == pytest.approx((1 / rates[-1000:]).mean(), rel=0.1)
    assert np.diff(times)[:1000].mean() == pytest.approx((1 / rates[1:1001]).mean(), rel=0.1)
    assert ramp(strategy, 3.0, 9.0, 1).tolist() == [3.0]


def test_a_ramp_is_run_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--ramp-up-strategy", "linear", "--ramp-up-start-rps", "40", "--ramp-up-end-rps", "200"]
    with over(ScriptedEngine(reply=REPLY)) as live:
        report = bench(live, tmp_path / "r.json", "--num-prompts", "12", "--output-len", "2", *flags)
        assert report["ramp_up_strategy"] == "linear" and report["ramp_up_end_rps"] == 200.0
        assert main(["bench", "serve", "--base-url", live.url, *flags[:4]]) == 2
        assert main(["bench", "serve", "--base-url", live.url, *flags[2:]]) == 2
        assert main(["bench", "serve", "--base-url", live.url, "--request-rate", "5", *flags]) == 2
    error = capsys.readouterr().err
    assert error.count("--ramp-up-strategy needs --ramp-up-start-rps") == 2 and "--request-rate=5" in error
