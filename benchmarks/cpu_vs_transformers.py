"""Slipstream against transformers' generate, in one run on one machine: SmolLM2-135M-Instruct, bfloat16, CPU.

    python benchmarks/cpu_vs_transformers.py --model DIR [--json FILE]

Two loads, greedy, ends ignored: one request (128 in, 128 out), and 16 requests of mixed lengths (64 to 512
in, 16 to 256 out). transformers gets the 16 as one left-padded batch that runs to the longest output, which
is how its generate batches; its tokens count up to each request's own length. The engines alternate, each in
a process of its own (two of them in one would share torch's threads); each load is run once before it is
timed for `--repeats` processes. The ratio is of medians.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

ENGINES = ("slipstream", "transformers")
rng = random.Random(0)
LOADS = {
    "batch 1": ([128], [128]),
    "16 mixed": ([rng.randint(64, 512) for _ in range(16)], [rng.randint(16, 256) for _ in range(16)]),
}
PROMPTS = {
    name: [[rng.randrange(100, 49000) for _ in range(n)] for n in ins] for name, (ins, _) in LOADS.items()
}
WARM = 8  # output tokens of the run before


def run_slipstream(model: str) -> dict[str, float]:
    """Seconds a load."""
    import slipstream

    llm = slipstream.LLM(
        model=model,
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=16,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )

    def generate(prompts: list[list[int]], outs: list[int]) -> None:
        params = [
            slipstream.SamplingParams(max_tokens=n, ignore_eos=True, temperature=0.0, detokenize=False)
            for n in outs
        ]
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        assert [len(o.outputs[0].token_ids) for o in outputs] == outs

    return timed(generate)


def run_transformers(model: str) -> dict[str, float]:
    """Seconds a load."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def generate(prompts: list[list[int]], outs: list[int]) -> None:
        width, most = max(map(len, prompts)), max(outs)
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        theirs.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=most,
            min_new_tokens=most,
            do_sample=False,
            pad_token_id=0,
        )

    return timed(generate)


def timed(generate) -> dict[str, float]:
    seconds = {}
    for name, (_, outs) in LOADS.items():
        generate([p[:64] for p in PROMPTS[name]], [WARM] * len(outs))
        begin = time.perf_counter()
        generate(PROMPTS[name], outs)
        seconds[name] = time.perf_counter() - begin
    return seconds


def compare(model: str, repeats: int) -> dict[str, dict]:
    """Both engines in turn; prints and returns seconds, rates and ratio of every load."""
    found: dict[str, list[dict[str, float]]] = {engine: [] for engine in ENGINES}
    for _ in range(repeats):
        for engine in ENGINES:
            command = [sys.executable, __file__, "--model", model, "--engine", engine]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found[engine].append(json.loads(done.stdout.splitlines()[-1]))
    figures = {}
    for name, (_, outs) in LOADS.items():
        seconds = {engine: [run[name] for run in runs] for engine, runs in found.items()}
        rate = {engine: sum(outs) / statistics.median(s) for engine, s in seconds.items()}
        figures[name] = dict(seconds=seconds, tok_s=rate, ratio=rate["slipstream"] / rate["transformers"])
        print(
            f"{name:10}",
            *(f"{e} {r:7.1f} tok/s  " for e, r in rate.items()),
            f"{figures[name]['ratio']:.2f}x",
        )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engine", choices=ENGINES, help="run this one alone and print its seconds as JSON")
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    if args.engine:
        print(
            json.dumps(
                {"slipstream": run_slipstream, "transformers": run_transformers}[args.engine](args.model)
            )
        )
        return
    figures = compare(args.model, args.repeats)
    if args.json:
        facts = dict(
            command=" ".join(sys.argv),
            date=time.strftime("%Y-%m-%d"),
            machine=platform.machine(),
            threads=torch.get_num_threads(),
            torch=torch.__version__,
            cpu=torch.backends.cpu.get_cpu_capability(),
        )
        Path(args.json).write_text(json.dumps(dict(facts=facts, loads=figures), indent=1) + "\n")


if __name__ == "__main__":
    main()
