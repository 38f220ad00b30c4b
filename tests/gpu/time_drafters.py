"""Drafters with weights beside plain decoding, on one engine each.

    python tests/gpu/time_drafters.py MODEL DRAFTERS [--methods eagle3 medusa] [--drafts 3] [--rows 1 64]

DRAFTERS: a folder that examples/train_drafter.py wrote. Prompts are those that its training held out;
answers are greedy. A line for each method and count of rows: tokens a second, the ratio to plain decoding,
tokens that a row gained a step, the share of drafts taken at each place, and answers that are those of plain
decoding (in bfloat16 near ties may fall either way). An engine takes half a minute to start: name a few
methods a call.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from training_prompts import make_prompts

from slipstream import LLM, SamplingParams

METHODS = ("eagle3", "eagle", "medusa", "mlp_speculator", "draft_model")


def measure(llm: LLM, rows: int, tokens: int) -> tuple[float, list[list[int]], str]:
    """Tokens a second, the answers, and what became of drafts."""
    turns = [[{"role": "user", "content": prompt}] for prompt in make_prompts(rows, held_out=True, seed=1)]
    params = SamplingParams(max_tokens=tokens, temperature=0.0)
    llm.chat(turns, params, use_tqdm=False)
    scheduler = llm._client.core.scheduler
    before, start = scheduler.stats(), time.monotonic()
    outputs = llm.chat(turns, params, use_tqdm=False)
    seconds, after = time.monotonic() - start, scheduler.stats()
    answers = [list(out.outputs[0].token_ids) for out in outputs]
    drafts = after.drafts - before.drafts
    taken = [b - a for a, b in zip(before.accepted_per_position, after.accepted_per_position, strict=False)]
    shares = " ".join(f"{count / max(drafts, 1):.2f}" for count in taken)
    gained = 1 + (after.accepted_tokens - before.accepted_tokens) / max(drafts, 1)
    return sum(map(len, answers)) / seconds, answers, f"{gained:5.2f} a drafted step, taken {shares or '-'}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("drafters", type=Path)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--tokens", type=int, default=256)
    args = parser.parse_args()
    plain: dict[int, tuple[float, list[list[int]]]] = {}
    for method in ("plain", *(each for each in args.methods if (args.drafters / each).exists())):
        config = {
            "method": method, "model": str(args.drafters / method), "num_speculative_tokens": args.drafts,
        }
        llm = LLM(
            args.model, max_model_len=2048, max_num_seqs=max(args.rows), gpu_memory_utilization=0.5,
            enable_prefix_caching=False, speculative_config=None if method == "plain" else config,
        )
        for rows in args.rows:
            speed, answers, drafted = measure(llm, rows, args.tokens)
            base, expected = plain.setdefault(rows, (speed, answers))
            same = sum(a == b for a, b in zip(answers, expected, strict=True))
            print(
                f"{method:15} rows {rows:3}: {speed:9.0f} tokens/s, {speed / base:5.2f}x, {drafted}, "
                f"{same}/{rows} answers the same", flush=True,
            )
        llm.close()
        del llm
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
