"""AsyncLLM: over a scripted engine for what a real one cannot be made to do at will, and over a real engine
process for everything else."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import ScriptedClient, make_outputs
from text_model import ids_of, make_text_model, write_tokenizer

from slipstream import (
    LLM,
    AsyncLLM,
    BadRequest,
    EngineArgs,
    EngineDeadError,
    EngineError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from slipstream.contracts.errors import OVERDUE, QueueTimeoutError
from slipstream.contracts.outputs import EngineOutputs
from slipstream.contracts.step import Finish
from slipstream.text.tokenizer import Tokenizer, load_tokenizer

SMALL = {
    "dtype": "float32", "max_model_len": 256, "max_num_seqs": 16, "num_gpu_blocks_override": 257,
    "spare_processes": False,
}  # fmt: skip
FINAL = RequestOutputKind.FINAL_ONLY
DELTA = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, output_kind=RequestOutputKind.DELTA)


async def collect(outputs: AsyncGenerator[RequestOutput, None]) -> list[RequestOutput]:
    return [output async for output in outputs]


def joined(outputs: list[RequestOutput], index: int = 0) -> tuple[str, list[int]]:
    """Text and token ids of a sample's deltas."""
    pieces = [piece for output in outputs for piece in output.outputs if piece.index == index]
    return "".join(p.text for p in pieces), [token for piece in pieces for token in piece.token_ids]


# Over a scripted engine.


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def scripted(tokenizer: Tokenizer, reply: Any, **options: Any) -> tuple[AsyncLLM, ScriptedClient]:
    client = ScriptedClient(reply, **options)
    return AsyncLLM(client, tokenizer), client


def test_a_request_that_fails_alone_raises_and_the_others_go_on(tokenizer):
    def reply(request):
        return [*ids_of("ab"), None] if request.prompt_token_ids[0] == 9 else ids_of("abcdef")

    llm, _ = scripted(tokenizer, reply)

    async def both() -> list[Any]:
        runs = (collect(llm.generate([first], DELTA, "r")) for first in (9, 10))
        return await asyncio.gather(*runs, return_exceptions=True)

    failed, fine = asyncio.run(both())
    assert isinstance(failed, EngineError)
    assert not isinstance(failed, EngineDeadError)
    assert "failed alone" in str(failed)
    assert joined(fine)[0] == "abcdef"
    assert not llm.errored


def test_the_other_samples_of_a_failed_request_are_aborted(tokenizer):
    def reply(request):
        return [None] if len(client.seen) == 0 else ids_of("x" * 100)

    llm, client = scripted(tokenizer, reply)
    with pytest.raises(EngineError):
        asyncio.run(collect(llm.generate([5], DELTA.clone(n=3), "r")))
    assert client.live == {}
    assert len(client.aborted) == 2


def test_a_slow_reader_gets_fewer_outputs_and_the_whole_text(tokenizer):
    llm, client = scripted(tokenizer, lambda request: ids_of("abcdefghijklmnopqrstuvwxyz"))

    async def read(until_all_came: bool) -> list[RequestOutput]:
        outputs = []
        async for output in llm.generate([5], DELTA, "r"):
            outputs.append(output)
            while until_all_came and client.live:
                await asyncio.sleep(0)
        return outputs

    slow, quick = asyncio.run(read(True)), asyncio.run(read(False))
    assert joined(slow)[0] == joined(quick)[0] == "abcdefghijklmnopqrstuvwxyz"
    assert len(slow) < 5 < len(quick)


