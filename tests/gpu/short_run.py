"""A short run of everything that a step may do, for compute-sanitizer: the V2 runner on a tiny model.

    compute-sanitizer --tool memcheck --error-exitcode 9 python tests/gpu/short_run.py [--eager]
        [--families qwen3,llama] [--methods none,ngram,suffix]

Rows come and go, prompts come in pieces, rows preempt each other, every sampling feature is in use, plainly
and with n-gram and suffix drafts. --eager: without graphs; with PYTORCH_NO_CUDA_MEMORY_CACHING=1 every tensor
is then an allocation of its own, so that no access beyond one lands in its neighbour. Families and methods
can run side by side. Run it without the sanitizer first, with the same TRITON_CACHE_DIR: a family with a
method then takes half a minute under it, and many where kernels are compiled, too.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("", "tests", "tests/gpu")]
os.environ["SLIPSTREAM_TEST_DEVICE"] = "cuda"

from cases_no_waiting import KINDS  # noqa: E402
from drafting import Scripted  # noqa: E402
from harness import make_core, make_request, run  # noqa: E402
from tiny_models import make_tiny_model  # noqa: E402

from slipstream.contracts.sampling_params import SamplingParams  # noqa: E402
from slipstream.contracts.step import draft_limits  # noqa: E402

TOKENS = 8  # of an answer: under the sanitizer a step takes a second
DRAFTS = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "suffix": {"method": "suffix", "num_speculative_tokens": 4},
}


def params_of(kind: dict[str, Any]) -> SamplingParams:
    """Those of a short answer, half of which may be its min_tokens."""
    least = min(kind.get("min_tokens", 0), TOKENS // 2)
    return SamplingParams(ignore_eos=True, **{**kind, "max_tokens": TOKENS, "min_tokens": least})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--families", default="qwen3,llama")
    parser.add_argument("--methods", default=",".join(DRAFTS))
    args = parser.parse_args()
    rng, kinds = np.random.default_rng(1), [params_of(kind) for kind in KINDS.values()]
    with tempfile.TemporaryDirectory() as folder:
        for family in args.families.split(","):
            model = make_tiny_model(Path(folder) / family, family)
            for method in args.methods.split(","):
                drafts = DRAFTS[method]
                core = make_core(
                    model, dtype="bfloat16", max_num_seqs=6, max_num_batched_tokens=32, block_size=4,
                    num_gpu_blocks_override=22, max_model_len=64, enforce_eager=args.eager,
                    speculative_config=drafts,
                )  # fmt: skip
                if drafts is not None:
                    # Each number in its turn, whatever steps say of them: they may wait for their kernels.
                    limits = draft_limits(drafts["num_speculative_tokens"])
                    core.scheduler._drafting = Scripted(lambda step, of=limits: of[step % len(of)])
                requests = [
                    make_request(core, key, rng.integers(3, 250, 7 + 9 * (key % 5)).tolist(), kind, key)
                    for key, kind in enumerate(2 * kinds)
                ]
                found = run(core, requests, {request.key: request.key for request in requests})
                stats = core.scheduler.stats()
                core.close()
                assert all(not one.errors and one.tokens for one in found.values())
                assert stats.preemptions > 0 and (stats.draft_tokens > 0) == (drafts is not None)
                print(f"{family}, drafts of {method}: {stats.steps} steps", flush=True)


if __name__ == "__main__":
    main()
