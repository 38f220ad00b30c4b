"""Sampling of whole batches natively on a CUDA device: right, and how fast.

    python tests/gpu/check_sampling.py [--times]

Prints a line a check: tokens against the CPU's eager path (its float functions differ in the last bit, so one
token in a thousand may differ where two are nearly equal), a chi-square test of draws, repeats to the bit,
log-probabilities against float64. Then microseconds of a captured call, by CUDA-graph replay over several
sets of logits, beside the time of one read of them. With --times only a few tokens are checked before that.
Exit status 1 where a check failed.
"""

from __future__ import annotations

import dataclasses
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from sampling_rows import (  # noqa: E402
    WAYS_TO_TRUNCATE,
    chi_square_is_plausible,
    legal_probabilities,
    make_batch,
    make_pipeline,
    make_row,
    noise_costs,
    random_logits,
    rows_of_every_kind,
)
from time_kernels import graph_us  # noqa: E402

from slipstream.kernels.logprobs import token_logprobs, token_logprobs_reference  # noqa: E402

CUDA = torch.device("cuda")
BYTES_PER_US = 4.59e6
QWEN_VOCAB = 151936
TRUNCATIONS = [*WAYS_TO_TRUNCATE, {"temperature": 9.0, "top_k": 60000}, {}, {"temperature": 0.0}]
failures: list[str] = []


def check(name: str, run: Callable[[], str]) -> None:
    """run returns what to print; it raises where something is wrong."""
    begin = time.monotonic()
    try:
        said = run()
        torch.cuda.synchronize()
        print(f"ok   {name:56s} {said}  ({time.monotonic() - begin:.1f} s)", flush=True)
    except Exception as problem:
        failures.append(name)
        print(f"FAIL {name}: {problem!r}\n{traceback.format_exc(limit=-2)}", flush=True)