@pytest.mark.parametrize("kind", list(RequestOutputKind))
@pytest.mark.parametrize("most", [1, 3])
def test_no_piece_of_a_stop_string_is_streamed_and_the_engine_is_told_to_end(tokenizer, kind, most):
    said = "Monday, Tuesday, Wednesday, Thursday, Friday"
    llm, client = scripted(tokenizer, lambda request: ids_of(said), most=most)
    params = DELTA.clone(stop=["Wednesday, Thursday"], output_kind=kind, max_tokens=100)
    outputs = asyncio.run(collect(llm.generate([5], params, "r")))
    last = outputs[-1].outputs[0]
    text, ids = joined(outputs) if kind == RequestOutputKind.DELTA else (last.text, list(last.token_ids))
    assert text == "Monday, Tuesday, "
    assert ids == ids_of("Monday, Tuesday, Wednesday, Thursday")
    assert (last.finish_reason, last.stop_reason) == ("stop", "Wednesday, Thursday")
    assert client.live == {}
    assert client.aborted == [client.seen[0].key]


@pytest.mark.parametrize("stop", [None, "한국어!"])
def test_emoji_thai_and_korean_stream_without_broken_characters(tokenizer, stop):
    """Every byte is a token of its own here."""
    said = "👩\u200d👩\u200d👧 🇺🇳 ภาษาไทย 한국어"
    llm, _ = scripted(tokenizer, lambda request: ids_of(said), most=2)
    params = DELTA.clone(n=2, max_tokens=200, stop=stop)
    streamed = asyncio.run(collect(llm.generate([5], params, "r")))
    whole = asyncio.run(collect(llm.generate([5], params.clone(output_kind=FINAL), "r")))
    for index in range(2):
        assert joined(streamed, index)[0] == whole[0].outputs[index].text == said
    assert not any("\ufffd" in piece.text for output in streamed for piece in output.outputs)


def test_streams_end_with_the_reason_where_outputs_cannot_be_read(tokenizer, caplog):
    llm, client = scripted(tokenizer, lambda request: ids_of("abc"))

    def broken(timeout: float | None = None) -> None:
        raise KeyError("not an output")

    client.receive = broken
    with caplog.at_level(logging.ERROR), pytest.raises(EngineDeadError, match="not an output"):
        asyncio.run(collect(llm.generate([5], DELTA, "r")))
    assert "outputs could not be read" in caplog.text
    assert llm.errored


def test_readers_are_woken_a_few_at_a_time_so_that_others_are_heard_between(tokenizer, monkeypatch):
    monkeypatch.setattr("slipstream.engine.async_llm.MOST_WOKEN", 8)
    llm, _ = scripted(tokenizer, lambda request: ids_of("abcdef"))
    read, at_once = 0, []

    async def reader() -> None:
        nonlocal read
        async for _ in llm.generate([5], DELTA, "r"):
            read += 1

    async def main() -> None:
        readers = asyncio.gather(*(reader() for _ in range(100)))
        while not readers.done():
            before = read
            await asyncio.sleep(0)
            at_once.append(read - before)
        await readers

    asyncio.run(main())
    assert 100 <= read == sum(at_once) and max(at_once) == 8


class Delayed(ScriptedClient):
    """Says nothing for `quiet` seconds after a request came; then that it was let in, or `refusal`."""

    quiet, refusal = 0.6, ""

    def receive(self, timeout: float | None = None) -> EngineOutputs | None:
        if not self.seen or time.monotonic() < self.seen[0].arrival + self.quiet:
            return None
        if self.refusal:
            gone, self.live = list(self.live), {}
            ends = [(key, [], Finish.ERROR) for key in gone]
            return make_outputs(ends, errors=[(key, self.refusal) for key in gone]) if gone else None
        outputs = super().receive(timeout)
        if outputs is not None:
            outputs.num_cached = [(request.key, 0) for request in self.seen]
        return outputs


def test_who_was_let_in_is_not_refused_because_the_news_comes_late(tokenizer):
    """As under overload, where the step of the admission takes longer than what was left of the wait."""
    llm = AsyncLLM(Delayed(lambda request: ids_of("abcdef")), tokenizer)
    outputs = asyncio.run(collect(llm.generate([5], DELTA, "r", max_wait=0.1)))
    assert joined(outputs)[0] == "abcdef"
    client = Delayed(lambda request: ids_of("abc"))
    client.refusal = OVERDUE
    llm = AsyncLLM(client, tokenizer)
    with pytest.raises(QueueTimeoutError, match=r"within 0\.1 seconds"):
        asyncio.run(collect(llm.generate([5], DELTA, "r", max_wait=0.1)))
    request = client.seen[0]
    assert request.admit_by == request.arrival + 0.1 and request.first == request.key


