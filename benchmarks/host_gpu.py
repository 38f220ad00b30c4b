"""Host microseconds of one steady decode step on a CUDA device, piece by piece, and two ways to learn of a
step's end: an event, or a word in pinned memory that the host looks at.

    python benchmarks/host_gpu.py MODEL [--lanes 1 64 256]

MODEL: a folder with config.json; weights are random.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from profile_gpu import make_llm, start


def median_us(work: Callable[[], Any], repeats: int = 200) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return round(1e6 * statistics.median(times), 1)


def measure(llm: Any, lanes: int) -> dict[str, Any]:
    core, states = start(llm, lanes, 384, 100)
    runner, scheduler = core._runner, core.scheduler
    parts: dict[str, list[float]] = {name: [] for name in ("schedule", "step", "wait", "apply")}
    for _ in range(100):
        while len(core._flight) < 2:
            t0 = time.perf_counter()
            plan = scheduler.schedule()
            t1 = time.perf_counter()
            core._flight.append(runner.step(plan))
            parts["schedule"].append(t1 - t0)
            parts["step"].append(time.perf_counter() - t1)
        handle = core._flight.popleft()
        t0 = time.perf_counter()
        result = handle.wait()
        t1 = time.perf_counter()
        scheduler.apply(result)
        parts["wait"].append(t1 - t0)
        parts["apply"].append(time.perf_counter() - t1)
    found: dict[str, Any] = {k: round(1e6 * statistics.median(v), 1) for k, v in parts.items()}
    shape = runner._lanes.shape
    graph = runner._tick.graphs._graphs[shape][0]
    stream = runner.stream._stream

    def launch() -> None:
        with torch.cuda.stream(stream):
            graph.replay()

    while core._flight:
        scheduler.apply(core._flight.popleft().wait())
    torch.cuda.synchronize()
    busy = []
    for _ in range(40):
        launch()
        begin = time.perf_counter()
        launch()
        busy.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
    found["launch_busy"] = round(1e6 * statistics.median(busy), 1)
    with torch.cuda.stream(stream):
        idle = []
        for _ in range(40):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            graph.replay()
            idle.append(time.perf_counter() - begin)
        found["launch_idle"] = round(1e6 * statistics.median(idle), 1)
        torch.cuda.synchronize()
        # From the launch until the host knows: by an event, and by the pinned record itself.
        event = torch.cuda.Event()
        by_event, by_word = [], []
        ring = runner._tick._ring
        words = ring.memory_S3L.numpy()
        for _ in range(40):
            begin = time.perf_counter()
            graph.replay()
            event.record(stream)
            event.synchronize()
            by_event.append(time.perf_counter() - begin)
            torch.cuda.synchronize()
            words[:, 2, :lanes] = -7
            begin = time.perf_counter()
            graph.replay()
            while (words[:, 2, lanes - 1] == -7).all():
                pass
            by_word.append(time.perf_counter() - begin)
            torch.cuda.synchronize()
        found["until_event"] = round(1e6 * statistics.median(by_event), 1)
        found["until_word"] = round(1e6 * statistics.median(by_word), 1)
        found["record_event"] = median_us(lambda: torch.cuda.Event().record(stream))
        torch.cuda.synchronize()
    found["submit_nothing"] = median_us(lambda: runner.stream.submit(lambda: None))
    torch.cuda.synchronize()
    llm._client.abort(llm._outputs.close(states))
    return {"lanes": lanes, **found}


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
