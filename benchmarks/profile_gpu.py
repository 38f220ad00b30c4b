"""Where a steady decode step on a CUDA device goes: kernel time by class, idle time between steps, host time.

    python benchmarks/profile_gpu.py MODEL [--lanes 1 64 256] [--context 384] [--steps 60] [--json FILE]
    python benchmarks/profile_gpu.py MODEL --prompts 64 [--context 2048]       steps of prompts instead

MODEL: a folder with config.json; weights are random. Times of kernels come from the profiler's trace (CUPTI),
step times from a run without it. Idle: from the last kernel of a step to the first of the next.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slipstream import LLM, SamplingParams

# Kernel name -> class; the first pattern that is found counts.
CLASSES = (
    ("attention", r"decode|varlen|list_|order_kernel|attend"),
    ("q, k, v", r"_write_kernel"),
    ("norm", r"norm_kernel"),
    ("gate", r"silu"),
    ("inputs, commit", r"_inputs_kernel|_commit_kernel|_scatter"),
    ("sampling", r"_pieces_kernel|_merge_kernel|sample|scan|draw|greedy|logprob|penal|mask|edit|search"),
    ("products", r"gemm|gemv|cutlass|nvjet|splitK|cublas|slab|tile_kernel|vector_kernel|direct_kernel"),
)


def class_of(name: str) -> str:
    return next((label for label, pattern in CLASSES if re.search(pattern, name, re.IGNORECASE)), "other")


def random_prompts(llm: LLM, count: int, tokens: int) -> list[Any]:
    vocab = llm.info.limits.vocab_size
    ids = np.random.default_rng(0).integers(100, vocab - 300, (count, tokens)).tolist()
    return [{"prompt_token_ids": each} for each in ids]


def start(llm: LLM, lanes: int, context: int, steps: int) -> Any:
    """A core in whose every step `lanes` rows decode, at `context` tokens in the middle of the run."""
    prompts = random_prompts(llm, lanes, context - steps)
    params = SamplingParams(max_tokens=16 * steps, ignore_eos=True, detokenize=False, temperature=0.0)
    prepared = [llm._inputs.prepare(prompt, params, 0) for prompt in prompts]
    states = [llm._outputs.open(str(i), one) for i, one in enumerate(prepared)]
    llm._client.add([request for state in states for request in state.engine_requests()])
    core = llm._client.core
    while core.scheduler.num_waiting or core.scheduler._prefills:
        core.step()
    for _ in range(8):
        core.step()
    return core, states


def spread(values: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 2), "p99": round(float(np.percentile(values, 99)), 2)}


def measure(llm: LLM, lanes: int, context: int, steps: int) -> dict[str, Any]:
    core, states = start(llm, lanes, context, steps)
    begin = time.perf_counter()
    host = [core.step().stats.host_us for _ in range(steps)]
    wall = (time.perf_counter() - begin) / steps
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            core.step()
        torch.cuda.synchronize()
    llm._client.abort(llm._outputs.close(states))
    while core.has_work:
        core.step()
    facts = {"lanes": lanes, "context": context, "wall_ms": round(1e3 * wall, 4), "host_us": spread(host)}
    return facts | summary(profile)


def measure_prompts(llm: LLM, count: int, tokens: int) -> dict[str, Any]:
    """So many prompts, one token each, as the common benchmark's load "prefill"."""
    prompts = random_prompts(llm, count, tokens)
    params = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False, temperature=0.0)
    for _ in range(3):
        begin = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        wall = time.perf_counter() - begin
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        llm.generate(prompts, params, use_tqdm=False)
        torch.cuda.synchronize()
    return {"prompts": count, "tokens": tokens, "wall_ms": round(1e3 * wall, 2)} | summary(profile)


def summary(profile: torch.profiler.profile) -> dict[str, Any]:
    """Times of whole steps in the trace, from one commit kernel to the next."""
    kernels = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and event.time_range.elapsed_us() > 0
    )
    ends = [i for i, (_, _, name) in enumerate(kernels) if "_commit_kernel" in name]
    steps = len(ends) - 1
    idle = [kernels[i + 1][0] - kernels[i][1] for i in ends[:-1]]
    spans = [kernels[b][1] - kernels[a][1] for a, b in itertools.pairwise(ends)]
    per_class: dict[str, float] = {}
    names: dict[str, list[float]] = {}
    for begin, end, name in kernels[ends[0] + 1 : ends[-1] + 1]:
        per_class[class_of(name)] = per_class.get(class_of(name), 0.0) + (end - begin) / steps
        names.setdefault(name[:70], []).append(end - begin)
    longest = sorted(names.items(), key=lambda item: -sum(item[1]))[:24]
    return {
        "step_us_in_trace": round(statistics.median(spans), 1),
        "idle_us": spread(idle),
        "class_us": {k: round(v, 1) for k, v in sorted(per_class.items(), key=lambda item: -item[1])},
        "kernels": {name: [len(each) // steps, round(statistics.median(each), 2)] for name, each in longest},
    }


def make_llm(model: str, more: dict[str, Any]) -> LLM:
    """As the common benchmark makes it."""
    settings = dict(
        load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=16384,
        max_num_seqs=256, gpu_memory_utilization=0.8, enable_prefix_caching=False,
    )  # fmt: skip
    return LLM(model=model, **settings | more)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--prompts", type=int, default=0)
    parser.add_argument("--context", type=int, default=None, help="384, or 2048 with --prompts")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--llm", default="{}", help="more LLM arguments as JSON")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    begin = time.perf_counter()
    llm = make_llm(args.model, json.loads(args.llm))
    print(f"init {time.perf_counter() - begin:.1f} s", flush=True)
    runs = []
    for lanes in args.lanes if not args.prompts else ():
        runs.append(measure(llm, lanes, args.context or 384, args.steps))
        print(json.dumps(runs[-1]), flush=True)
    if args.prompts:
        runs.append(measure_prompts(llm, args.prompts, args.context or 2048))
        print(json.dumps(runs[-1]), flush=True)
    if args.json is not None:
        facts = {"benchmark": "profile", "model": args.model, "runs": runs}
        args.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