def test_without_an_engine_the_wait_ends_in_time(tokenizer):
    client = Delayed(lambda request: ids_of("abc"))
    client.up, client.quiet = False, 60.0
    llm = AsyncLLM(client, tokenizer)
    begin = time.monotonic()
    with pytest.raises(QueueTimeoutError):
        asyncio.run(collect(llm.generate([5], DELTA, "r", max_wait=0.1)))
    assert time.monotonic() - begin >= 0.1, "the engine would have answered"


def test_a_new_engine_keeps_deadlines_of_those_who_never_had_a_row_only(tokenizer):
    client = ScriptedClient(lambda request: ids_of("x" * 200))
    llm = AsyncLLM(client, tokenizer)

    async def main() -> list[float]:
        runs = [llm.generate([5], DELTA, "r", max_wait=30.0) for _ in range(2)]
        begun = [asyncio.create_task(anext(run)) for run in runs]
        await asyncio.gather(*begun)
        llm._outputs.process(make_outputs([], num_cached=[(client.seen[0].key, 0)]))
        again = llm._outputs.resume(llm._wake)
        for run in runs:
            await run.aclose()
        return [request.admit_by - request.arrival for request in again]

    assert asyncio.run(main()) == pytest.approx([math.inf, 30.0])


def test_shutdown_ends_streams_and_refuses_new_ones(tokenizer):
    llm, client = scripted(tokenizer, lambda request: ids_of("x" * 200))

    async def stop_in_the_middle() -> None:
        async for _ in llm.generate([5], DELTA, "r"):
            llm.shutdown()

    with pytest.raises(EngineDeadError, match="shut down"):
        asyncio.run(stop_in_the_middle())
    assert client.closed
    with pytest.raises(EngineDeadError, match="shut down"):
        asyncio.run(collect(llm.generate([5], DELTA, "r")))


# Over a real engine in a process of its own.


@pytest.fixture(scope="module")
def folder(tiny_model) -> Path:
    return make_text_model(tiny_model)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[AsyncLLM]:
    made = AsyncLLM.from_engine_args(EngineArgs(model=str(folder), **SMALL))
    yield made
    made.shutdown()


async def until_idle(llm: AsyncLLM) -> None:
    """Waits for the engine to say that nothing runs."""
    for _ in range(3000):
        if llm.stats.num_running == llm.stats.num_waiting == 0:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"still busy: {llm.stats}")


def test_streams_say_what_the_engine_says_without_a_process(llm, folder):
    alone = LLM(folder, **SMALL)
    prompts = [f"prompt {i}" for i in range(24)]
    params = [DELTA.clone(temperature=float(i % 2), seed=i, n=1 + i % 3, max_tokens=5 + i) for i in range(24)]
    wanted = alone.generate(prompts, params, use_tqdm=False)
    alone.close()

    async def everything() -> list[list[RequestOutput]]:
        each = enumerate(zip(prompts, params, strict=True))
        return await asyncio.gather(*(collect(llm.generate(p, q, str(i))) for i, (p, q) in each))

    for outputs, want in zip(asyncio.run(everything()), wanted, strict=True):
        for piece in want.outputs:
            assert joined(outputs, piece.index) == (piece.text, list(piece.token_ids))
        assert [output.finished for output in outputs].count(True) == 1
        assert outputs[-1].num_cached_tokens is not None


