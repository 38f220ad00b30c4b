"""Every Triton kernel natively on a CUDA device: right in bfloat16 and float32, and how fast.

    python tests/gpu/check_kernels.py [--no-sweep] [--seconds 110]

Prints a line a check (worst error against float64 formulas or torch references), then microseconds a launch
by CUDA-graph replay beside the floor (bytes over 4.59 TB/s, or operations over 790 TFLOP/s), with and without
programmatic dependent launch, then a sweep of decode configurations. Exit status 1 where a check failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "interpreter")]

import time_kernels  # noqa: E402
from kernel_cases import AttentionCase, attention_case, fill_writes, with_float8_pool  # noqa: E402

from slipstream.kernels import (  # noqa: E402
    commit,
    decode_attention,
    greedy,
    paged,
    qkv_write,
    rms_norm,
    scatter,
    silu_and_mul,
    step_inputs,
    varlen_attention,
)
from slipstream.kernels.attention_common import LayerAttention  # noqa: E402
from slipstream.kernels.decode_config import DecodeConfig, DecodeScratch, choose_decode  # noqa: E402
from slipstream.kernels.precompile import Workers, is_listing, list_launches  # noqa: E402
from slipstream.kernels.varlen_attention import VarlenConfig, choose_varlen, list_tiles  # noqa: E402
from slipstream.rows.doors import PackedWrites  # noqa: E402
from slipstream.runner.graphs import captured  # noqa: E402

CUDA = torch.device("cuda")
BF16, F32 = torch.bfloat16, torch.float32
QWEN = LayerAttention(16, 8, 128, 128**-0.5)
SHAPES = (
    LayerAttention(9, 3, 64, 0.125),
    LayerAttention(6, 2, 96, 0.1, window=21),
    QWEN,
    LayerAttention(32, 8, 128, 0.09, soft_cap=20.0),
    LayerAttention(8, 1, 256, 0.07, window=300, soft_cap=30.0),
)
DECODES = [(n - 1, 1) for n in (1, 2, 16, 17, 64, 65, 66, 700, 3000)]
MIXED = [(40, 1), (0, 1), (0, 150), (333, 70), (3, 2), (1200, 1)]

failures: list[str] = []


def check(name: str, run: Callable[[], float], limit: float) -> None:
    """run returns the worst error; it means nothing while launches are listed to be compiled."""
    if is_listing():
        with suppress(Exception):
            run()
        return
    try:
        error = run()
        torch.cuda.synchronize()
        good = error <= limit
        print(f"{'ok  ' if good else 'FAIL'} {name:58s} {error:9.2e}  (limit {limit:.0e})", flush=True)
    except Exception as problem:
        good = False
        print(f"FAIL {name}: {problem!r}\n{traceback.format_exc(limit=-3)}", flush=True)
    if not good:
        failures.append(name)


def error_of(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Worst relative error of a token, in the Euclidean norm; infinite where anything is not finite."""
    got, expected = got.double().flatten(1), expected.double().flatten(1)
    if not got.isfinite().all():
        return float("inf")
    return float(((got - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-6)).max())


def scratch_for(lanes: int, shape: LayerAttention, config: DecodeConfig) -> DecodeScratch:
    scratch = DecodeScratch(lanes, shape, lanes * config.splits, CUDA)
    scratch.acc.fill_(float("nan"))
    scratch.lse.fill_(float("nan"))
    return scratch


# ---------------------------------------------------------------- correctness


def decode_error(case: AttentionCase, config: DecodeConfig, repeats: int = 1) -> float:
    """Also checks stored keys and values, counters, and that repeats agree to the bit."""
    scratch = scratch_for(len(case.position_T), case.shape, config)
    outs = [
        decode_attention.decode_from_qkv(
            case.qkv_TXD, case.slot_T, case.prep, case.lanes, case.pool, case.shape, config, scratch
        )
        for _ in range(repeats)
    ]
    assert not scratch.counter.any(), "counters are not back at zero"
    assert all(torch.equal(out, outs[0]) for out in outs), "repeats differ"
    here = (case.lane_T, case.position_T)
    k_scale, v_scale = case.pool.k_scale, case.pool.v_scale
    return max(
        error_of(outs[0], case.expected()),
        error_of(case.stored(case.pool.keys).float() * k_scale, case.k_all[here]),
        error_of(case.stored(case.pool.values).float() * v_scale, case.v_all[here]),
    )


