"""Host microseconds of one steady decode step on a CUDA device, piece by piece, and two ways to learn of a
step's end: an event, or a word in pinned memory that the host looks at.

    python benchmarks/host_gpu.py MODEL [--lanes 1 64 256]

MODEL: a folder with config.json; weights are random.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch
from profile_gpu import make_llm, start

UNWRITTEN = -7


def median_us(work: Callable[[], Any], repeats: int = 200) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return round(1e6 * statistics.median(times), 1)


def measure(llm: Any, lanes: int) -> dict[str, Any]:
    core, states = start(llm, lanes, 384, 200)
    print_profile(core)
    found = parts_of_a_step(core) | launches(core, lanes)
    llm._client.abort(llm._outputs.close(states))
    return {"lanes": lanes, **found}


def parts_of_a_step(core: Any) -> dict[str, float]:
    """What EngineCore.step does, timed in its parts; nothing is in flight afterwards. Steps that grant blocks
    have parts of their own."""
    parts: defaultdict[str, list[float]] = defaultdict(list)
    flight = deque(handle for handle, _ in core._flight)
    core._flight.clear()
    for _ in range(400):
        while len(flight) < 2:
            t0 = time.perf_counter()
            plan = core.scheduler.schedule()
            t1 = time.perf_counter()
            flight.append(core._executor.runner.step(plan))
            t2, kind = time.perf_counter(), "_granting" if len(plan.grant_row) else ""
            parts["schedule" + kind].append(t1 - t0)
            parts["step" + kind].append(t2 - t1)
        handle = flight.popleft()
        t0 = time.perf_counter()
        result = handle.wait()
        t1 = time.perf_counter()
        core.scheduler.apply(result)
        parts["wait"].append(t1 - t0)
        parts["apply"].append(time.perf_counter() - t1)
    while flight:
        core.scheduler.apply(flight.popleft().wait())
    torch.cuda.synchronize()
    return {name: round(1e6 * statistics.median(times), 1) for name, times in parts.items()}


def launches(core: Any, lanes: int) -> dict[str, float]:
    """A graph's launch while the device is idle or busy, and from the launch until the host knows of the end:
    by an event, and by the pinned record itself."""
    runner = core._executor.runner
    graph = runner._tick.graphs[runner._lanes.shape][0]
    stream, words = runner.stream._stream, runner._tick._ring.memory_S3L.numpy()
    names = ("launch_idle", "launch_busy", "until_event", "until_word")
    times: dict[str, list[float]] = {name: [] for name in names}

    def timed(name: str, work: Callable[[], Any]) -> None:
        begin = time.perf_counter()
        work()
        times[name].append(time.perf_counter() - begin)

    def until_event() -> None:
        event = torch.cuda.Event()
        graph.replay()
        event.record(stream)
        event.synchronize()

    def until_word() -> None:
        graph.replay()
        while (words[:, 2, lanes - 1] == UNWRITTEN).all():
            pass

    with torch.cuda.stream(stream):
        for _ in range(40):
            timed("launch_idle", graph.replay)
            timed("launch_busy", graph.replay)
            torch.cuda.synchronize()
            timed("until_event", until_event)
            torch.cuda.synchronize()
            words[:, 2] = UNWRITTEN
            timed("until_word", until_word)
            torch.cuda.synchronize()
        found = {name: round(1e6 * statistics.median(each), 1) for name, each in times.items()}
        found["record_event"] = median_us(lambda: torch.cuda.Event().record(stream))
    found["submit_nothing"] = median_us(lambda: runner.stream.submit(lambda: None))
    torch.cuda.synchronize()
    return found


def print_profile(core: Any) -> None:
    """Where Python spends a step's time."""
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(300):
        core.step()
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 64, 256])
    args = parser.parse_args()
    for lanes in args.lanes:
        llm = make_llm(args.model, {})
        print(json.dumps(measure(llm, lanes)), flush=True)
        del llm
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