def test_live_requests_of_one_id_are_never_mixed(llm):
    def run(number: int) -> Any:
        params = DELTA.clone(seed=number, temperature=1.0)
        return collect(llm.generate(f"other {number}", params, "same"))

    async def four() -> list[list[RequestOutput]]:
        return await asyncio.gather(*map(run, range(4)))

    async def one_by_one() -> list[list[RequestOutput]]:
        return [await run(number) for number in range(4)]

    together, alone = asyncio.run(four()), asyncio.run(one_by_one())
    assert [joined(outputs) for outputs in together] == [joined(outputs) for outputs in alone]
    assert {output.request_id for outputs in together for output in outputs} == {"same"}


def test_abort_ends_every_request_of_the_id_with_what_it_had(llm):
    async def main() -> list[list[RequestOutput]]:
        long = DELTA.clone(max_tokens=None)
        runs = [asyncio.create_task(collect(llm.generate("a", long, name))) for name in ("x", "x", "y")]
        while llm.stats.num_running < 3:
            await asyncio.sleep(0.005)
        await llm.abort("x")
        await llm.abort("nobody")
        first, second = await asyncio.gather(*runs[:2])
        await llm.abort("y")
        results = [first, second, await runs[2]]
        await until_idle(llm)
        return results

    for outputs in asyncio.run(main()):
        assert outputs[-1].finished
        assert outputs[-1].outputs[0].finish_reason == "abort"
        assert len(joined(outputs)[1]) < 254


def test_dropped_streams_leave_no_row_and_no_block(llm):
    async def dropped(number: int) -> None:
        outputs = llm.generate(f"text {number}", DELTA.clone(max_tokens=200), "r")
        count = 0
        async for _ in outputs:
            count += 1
            if count == 3:
                break
        await outputs.aclose()

    async def main() -> None:
        await asyncio.gather(*(dropped(i) for i in range(60)))
        await until_idle(llm)
        assert llm.stats.free_blocks == llm.stats.num_blocks == llm.info.limits.num_blocks
        (last,) = await collect(llm.generate("after", DELTA.clone(output_kind=FINAL), "r"))
        assert last.finished

    asyncio.run(main())


def test_a_cancelled_reader_aborts_its_request(llm):
    async def main() -> None:
        task = asyncio.create_task(collect(llm.generate("a", DELTA.clone(max_tokens=None), "r")))
        while llm.stats.num_running == 0:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until_idle(llm)

    asyncio.run(main())


def test_bad_requests_are_refused_before_the_engine_hears_of_them(llm):
    async def main() -> None:
        for prompt, params in (([400], DELTA), ("", DELTA), ("a", DELTA.clone(logit_bias={999: 1.0}))):
            with pytest.raises(BadRequest):
                await collect(llm.generate(prompt, params, "r"))
        assert joined(await collect(llm.generate("a", DELTA, "r")))[1]

    asyncio.run(main())


def test_one_engine_serves_one_event_loop_after_another(llm):
    texts = {joined(asyncio.run(collect(llm.generate("again", DELTA, "r"))))[0] for _ in range(3)}
    assert len(texts) == 1


def test_a_killed_engine_that_may_not_be_replaced_ends_every_stream_with_an_error(folder):
    llm = AsyncLLM.from_engine_args(EngineArgs(model=str(folder), max_engine_restarts=0, **SMALL))

    async def main() -> list[Any]:
        long = DELTA.clone(max_tokens=None)
        runs = [asyncio.create_task(collect(llm.generate("a", long, "r"))) for _ in range(5)]
        while llm.stats.num_running < 5:
            await asyncio.sleep(0.005)
        os.kill(llm.engine_pid, signal.SIGKILL)
        return await asyncio.wait_for(asyncio.gather(*runs, return_exceptions=True), 60)

    errors = asyncio.run(main())
    assert {type(error) for error in errors} == {EngineDeadError}
    assert str(errors[0]) == "the engine process ended by signal 9"
    assert llm.errored
    assert not llm.health.ready and llm.health.reason == str(errors[0])
    llm.shutdown()