def mixed_error(
    shape: LayerAttention,
    dtype: torch.dtype,
    decode: DecodeConfig | None = None,
    prefill: VarlenConfig | None = None,
) -> float:
    """write_qkv, then one-token lanes, then the others: a whole mixed step. Configs: those chosen, unless
    given."""
    case = attention_case(shape, MIXED, dtype=dtype, device=CUDA, mixed=True, normed=shape.head_dim != 64)
    q = qkv_write.write_qkv(
        case.qkv_TXD, case.position_T, case.slot_T, shape.num_kv_heads, case.prep, case.pool
    )
    here = (case.lane_T, case.position_T)
    errors = [
        error_of(q, case.q_prepared),
        error_of(case.stored(case.pool.keys), case.k_all[here]),
        error_of(case.stored(case.pool.values), case.v_all[here]),
    ]
    for all_lanes in (False, True):
        out = torch.full_like(q, float("nan"))
        config = decode or choose_decode(len(MIXED), shape, dtype)
        if not all_lanes:
            decode_attention.decode_attention(
                q, case.lanes, case.pool, shape, config, scratch_for(len(MIXED), shape, config), out
            )
        varlen = prefill or choose_varlen(shape, dtype, all_lanes)
        tiles = list_tiles(case.lanes, len(q), varlen.queries(shape), 1 if all_lanes else 2)
        varlen_attention.varlen_attention(q, tiles, case.lanes, case.pool, shape, varlen, out)
        errors.append(error_of(out, case.expected()))
    return max(errors)


def norm_error(dtype: torch.dtype) -> float:
    worst = 0.0
    for tokens, width in ((1, 64), (7, 576), (33, 1024), (5, 4096), (3, 5000)):
        x, weight = torch.randn(tokens, width + 8, device=CUDA)[:, :width], torch.randn(width, device=CUDA)
        delta = torch.randn(tokens, width + 8, device=CUDA).to(dtype)[:, :width]
        total = x.double() + delta.double()
        normed = total / (total.square().mean(1, keepdim=True) + 1e-5).sqrt() * weight.double()
        copies = torch.empty(tokens, 3, width, dtype=dtype, device=CUDA)
        out = rms_norm.add_rms_norm(x, delta, weight, 1e-5, dtype, copies[:, 0])
        worst = max(worst, error_of(out, normed), error_of(x, total), error_of(copies[:, 0], total))
        out = rms_norm.rms_norm(x, weight, 1e-5, dtype, copy_TH=copies[:, 2])
        worst = max(worst, error_of(out, normed), error_of(copies[:, 2], total))
        token = torch.randint(0, tokens, (9, 2), device=CUDA).int()[:, 0]
        residual, out = rms_norm.embed_rms_norm(token, delta, weight, 1e-5, dtype)
        wanted, plain = rms_norm.embed_rms_norm_reference(token, delta, weight, 1e-5, torch.float32)
        worst = max(worst, error_of(residual, wanted), error_of(out, plain))
    return worst


def gate_error(dtype: torch.dtype) -> float:
    worst = 0.0
    for tokens, inner in ((1, 48), (5, 1500), (300, 3072)):
        x = (torch.randn(tokens, 2 * inner + 8, device=CUDA) * 4).to(dtype)[:, : 2 * inner]
        gate, up = x.double().chunk(2, 1)
        worst = max(worst, error_of(silu_and_mul.silu_and_mul(x), gate / (1 + (-gate).exp()) * up))
    return worst


def step_kernels_error() -> float:
    """The interpreter's own cases, on the device: 0 where every integer agrees."""
    import cases_step as cases

    for seed, (lanes, most, padding) in enumerate([(1, 1, 0), (39, 1, 0), (13, 7, 20), (33, 2, 3)]):
        rows = {name: view.to(CUDA) for name, view in cases.make_rows(seed).items()}
        row, count = (each.to(CUDA) for each in cases.lanes_of(seed, lanes, most))
        tokens = int(count.sum()) + padding
        expected = cases.inputs_of(step_inputs.build_step_inputs_reference, rows, row, count, tokens)
        cases.same(cases.inputs_of(step_inputs.build_step_inputs, rows, row, count, tokens), expected)
        lane = torch.arange(lanes, device=CUDA)[::2].contiguous()
        token = torch.randint(0, 9, lane.shape, device=CUDA, dtype=torch.int32)
        ok = torch.rand(lane.shape, device=CUDA) < 0.8
        names = ("tokens", "length", "num_computed", "max_len", "end_ids", "alive")
        mine, theirs = ({name: view.clone() for name, view in rows.items()} for _ in range(2))
        records = [commit.CommitRecord(*torch.full((3, lanes), 7, device=CUDA).int().unbind()) for _ in "ab"]
        suffixed = {f"{n}_{s}": mine[n] for n, s in zip(names, ("RM", "R", "R", "R", "RE", "R"), strict=True)}
        commit.commit_step(expected, lane, token, ok, **suffixed, record=records[0])
        commit.commit_step_reference(expected, lane, token, ok, *(theirs[n] for n in names), records[1])
        cases.same(*records)
        assert all(torch.equal(mine[n][:-1], theirs[n][:-1]) for n in names), "rows differ"
        pinned = torch.zeros(3, lanes, dtype=torch.int32, pin_memory=True)
        again = {k: rows[k[: k.rindex("_")]].clone() for k in suffixed}
        commit.commit_step(expected, lane, token, ok, **again, record=commit.CommitRecord(*pinned.unbind()))
        torch.cuda.synchronize()
        assert all(torch.equal(pinned[i].to(CUDA), getattr(records[1], f.name)) for i, f in
                   enumerate(fields(records[1]))), "the pinned record differs"
    writes = PackedWrites(scatter.Room(50_000, 1000, 200_000), pinned=True)
    draw = np.random.default_rng(3)
    arenas = torch.full((2, 300_000), -5, dtype=torch.int32, device=CUDA).unbind()
    writes.scatter(arenas[0])
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        replay = captured(lambda: writes.scatter(arenas[0]), CUDA)[0].replay
        # What the host has written anew, by the same graph.
        spans = (), (1, 40_000), (60,) * 700, (), (4748,) * 40
        for count, lengths in zip((1, 700, 0, 50_000, 33), spans, strict=True):
            fill_writes(writes, draw, len(arenas[0]), count, lengths)
            replay()
            scatter.scatter_writes_reference(arenas[1], writes._packed, writes.room)
            torch.cuda.synchronize()
            assert torch.equal(*arenas), "arenas differ"
    return 0.0


