"""The memory plan of a real engine against the driver, and a run that fills the pool.

    python tests/gpu/check_memory.py MODEL [--utilization 0.5 0.95]

MODEL: a folder with config.json; weights are random. For each utilisation: the plan, what the driver reports
used after start-up and after a run in which every row is taken and all blocks are full (with sampling,
penalties and logprobs), and the differences. Exit status 1 where one is over 1%.
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from slipstream import LLM, SamplingParams

ERROR = 0.01
ROWS = 256


def used() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def fill(llm: LLM) -> int:
    """Every row at its longest, as far as the pool holds them; returns the tokens computed."""
    limits = llm.info.limits
    blocks = min(limits.num_blocks // ROWS, limits.max_model_len // limits.block_size)
    length = blocks * limits.block_size - 4
    prompts = np.random.default_rng(0).integers(100, 1000, (ROWS, length)).tolist()
    kinds = (
        SamplingParams(max_tokens=3, ignore_eos=True, detokenize=False, logprobs=20),
        SamplingParams(max_tokens=3, ignore_eos=True, detokenize=False, repetition_penalty=1.1, top_p=0.9),
        SamplingParams(max_tokens=3, ignore_eos=True, detokenize=False, temperature=0.0),
    )
    params = [kinds[i % len(kinds)] for i in range(ROWS)]
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    assert all(len(o.outputs[0].token_ids) == 3 for o in outputs)
    return ROWS * length


def check(model: str, utilization: float) -> bool:
    llm = LLM(
        model=model, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=16384,
        max_num_seqs=ROWS, gpu_memory_utilization=utilization, enable_prefix_caching=False,
    )
    core = llm._client.core
    right = True
    for when in ("after start-up", "after a full run"):
        if when != "after start-up":
            print(f"    {fill(llm):,} prompt tokens")
        torch.cuda.synchronize()
        error = core.memory.error(used())
        right &= abs(error) <= ERROR
        figures = f"plan {core.memory.total / 2**20:,.0f} MiB, driver {used() / 2**20:,.0f} MiB"
        print(f"{utilization} {when}: {figures}, {100 * error:+.2f}%; {core.memory.describe()}", flush=True)
    llm.close()
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--utilization", type=float, nargs="+", default=[0.5, 0.95])
    args = parser.parse_args()
    results = []
    for utilization in args.utilization:
        results.append(check(args.model, utilization))
        gc.collect()
        torch.cuda.empty_cache()
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
