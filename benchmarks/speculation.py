"""Speculation on real prompts that quote their input (edit this code, summarise, extract), greedy; either
engine.

    python benchmarks/speculation.py --model FOLDER [--engine slipstream|vllm] [--spec JSON] [--json FILE]
        [--concurrency 1 8 64 256] [--output-len 256] [--outputs FILE]

Prompts are passages of Python's library and manual with a task, held out from examples/train_drafter.py, in
the model's chat template. At each concurrency, batches of so many requests are given at once; one batch
before them is not counted. Every prompt is given once: what remembers past outputs must not have seen an
answer before. 1, 8, 64 and 256 have the same prompts each, whichever of them are asked for.

Prints one JSON object a concurrency after the word RESULT: output tokens a second, and for Slipstream the
draft tokens that were verified and taken and what a row gained in a step that verified drafts
(accepted_length, the sampled token counted). text: a hash of all outputs. --outputs is what
benchmarks/lookup_acceptance.py reads.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from training_prompts import CODE_TASKS, PROSE_TASKS, make_prompts

MOST_PROMPT = 1024  # tokens
# Batches at each concurrency: a single request's speed depends on its prompt.
BATCHES = {1: 12, 8: 4, 64: 2, 256: 1}


def quoting_prompts(count: int) -> list[str]:
    """Of the held-out prompts, those that quote a passage. All differ, though passages come with several
    tasks."""
    openings = {task.partition("{")[0] for task in (*CODE_TASKS, *PROSE_TASKS)}
    found = [text for text in make_prompts(6000, held_out=True) if any(text.startswith(o) for o in openings)]
    if len(found) < count:
        raise ValueError(f"{count} different prompts are wanted, there are {len(found)}")
    return found[:count]


def token_ids(model: str, texts: list[str]) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    chats = [[{"role": "user", "content": text}] for text in texts]
    rendered = [tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in chats]
    return [tokenizer(text, add_special_tokens=False)["input_ids"][-MOST_PROMPT:] for text in rendered]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument("--engine", default="slipstream")
    parser.add_argument("--spec", default="", help="speculative_config as JSON")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--llm", default="{}", help="more LLM arguments as JSON")
    parser.add_argument("--json", type=Path, help="append the results, a line each")
    parser.add_argument("--outputs", type=Path, help="append prompts and answers, a JSON line each")
    args = parser.parse_args()
    engine = importlib.import_module(args.engine)
    extra: dict[str, Any] = json.loads(args.llm)
    if args.spec:
        extra["speculative_config"] = json.loads(args.spec)
    most = max(args.concurrency)
    llm = engine.LLM(
        model=args.model, dtype="bfloat16", max_model_len=2048, max_num_seqs=most, gpu_memory_utilization=0.5,
        enable_prefix_caching=False, seed=0, **extra,
    )  # fmt: skip
    params = engine.SamplingParams(temperature=0.0, max_tokens=args.output_len, detokenize=False)
    sizes = {count: count * BATCHES.get(count, 1) for count in sorted({*BATCHES, *args.concurrency})}
    texts = iter(quoting_prompts(sum(sizes.values()) + sum(sizes)))
    prompts_of = {
        count: [list(itertools.islice(texts, n)) for n in (count, size)] for count, size in sizes.items()
    }
    for count in args.concurrency:
        warm, prompts = (
            [{"prompt_token_ids": ids} for ids in token_ids(args.model, part)] for part in prompts_of[count]
        )
        llm.generate(warm, params, use_tqdm=False)
        outputs: list[Any] = []
        begin = time.perf_counter()
        for first in range(0, len(prompts), count):
            outputs += llm.generate(prompts[first : first + count], params, use_tqdm=False)
        report(args, count, time.perf_counter() - begin, outputs)


def report(args: argparse.Namespace, count: int, seconds: float, outputs: list[Any]) -> None:
    texts = [output.outputs[0].token_ids for output in outputs]
    tokens = sum(map(len, texts))
    found = dict(
        engine=args.engine,
        model=os.path.basename(args.model.rstrip("/")),
        spec=args.spec,
        concurrency=count,
        tok_s=round(tokens / seconds, 1),
        seconds=round(seconds, 3),
        requests=len(texts),
        out_tokens=tokens,
        text=hashlib.sha256(repr([list(text) for text in texts]).encode()).hexdigest()[:12],
    )
    drafts, drafted, accepted = (
        sum(getattr(output.metrics, name, 0) for output in outputs)
        for name in ("num_drafts", "draft_tokens", "accepted_tokens")
    )
    if drafts:
        found |= dict(drafted=drafted, accepted=accepted, accepted_length=round(1 + accepted / drafts, 2))
    print("RESULT " + json.dumps(found), flush=True)
    if args.json:
        with args.json.open("a") as file:
            file.write(json.dumps(found) + "\n")
    if args.outputs:
        with args.outputs.open("a") as file:
            for output, text in zip(outputs, texts, strict=True):
                ids = dict(prompt_token_ids=list(output.prompt_token_ids), token_ids=list(text))
                file.write(json.dumps(ids) + "\n")


if __name__ == "__main__":
    main()