def clear_error() -> float:
    pages = torch.full((6, 40, 8, 128, 96), float("nan"), dtype=BF16, device=CUDA)
    blocks, others = torch.randperm(40, device=CUDA).split((13, 27))
    paged.clear_blocks(pages, blocks)
    assert not pages[:, blocks].any(), "blocks are not zero"
    assert pages[:, others].isnan().all(), "other blocks are touched"
    return 0.0


def greedy_error() -> float:
    for lanes, vocab, dtype in ((1, 151936, F32), (64, 128256, BF16), (9, 4097, F32), (256, 50257, F32)):
        logits = torch.randn(lanes, vocab + 3, device=CUDA).to(dtype)[:, :vocab]
        best, place = logits.double().max(1), torch.arange(vocab, device=CUDA)
        first = torch.where(logits.double() == best.values[:, None], place, vocab).amin(1)
        for row, value in enumerate((float("nan"), float("inf"), float("-inf"))[: lanes - 1]):
            logits[row, vocab - 1 - row] = value
            first[row] = 0
        token, ok = greedy.choose_greedy(logits)
        assert torch.equal(token.long(), first), "other tokens"
        assert torch.equal(ok, torch.arange(lanes, device=CUDA) >= min(3, lanes - 1)), "other verdicts"
    return 0.0


def check_all() -> None:
    for dtype, limit in ((BF16, 1e-2), (F32, 2e-5)):
        kind = str(dtype).removeprefix("torch.")
        check(f"RMSNorm, {kind}", lambda d=dtype: norm_error(d), limit)
        check(f"silu and mul, {kind}", lambda d=dtype: gate_error(d), limit)
        for shape in SHAPES:
            name = f"H {shape.num_heads} G {shape.num_kv_heads} D {shape.head_dim} w {shape.window} {kind}"
            chosen = choose_decode(len(DECODES), shape, dtype)
            case = attention_case(shape, DECODES, dtype=dtype, device=CUDA, normed=shape.head_dim != 64)
            check(f"decode, {name}", lambda c=case, k=chosen: decode_error(c, k), limit)
            check(f"mixed, {name}", lambda s=shape, d=dtype: mixed_error(s, d), limit)
    for lanes in (1, 8, 64, 256):
        config = choose_decode(lanes, QWEN, BF16)
        ragged = [(n % 1500, 1) for n in range(0, 137 * lanes, 137)]
        ragged[lanes // 2] = (12000, 1)
        case = attention_case(QWEN, ragged, dtype=BF16, device=CUDA)
        name = f"decode as for {lanes} lanes, ragged, 40 times"
        check(name, lambda c=case, k=config: decode_error(c, k, 40), 1e-2)
    case = with_float8_pool(attention_case(QWEN, DECODES, dtype=BF16, device=CUDA), 0.03, 0.02)
    config = choose_decode(len(DECODES), QWEN, BF16)
    # A new key may round to the other of two float8 neighbours, 2^-3 apart.
    check("decode, float8 pool", lambda: decode_error(case, config), 3e-2)
    check("greedy choice", greedy_error, 0.0)
    check("staged writes, step inputs, commit", step_kernels_error, 0.0)
    check("cleared blocks", clear_error, 0.0)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--no-sweep", action="store_true")
    parser.add_argument("--seconds", type=float, default=110.0)
    parser.add_argument("--compile-part", type=int, nargs=2)
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.compile_part:
        time_kernels.compile_part(*args.compile_part)
        return 0
    deadline = time.monotonic() + args.seconds
    torch.backends.cuda.matmul.allow_tf32 = False
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    workers = []
    if not args.no_sweep:
        count = max(1, min(10, (os.cpu_count() or 2) - 4))
        command = [sys.executable, __file__, "--compile-part"]
        workers = [subprocess.Popen([*command, str(part), str(count)]) for part in range(count)]
    Workers(torch.cuda.get_device_capability()).compile(list_launches(check_all))
    check_all()
    print(f"{len(failures)} checks failed{': ' if failures else ''}{'; '.join(failures)}", flush=True)
    time_kernels.time_all()
    if not args.no_sweep:
        time_kernels.sweep(deadline, workers)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
