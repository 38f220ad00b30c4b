"""What HTTP costs, and how that compares: the same requests through `LLM.generate`, `slipstream serve` and
vLLM's server, each with the machine to itself, the servers read by `slipstream bench serve`.

    python benchmarks/server_gpu.py FOLDER [--requests 256 512] [--streams 256] [--peer PYTHONPATH]
        [--parts generate,ours,vllm] [--limit 75] [--json benchmarks/results/server_gpu.json]

FOLDER has a config.json. Weights are random, and so is the vocabulary: byte-level, of the model's size, with
distinct pieces of two to five letters. Prompts are cut out of real text, other ones in every repeat; answers
are greedy and have all their tokens. Part "generate-mp" is generate with a worker process. A part that takes
longer than --limit seconds is ended, and the others go on. Ends with 1 where a ratio misses its goal.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import shlex
import signal
import socket
import statistics
import string
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
QWEN_PIECES = 151_643  # without special tokens
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
GOALS = {"ours/generate": 0.9, "ours/vllm": 1.5}
WARM_SEED = 1000
QUIET = ("--disable-uvicorn-access-log", "--uvicorn-log-level", "error")
SHOWN = ("ttft", "tpot", "itl", "e2e")


def make_folder(source: Path, folder: Path) -> None:
    """A model folder without weights: the config of source, and a vocabulary of that size."""
    import tokenizers

    config = (source / "config.json").read_text()
    (folder / "config.json").write_text(config)
    words, merges = vocabulary(min(QWEN_PIECES, json.loads(config)["vocab_size"] - len(SPECIAL)))
    numbered = {word: number for number, word in enumerate(words)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(numbered, merges))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    made.save(str(folder / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[-1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))


def vocabulary(size: int) -> tuple[list[str], list[tuple[str, str]]]:
    """Pieces and the merges that make them: bytes, then pairs, triples and fours of letters, the shorter ones
    with a space before them too."""
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet, letters, space = sorted(ByteLevel.alphabet()), string.ascii_lowercase, "\u0120"
    pairs = [a + b for a in letters for b in letters]
    merges = itertools.chain(
        ((pair[0], pair[1]) for pair in pairs),
        ((space, pair) for pair in pairs),
        ((before + pair, letter) for before in ("", space) for pair in pairs for letter in letters),
        ((left, right) for left in pairs for right in pairs),
    )
    taken = list(itertools.islice(merges, size - len(alphabet)))
    words = [*alphabet, *(left + right for left, right in taken)]
    if len(words) < size or size < len(alphabet):
        raise SystemExit(f"vocab_size: there are {len(alphabet)} to {len(words)} pieces, not {size}")
    return words, taken


def load_flags(options: argparse.Namespace, model: Path, count: int, seed: int) -> list[str]:
    """Of `slipstream bench serve`: which requests."""
    return [
        "--num-prompts", str(count), "--max-concurrency", str(options.streams), "--seed", str(seed),
        "--input-len", str(options.input_len), "--output-len", str(options.output_len),
        "--tokenizer", str(model), "--extra-body", '{"temperature": 0}', "--no-progress",
    ]  # fmt: skip


def rounds(options: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """(requests, seed), the first one to warm up."""
    yield options.streams, WARM_SEED
    for count in options.requests:
        for repeat in range(options.repeats):
            yield count, repeat


def generate(options: argparse.Namespace, model: Path) -> None:
    """A process of its own: prints tokens a second of each round, as JSON."""
    sys.path.insert(0, str(ROOT))
    import torch

    from slipstream import LLM, SamplingParams
    from slipstream.cli import bench_serve

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu"
    print("FACTS", json.dumps({"device": device, "torch": torch.__version__}), flush=True)
    llm = LLM(
        str(model), load_format="dummy", max_model_len=options.max_model_len, max_num_seqs=options.streams,
        gpu_memory_utilization=options.utilization,
        distributed_executor_backend="mp" if options.child == "generate-mp" else "uni",
    )  # fmt: skip
    parser = argparse.ArgumentParser()
    bench_serve.add_parser(parser.add_subparsers())
    for count, seed in rounds(options):
        asks = bench_serve.make_load(parser.parse_args(["serve", *load_flags(options, model, count, seed)]))
        params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=ask.max_tokens) for ask in asks]
        begin = time.perf_counter()
        outputs = llm.generate([ask.prompt for ask in asks], params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        assert tokens == count * options.output_len
        found = {"requests": count, "seed": seed, "seconds": seconds, "tokens_per_second": tokens / seconds}
        print("ROUND", json.dumps(found), flush=True)
    llm.close()


class Part:
    """One engine's turn: processes that are all gone, at the latest, once its time is over."""

    def __init__(self, name: str, limit: float, log: Path) -> None:
        self.name, self.log = name, log
        self._end = time.monotonic() + limit
        self.command = ""

    @property
    def left(self) -> float:
        """Seconds. Raises TimeoutError."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    @contextmanager
    def process(self, command: list[str], **environment: str) -> Iterator[subprocess.Popen[bytes]]:
        self.command = shlex.join(command)
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, **environment},
            )  # fmt: skip
        try:
            yield process
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(15.0)
            with suppress(ProcessLookupError):  # the group may outlive who led it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run_generate(part: Part, options: argparse.Namespace, model: Path) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--child", part.name]
    with part.process([*command, "--made", str(model)]) as process:
        if process.wait(part.left):
            raise RuntimeError(f"ended with {process.returncode}")
    lines = part.log.read_text().splitlines()
    found = [json.loads(line.removeprefix("ROUND")) for line in lines if line.startswith("ROUND")]
    facts = next(json.loads(line.removeprefix("FACTS")) for line in lines if line.startswith("FACTS"))
    return {**facts, "rounds": found}


def run_server(part: Part, options: argparse.Namespace, model: Path) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    flags = ["--load-format", "dummy", "--max-model-len", str(options.max_model_len), "--port", port, *QUIET]
    flags += ["--max-num-seqs", str(options.streams), "--gpu-memory-utilization", str(options.utilization)]
    if part.name == "vllm":
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *flags]
        environment = {
            "PYTHONPATH": options.peer, "VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_NO_USAGE_STATS": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
    else:
        command = [sys.executable, "-m", "slipstream.cli", "serve", str(model), *flags]
        environment = {"PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    url = f"http://127.0.0.1:{port}"
    begin = time.monotonic()
    with part.process(command, **environment) as process:
        while not healthy(url):
            if process.poll() is not None:
                raise RuntimeError(f"ended with {process.returncode}")
            time.sleep(min(0.25, part.left))
        start = time.monotonic() - begin
        found = [bench(part, options, model, url, *one) for one in rounds(options)]
    return {"start_seconds": round(start, 1), "rounds": found}


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def bench(
    part: Part, options: argparse.Namespace, model: Path, url: str, count: int, seed: int
) -> dict[str, Any]:
    """One round of `slipstream bench serve`."""
    report = part.log.with_suffix(".json")
    command = [sys.executable, "-m", "slipstream.cli", "bench", "serve", "--base-url", url]
    command += [*load_flags(options, model, count, seed), "--num-warmups", "0", "--json", str(report)]
    path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, timeout=part.left, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"bench serve ended with {done.returncode}: {done.stderr[-600:]}")
    told = json.loads(report.read_text())
    if told["failed"] or told["output_tokens"] != count * options.output_len:
        raise RuntimeError(f"{told['failed']} failed, {told['output_tokens']} tokens: {told['errors']}")
    return {
        "requests": count, "seed": seed, "seconds": told["seconds"],
        "tokens_per_second": told["output_tokens_per_second"],
        "median_ms": {name: round(told["milliseconds"][name]["median"], 3) for name in SHOWN},
    }  # fmt: skip


def rates(found: dict[str, Any], count: int) -> list[float]:
    return [
        one["tokens_per_second"] for one in found.get("rounds", ())
        if one["requests"] == count and one["seed"] != WARM_SEED
    ]  # fmt: skip


def compare(parts: dict[str, Any], counts: list[int]) -> dict[str, Any]:
    """By number of requests: medians of tokens a second, and ratios."""
    table: dict[str, Any] = {}
    for count in counts:
        measured = {name: rates(part, count) for name, part in parts.items()}
        row = {name: round(statistics.median(each), 1) for name, each in measured.items() if each}
        for ratio in GOALS:
            above, below = ratio.split("/")
            if above in row and below in row:
                row[ratio] = round(row[above] / row[below], 3)
        table[str(count)] = row
    return table


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--requests", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--streams", type=int, default=256, help="at once, and rows of every engine")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--utilization", type=float, default=0.8, help="of the device's memory, every engine")
    parser.add_argument("--peer", default="", help="PYTHONPATH of vLLM; without it that part is left out")
    parser.add_argument("--parts", default="generate,ours,vllm")
    parser.add_argument("--limit", type=float, default=75.0, help="seconds of a part")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--made", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = parse()
    if options.child:
        generate(options, options.made)
        return 0
    parts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / options.folder.resolve().name
        model.mkdir()
        make_folder(options.folder, model)
        for name in options.parts.split(","):
            if name == "vllm" and not options.peer:
                continue
            part = Part(name, options.limit, Path(scratch) / f"{name}.log")
            begin = time.monotonic()
            try:
                run = run_generate if name.startswith("generate") else run_server
                parts[name] = run(part, options, model)
            except (TimeoutError, subprocess.TimeoutExpired):
                parts[name] = {"error": f"not done after {options.limit:g} s"}
            except RuntimeError as error:
                parts[name] = {"error": str(error)}
            parts[name] |= {"command": part.command, "took_seconds": round(time.monotonic() - begin, 1)}
            print(name, json.dumps(parts[name]), flush=True)
            if "error" in parts[name]:
                print(part.log.read_text(errors="replace")[-3000:], file=sys.stderr)
    table = compare(parts, options.requests)
    print(json.dumps(table, indent=1))
    report = {
        "command": shlex.join(["python", *sys.argv]), "date": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "cores": os.cpu_count(), "tokens_per_second": table, "goals": GOALS, "parts": parts,
    }  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    missed = [ratio for row in table.values() for ratio, goal in GOALS.items() if row.get(ratio, goal) < goal]
    return 1 if missed or any("error" in part for part in parts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
