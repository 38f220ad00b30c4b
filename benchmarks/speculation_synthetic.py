"""Speculation on a model's shape alone: random weights, drafts taken by chance as often as is asked for;
either engine.

    python benchmarks/speculation_synthetic.py --model FOLDER [--drafter FOLDER] [--engine slipstream|vllm]
        [--method eagle3] [--drafts 3] [--acceptance 0.7] [--concurrency 1 16] [--plain] [--json FILE]

Folders need a config.json only; the drafter's is benchmarks/drafters/EAGLE3-Llama-3.1-8B by default.
--acceptance is the chance of each draft whose predecessors were taken, so K of them give 1 + p + .. + p^K
tokens a step (2.53 for 0.7 and 3). Both engines get the same speculative_config. --plain: no drafts at all.

Prompts are 128 random tokens, answers 256. At each concurrency, batches of so many requests are given at
once; one batch before them is not counted. Prints one JSON object a concurrency after the word RESULT: output
tokens a second; for Slipstream what a row gained in a step that verified drafts (accepted_length), too.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import time
from pathlib import Path
from typing import Any

DRAFTER = Path(__file__).parent / "drafters" / "EAGLE3-Llama-3.1-8B"
REQUESTS, BATCHES = 16, 4  # at each concurrency at least, one batch after the other


def parse() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--model", required=True)
    parser.add_argument("--drafter", default=str(DRAFTER))
    parser.add_argument("--engine", default="slipstream")
    parser.add_argument("--runner", default="", help="0 or 1 pins VLLM_USE_V2_MODEL_RUNNER")
    parser.add_argument("--method", default="eagle3")
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--acceptance", type=float, default=0.7)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--llm", default="{}", help="more LLM arguments as JSON")
    parser.add_argument("--json", type=Path, help="append the results, a line each")
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.runner:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = args.runner
    engine = importlib.import_module(args.engine)
    spec: dict[str, Any] = {
        "method": args.method, "model": args.drafter, "num_speculative_tokens": args.drafts,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [round(args.acceptance**n, 6) for n in range(1, args.drafts + 1)],
    }  # fmt: skip
    more = {} if args.plain else {"speculative_config": spec}
    settings = dict(
        load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=2048,
        max_num_seqs=max(args.concurrency), gpu_memory_utilization=0.8, enable_prefix_caching=False, seed=0,
    )  # fmt: skip
    llm = engine.LLM(model=args.model, **{**settings, **more, **json.loads(args.llm)})
    vocab = json.loads((Path(args.model) / "config.json").read_text())["vocab_size"]
    params = engine.SamplingParams(
        temperature=0.0, max_tokens=args.output_len, ignore_eos=True, detokenize=False
    )
    rng = random.Random(0)
    for count in args.concurrency:
        batches = [
            [{"prompt_token_ids": rng.choices(range(vocab), k=args.input_len)} for _ in range(count)]
            for _ in range(1 + max(REQUESTS // count, BATCHES))
        ]
        llm.generate(batches[0], params, use_tqdm=False)
        begin = time.perf_counter()
        outputs = [output for batch in batches[1:] for output in llm.generate(batch, params, use_tqdm=False)]
        facts = dict(version=engine.__version__, concurrency=count, **more)
        report(args, facts, time.perf_counter() - begin, outputs)


def report(args: argparse.Namespace, facts: dict[str, Any], seconds: float, outputs: list[Any]) -> None:
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert tokens == len(outputs) * args.output_len
    found = dict(
        engine=args.engine,
        runner=args.runner,
        model=Path(args.model).name,
        requests=len(outputs),
        seconds=round(seconds, 3),
        tok_s=round(tokens / seconds, 1),
        **facts,
    )
    drafts, accepted = (
        sum(getattr(output.metrics, name, 0) for output in outputs)
        for name in ("num_drafts", "accepted_tokens")
    )
    if drafts:
        found["accepted_length"] = round(1 + accepted / drafts, 3)
    print("RESULT " + json.dumps(found), flush=True)
    if args.json:
        with args.json.open("a") as file:
            file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
