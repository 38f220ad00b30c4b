"""Slipstream against transformers' generate, in one run on one machine: SmolLM2-135M-Instruct, bfloat16, CPU.

    python benchmarks/cpu_vs_transformers.py --model DIR [--json FILE]

Two loads, greedy, ends ignored: one request (128 in, 128 out), and 16 requests of mixed lengths (64 to 512
in, 16 to 256 out). transformers gets the 16 as one left-padded batch that runs to the longest output, which
is how its generate batches; its tokens count up to each request's own length. Runs alternate; the ratio is of
medians.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import slipstream

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", required=True, help="a Hugging Face folder")
parser.add_argument("--repeats", type=int, default=3)
parser.add_argument("--json", help="write the figures to this file")
args = parser.parse_args()

rng = random.Random(0)
LOADS = {
    "batch 1": ([128], [128]),
    "16 mixed": ([rng.randint(64, 512) for _ in range(16)], [rng.randint(16, 256) for _ in range(16)]),
}
PROMPTS = {
    name: [[rng.randrange(100, 49000) for _ in range(n)] for n in ins] for name, (ins, _) in LOADS.items()
}

llm = slipstream.LLM(
    model=args.model,
    dtype="bfloat16",
    max_model_len=1024,
    max_num_seqs=16,
    enable_prefix_caching=False,
    skip_tokenizer_init=True,
)
theirs = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval()


def run_slipstream(prompts: list[list[int]], outs: list[int]) -> float:
    params = [
        slipstream.SamplingParams(max_tokens=n, ignore_eos=True, temperature=0.0, detokenize=False)
        for n in outs
    ]
    begin = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    assert [len(o.outputs[0].token_ids) for o in outputs] == outs
    return seconds


@torch.inference_mode()
def run_transformers(prompts: list[list[int]], outs: list[int]) -> float:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    begin = time.perf_counter()
    theirs.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=max(outs),
        min_new_tokens=max(outs),
        do_sample=False,
        pad_token_id=0,
    )
    return time.perf_counter() - begin


figures = {}
for name, (_, outs) in LOADS.items():
    seconds: dict[str, list[float]] = {"slipstream": [], "transformers": []}
    for _ in range(args.repeats):
        seconds["slipstream"].append(run_slipstream(PROMPTS[name], outs))
        seconds["transformers"].append(run_transformers(PROMPTS[name], outs))
    rate = {engine: sum(outs) / statistics.median(s) for engine, s in seconds.items()}
    ratio = rate["slipstream"] / rate["transformers"]
    figures[name] = dict(seconds=seconds, tok_s=rate, ratio=ratio)
    print(
        f"{name:10} slipstream {rate['slipstream']:7.1f} tok/s   "
        f"transformers {rate['transformers']:7.1f} tok/s   {ratio:.2f}x",
        flush=True,
    )
if args.json:
    facts = dict(
        date=time.strftime("%Y-%m-%d"),
        machine=platform.processor() or platform.machine(),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        cpu=torch.backends.cpu.get_cpu_capability(),
    )
    Path(args.json).write_text(json.dumps(dict(facts=facts, loads=figures), indent=1) + "\n")