def tokens_agree(vocab: int, dtype: torch.dtype, scale: float, stage: str) -> str:
    """The same rows on the CPU's eager path and on the device; repeats must agree to the bit."""
    if stage == "full":
        rows = [row for seed in range(3) for row in rows_of_every_kind(1000 * seed)]
    else:
        rows = [make_row(seed=97 * i, **TRUNCATIONS[i % len(TRUNCATIONS)]) for i in range(45)]
    cpu, gpu = make_pipeline(vocab), make_pipeline(vocab, max_lanes=len(rows), device=CUDA)
    # Rows that begin at any address, or as the model's do.
    width = vocab + (16 if vocab == QWEN_VOCAB else 3)
    logits = (random_logits(len(rows), width, vocab) * scale).to(dtype)[:, :vocab]
    if dtype == torch.float32:
        logits = logits.mul(64).round().div(64)  # equal ones too
    logits[-1, vocab // 2] = torch.nan
    logits[-2, 0] = torch.inf
    want = cpu.sample(logits.float().clone(), make_batch(cpu, rows))
    batch, device_logits = make_batch(gpu, rows, CUDA), logits.to(CUDA)
    got = [gpu.sample_all(device_logits, batch, stage) for _ in range(5)]
    assert all(torch.equal(got[0].tokens_N, each.tokens_N) for each in got), "repeats differ"
    assert torch.equal(got[0].ok_N.cpu(), want.ok_N), "other verdicts"
    assert torch.equal(device_logits.cpu().nan_to_num(), logits.nan_to_num()), "logits changed"
    differ = (got[0].tokens_N.cpu() != want.tokens_N).nonzero().flatten().tolist()
    assert len(differ) <= 1, f"lanes {differ}: {[rows[i].params for i in differ[:3]]}"
    return f"{len(rows) - len(differ)} of {len(rows)} tokens equal"


def costs_are_exact() -> str:
    """The fast instructions of the noise, where they are most and least exact."""
    worst = 0.0
    for seed in range(40):
        got, want = noise_costs(seed, CUDA)
        worst = max(worst, np.abs(got / want - 1).max())
    assert worst < 5e-6, f"off by {worst}"
    return f"worst {worst:.1e}"


def alone_as_in_a_batch() -> str:
    """A row's token does not depend on the lanes around it, however many."""
    rows = [make_row(seed=31 * i, **TRUNCATIONS[i % len(TRUNCATIONS)]) for i in range(150)]
    pipeline = make_pipeline(QWEN_VOCAB, max_lanes=len(rows), device=CUDA)
    batch = make_batch(pipeline, rows, CUDA)
    logits = random_logits(len(rows), QWEN_VOCAB, 3).to(CUDA, torch.bfloat16)
    whole = pipeline.sample_all(logits, batch, "sampled").tokens_N
    assert torch.equal(pipeline.sample_all(logits, batch, "full").tokens_N, whole), "stages differ"
    for lane in range(0, len(rows), 7):
        one = slice(lane, lane + 1)
        single = dataclasses.replace(batch, row_N=batch.row_N[one], length_N=batch.length_N[one])
        assert pipeline.sample_all(logits[one], single, "sampled").tokens_N[0] == whole[lane], lane
    return "22 rows, alone and among 150"


def draws_are_fair(kind: dict[str, float], vocab: int, lanes: int = 256, steps: int = 400) -> str:
    """Counts of many draws against the float64 probabilities."""
    row = make_row([1, 2], [3, 4, 3], **kind)
    pipeline = make_pipeline(vocab, max_lanes=lanes, device=CUDA)
    batch = make_batch(pipeline, [dataclasses.replace(row, seed=seed) for seed in range(lanes)], CUDA)
    logits = random_logits(1, vocab, 11)[0] / 3
    stage = "full" if "presence_penalty" in kind else "sampled"
    seed_hi, counts = batch.columns["seed_hi"].clone(), torch.zeros(vocab, device=CUDA)
    many = logits.to(CUDA).repeat(lanes, 1)
    for step in range(steps):
        batch.columns["seed_hi"].copy_(seed_hi + step)
        sampled = pipeline.sample_all(many, batch, stage)
        counts += torch.bincount(sampled.tokens_N, minlength=vocab)
    found, want = counts.cpu().numpy(), legal_probabilities(row, logits.numpy())
    assert not found[want == 0].any(), "an illegal token was drawn"
    expected = want * lanes * steps
    often = expected >= 5
    rest = expected[~often].sum()
    joined = np.append(found[often], found[~often].sum()) if rest >= 5 else found[often]
    wanted = np.append(expected[often], rest) if rest >= 5 else expected[often]
    if len(joined) > 1:
        assert chi_square_is_plausible(joined, wanted * joined.sum() / wanted.sum()), "not the distribution"
    return f"{lanes * steps} draws over {int((want > 0).sum())} tokens"


def logprobs_agree(vocab: int, dtype: torch.dtype, num_top: int) -> str:
    logits = (random_logits(33, vocab + 3, 5) * 2).to(CUDA, dtype)[:, :vocab]
    logits[::3] = logits[::3].round()
    token = torch.randint(vocab, (33,), device=CUDA, dtype=torch.int32)
    ids, values, rank = token_logprobs(logits, token, num_top)
    wanted_ids, _, wanted_rank = token_logprobs_reference(logits.float(), token.long(), num_top)
    assert torch.equal(ids, wanted_ids), "other ids"
    assert torch.equal(rank, wanted_rank), "other ranks"
    error = (values - logits.double().log_softmax(1).gather(1, ids.long())).abs().max().item()
    assert error < 5e-6, f"off by {error}"
    return f"worst {error:.1e}"


# ---------------------------------------------------------------- time


LOADS: dict[str, tuple[str, dict[str, float]]] = {
    "greedy": ("greedy", {"temperature": 0.0}),
    "greedy rows in stage sampled": ("sampled", {"temperature": 0.0}),
    "temperature": ("sampled", {"temperature": 0.8}),
    "temperature, top_k 40, top_p 0.95": ("sampled", {"temperature": 0.8, "top_k": 40, "top_p": 0.95}),
    "top_p 0.95": ("sampled", {"temperature": 0.8, "top_p": 0.95}),
    "top_p 0.5": ("sampled", {"temperature": 0.8, "top_p": 0.5}),
    "min_p 0.05": ("sampled", {"temperature": 0.8, "min_p": 0.05}),
    "full: penalties, top_k 40": ("full", {"temperature": 0.8, "top_k": 40, "repetition_penalty": 1.1}),
}


def time_all() -> None:
    """Flat logits (normal, like random weights give) and peaked ones (a few dozen tokens hold the mass)."""
    pipeline = make_pipeline(QWEN_VOCAB, max_lanes=256, device=CUDA)
    title = "microseconds a call, V = 151,936, bfloat16"
    print(f"\n{title:44s} {'lanes':>5s} {'flat':>8s} {'peaked':>8s} read")
    for lanes in (1, 64, 256):
        flat = [torch.randn(lanes, QWEN_VOCAB, device=CUDA).bfloat16() for _ in range(3)]
        peaked = [(each.float() * 3 + 5 * (each.float() - 2.8).clamp(min=0)).bfloat16() for each in flat]
        floor = flat[0].nbytes / BYTES_PER_US
        for name, (stage, kind) in LOADS.items():
            rows = [make_row(range(1, 30), range(2, 15), seed=seed, **kind) for seed in range(lanes)]
            batch = make_batch(pipeline, rows, CUDA)
            times = [
                graph_us([lambda x=x, b=batch, s=stage: pipeline.sample_all(x, b, s) for x in some])
                for some in (flat, peaked)
            ]
            print(f"{name:44s} {lanes:5d} {times[0]:8.1f} {times[1]:8.1f} {floor:4.1f}", flush=True)
        for num_top in (0, 5, 20):
            token = torch.zeros(lanes, dtype=torch.int32, device=CUDA)
            spent = graph_us([lambda x=x, t=token, k=num_top: token_logprobs(x, t, k) for x in flat])
            name = f"logprobs, top {num_top}"
            print(f"{name:44s} {lanes:5d} {spent:8.1f} {'':8s} {floor:4.1f}", flush=True)


def check_quickly() -> None:
    check("noise", costs_are_exact)
    for stage in ("sampled", "full"):
        check(f"tokens, {stage}", lambda stage=stage: tokens_agree(QWEN_VOCAB, torch.bfloat16, 0.4, stage))


def check_all() -> None:
    check("noise", costs_are_exact)
    for dtype, scale in ((torch.float32, 0.4), (torch.float32, 1.0), (torch.bfloat16, 0.4)):
        for vocab in (997, 50257):
            kind = f"{str(dtype).removeprefix('torch.')}, V = {vocab}, scale {scale}"
            for stage in ("sampled", "full"):
                what = (vocab, dtype, scale, stage)
                check(f"tokens, {stage}, {kind}", lambda what=what: tokens_agree(*what))
    check("rows alone and in a batch", alone_as_in_a_batch)
    for kind in ({"temperature": 0.9}, {"temperature": 1.2, "top_k": 30, "top_p": 0.9}, {"top_p": 0.8},
                 {"min_p": 0.1, "presence_penalty": 1.0}, {"temperature": 3.0, "top_k": 300}):  # fmt: skip
        check(f"draws, {kind}", lambda k=kind: draws_are_fair(k, 501))
    check("draws, flat and wide", lambda: draws_are_fair({"temperature": 8.0, "top_p": 0.7}, 6007))
    for vocab, dtype, num_top in ((997, torch.float32, 20), (QWEN_VOCAB, torch.bfloat16, 20),
                                  (128256, torch.float32, 64), (50257, torch.bfloat16, 0)):  # fmt: skip
        check(f"logprobs, V = {vocab}, top {num_top}", lambda a=(vocab, dtype, num_top): logprobs_agree(*a))


def main() -> int:
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    check_quickly() if "--times" in sys.argv[1:] else check_all()
    print(f"{len(failures)} checks failed{': ' if failures else ''}{'; '.join(failures)}", flush=True)
    time_all()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
