"""Steps that verify drafts natively on a CUDA device: kernels right, an engine's texts right, and how fast.

    python tests/gpu/check_drafts.py [kernels] [times] [engine] [--seconds 95]

No part named: all, which a first run's compiling may take beyond 100 s; each alone stays below. Prints a line
a check (kernels against torch references and float64 formulas; a whole engine in float32 with graphs and a
drafter that is mostly right against plain decoding, greedy and seeded), and microseconds by CUDA-graph
replay: attention of lanes with drafts beside the floor (bytes over 4.59 TB/s), Triton's varlen kernel and
decode attention of one token, for several cuts of the work; inputs, commit and put of a step. Exit status 1
where a check failed. What does not fit into the time is left out, and said.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("", "tests", "tests/interpreter", "tests/gpu")]
os.environ["SLIPSTREAM_TEST_DEVICE"] = "cuda"

import cases_drafts  # noqa: E402
import time_kernels  # noqa: E402
from kernel_cases import attention_case  # noqa: E402

from slipstream.kernels import (  # noqa: E402
    commit_drafts,
    decode_attention,
    draft_inputs,
    put_drafts,
    varlen_attention,
    verify_attention,
)
from slipstream.kernels.attention_common import LayerAttention  # noqa: E402
from slipstream.kernels.decode_config import DecodeScratch, choose_decode  # noqa: E402
from slipstream.kernels.paged import PagedLanes, PagedPool  # noqa: E402

CUDA, BF16, F32 = torch.device("cuda"), torch.bfloat16, torch.float32
LLAMA = LayerAttention(32, 8, 128, 128**-0.5)
SMOL = LayerAttention(9, 3, 64, 0.125)
CHECKED = (LLAMA, SMOL, LayerAttention(6, 2, 96, 0.1, window=21),
           LayerAttention(8, 1, 128, 0.09, soft_cap=20.0))
LANES = [(40, 1), (0, 1), (333, 5), (0, 3), (1500, 17), (20, 19), (640, 2), (30, 0), (3000, 9)]
BANDWIDTH = 4.59e12
BLOCK = 16

failures: list[str] = []
deadline = 0.0


def check(name: str, work: Callable[[], object]) -> None:
    begin = time.perf_counter()
    try:
        found = work()
        torch.cuda.synchronize()
        print(f"ok   {name} {found or ''} ({time.perf_counter() - begin:.1f} s)", flush=True)
    except Exception:
        failures.append(name)
        print(f"FAIL {name}\n{traceback.format_exc(limit=-3)}", flush=True)


def same(got: object, expected: object) -> None:
    for field in fields(expected):  # type: ignore[arg-type]
        left, right = getattr(got, field.name), getattr(expected, field.name)
        assert torch.equal(left.cpu(), right.cpu()), field.name


def on_cuda(rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same columns, scalars again views of one record."""
    record = torch.stack([rows[name] for name in cases_drafts.SCALARS], 1).cuda()
    moved = {name: record[:, place] for place, name in enumerate(cases_drafts.SCALARS)}
    return moved | {name: rows[name].cuda() for name in ("tokens", "blocks", "end_ids")}


def check_step_kernels() -> None:
    for seed in range(4):
        rows = cases_drafts.make_rows(seed)
        moved = on_cuda(rows)
        row, count, limits, tokens, samples, _, block = cases_drafts.step_of(rows, seed)
        columns = cases_drafts.columns_of(draft_inputs.DraftColumns, moved)
        made = draft_inputs.build_draft_inputs(
            row.cuda(), count.cuda(), limits.cuda(), tokens, samples, columns, block
        )
        expected = draft_inputs.build_draft_inputs_reference(*cases_drafts.step_of(rows, seed))
        same(made, expected)
        for rates in (None, (0.9, 0.5, 0.5, 0.0, 1.0)):
            check_commit(seed, rates)


def check_commit(seed: int, rates: tuple[float, ...] | None) -> None:
    accept = None if rates is None else commit_drafts.chances(torch.tensor(rates, dtype=torch.float64))
    rows, results = cases_drafts.make_rows(seed), []
    made = draft_inputs.build_draft_inputs_reference(*cases_drafts.step_of(rows, seed))
    generator = torch.Generator().manual_seed(seed)
    token = torch.randint(0, 2, made.sample_row_N.shape, generator=generator, dtype=torch.int32)
    ok = torch.rand(made.sample_row_N.shape, generator=generator) < 0.9
    drafts = torch.randint(0, 99, (35, 6), generator=generator, dtype=torch.int32)
    for device in ("cuda", "cpu"):
        mine = on_cuda(cases_drafts.make_rows(seed)) if device == "cuda" else cases_drafts.make_rows(seed)
        inputs = replace(made, **{f.name: getattr(made, f.name).to(device) for f in fields(made)})
        record = torch.zeros(9, 35, dtype=torch.int32, device=device)
        zeros = torch.zeros(35, dtype=torch.int32, device=device)
        out = commit_drafts.Appended(zeros, zeros.long())
        columns = cases_drafts.columns_of(commit_drafts.CommitColumns, mine)
        chances = None if accept is None else accept.to(device)
        commit_drafts.commit_drafts(inputs, token.to(device), ok.to(device), columns, record, out, chances)
        put_drafts.put_drafts(
            inputs.row_L, drafts.to(device), inputs.num_draft_L, out.appended_L, tokens_RM=mine["tokens"],
            alive_R=mine["alive"], length_R=mine["length"], max_len_R=mine["max_len"],
            draft_count_R=mine["draft_count"],
        )
        valid = torch.arange(6, device=device)[:, None] < record[0]
        results.append((record[:3].cpu(), (record[3:] * valid).cpu(), out, mine))
    (got, got_tokens, got_out, got_rows), (record, tokens, out, rows) = results
    assert torch.equal(got, record) and torch.equal(got_tokens, tokens)
    same(got_out, out)
    assert all(torch.equal(got_rows[name][:-1].cpu(), rows[name][:-1]) for name in rows)


def check_attention(shape: LayerAttention, dtype: torch.dtype) -> str:
    case = attention_case(shape, LANES, dtype=dtype, device=CUDA, mixed=True, seed=1).with_step_stored()
    q_THD, expected, worst = case.q_prepared.to(dtype), case.expected(), 0.0
    for tokens in (17, 5, 2):
        config = verify_attention.choose_verify(len(LANES), tokens, shape, dtype)
        scratch = verify_attention.VerifyScratch(shape, CUDA)
        scratch.acc.fill_(float("nan"))
        count = torch.tensor([new for _, new in LANES], device=CUDA)
        mine, first = count[case.lane_T] <= tokens, None
        for _ in range(3):
            out = torch.full_like(q_THD, float("nan"))
            verify_attention.verify_attention(q_THD, case.lanes, case.pool, shape, config, scratch, out)
            assert first is None or torch.equal(out[mine], first), "results differ from run to run"
            first = out[mine]
        assert out[~mine].isnan().all()
        worst = max(worst, float((first.double() - expected[mine]).abs().max()))
    limit = 2e-2 if dtype is BF16 else 1e-4
    assert worst < limit, worst
    return f"error {worst:.1e}"


def check_engine(uneven: bool) -> str:
    """uneven: every second row has no drafts, and steps have room for two a row."""
    import numpy as np
    from drafting import UNEVEN, DraftEngine, TableDrafter, draft_plan
    from harness import make_core, make_request, run
    from tiny_models import make_tiny_model

    from slipstream.contracts.sampling_params import SamplingParams

    model = make_tiny_model(Path(tempfile.mkdtemp()), "llama")
    rng, sizes = np.random.default_rng(0), dict(max_num_seqs=8, max_num_batched_tokens=256)
    kinds = [dict(temperature=0.0, logprobs=2), dict(temperature=0.9, seed=3), dict(temperature=0.0),
             dict(temperature=0.0, repetition_penalty=1.3), dict(temperature=1.1, top_k=9, top_p=0.8)]
    core = make_core(model, **sizes)
    prompts = [rng.integers(3, 250, 5 + 9 * key).tolist() for key in range(10)]
    requests = [
        make_request(core, key, prompt, SamplingParams(max_tokens=40, ignore_eos=True, **kinds[key % 5]), key)
        for key, prompt in enumerate(prompts)
    ]
    plain = run(core, requests, {7: 5})
    core.close()
    texts = [prompt + plain[key].tokens for key, prompt in enumerate(prompts)]
    counts = (lambda length_L: length_L % 2 * 5) if uneven else None
    limits = (2, 2, 1, 0) if uneven else (5, 5, 2, 0)
    engine = DraftEngine(
        draft_plan(model, 5, device="cuda", **sizes, speculation=UNEVEN if uneven else {}),
        TableDrafter(texts, 5, 256, wrong=4, counts=counts),
        limit=lambda step: limits[step // 4 % 4],
    )
    got = engine.run(requests, {7: 5})
    engine.close()
    verified, taken = engine.verified_and_taken()
    wrong = [key for key in plain if got[key].tokens != plain[key].tokens]
    assert not wrong, f"requests {wrong} differ"
    assert 0 < taken < verified
    return f"{taken} of {verified} drafts taken"


def time_attention(shape: LayerAttention, lanes: int, tokens: int, keys: int) -> None:
    """Every lane has as many tokens, its keys scattered over the pool."""
    blocks = -(-keys // BLOCK)
    pool = PagedPool(*(torch.randn(lanes * blocks + 1, shape.num_kv_heads, BLOCK, shape.head_dim, dtype=BF16,
                                   device=CUDA) for _ in range(2)))
    table = (torch.randperm(lanes * blocks, device=CUDA) + 1).int().view(lanes, blocks)
    start = torch.arange(lanes + 1, dtype=torch.int32, device=CUDA) * tokens
    length = torch.full((lanes,), keys, dtype=torch.int32, device=CUDA)
    own = PagedLanes(torch.arange(lanes, device=CUDA), length, table, start)
    q = torch.randn(lanes * tokens, shape.num_heads, shape.head_dim, dtype=BF16, device=CUDA)
    out = torch.empty_like(q)
    floor = 1e6 * 4 * lanes * keys * shape.num_kv_heads * shape.head_dim / BANDWIDTH
    chosen = verify_attention.choose_verify(lanes, tokens, shape, BF16)
    half = replace(chosen, splits=max(chosen.splits // 2, 1))
    others = {"splits/2": half, "tile 32": replace(chosen, tile=32), "tile 64": replace(chosen, tile=64),
              "2 warps": replace(chosen, warps=2), "4 warps": replace(chosen, warps=4)}
    scratch = verify_attention.VerifyScratch(shape, CUDA)

    def verify(config: verify_attention.VerifyConfig) -> float:
        run = verify_attention.verify_attention
        return replayed(lambda: run(q, own, pool, shape, config, scratch, out))

    varlen = varlen_attention.choose_varlen(shape, BF16)
    tiles = varlen_attention.list_tiles(own, len(q), varlen.queries(shape), 1)
    long = replayed(
        lambda: varlen_attention.varlen_attention(q, tiles, own, pool, shape, varlen, out)
    )
    one, config = replace(own, query_start_L1=None), choose_decode(lanes, shape, BF16)
    partial = DecodeScratch(lanes, shape, lanes * config.splits, CUDA)
    decode = replayed(
        lambda: decode_attention.decode_attention(q[:lanes], one, pool, shape, config, partial, out[:lanes])
    )
    heads = f"{shape.num_heads}/{shape.num_kv_heads}x{shape.head_dim}"
    text = f"{heads} {lanes:>3} lanes x {tokens:>2}, {keys} keys: verify {verify(chosen):.1f} us "
    text += f"(floor {floor:.1f}, varlen {long:.1f}, decode of one {decode:.1f})"
    distinct = {name: each for name, each in others.items() if each != chosen}
    text += "".join(f"; {name} {verify(each):.1f}" for name, each in distinct.items() if left() > 15)
    print(text, flush=True)


def time_step(lanes: int, drafts: int) -> None:
    """Inputs, commit and put of a step in which every lane has drafts."""
    width, rows = 4096, lanes + 1
    record = torch.zeros(rows, 16, dtype=torch.int32, device=CUDA)
    names = ("alive", "length", "num_computed", "max_len", "draft_count", "seed_lo", "seed_hi")
    columns = {name: record[:, place] for place, name in enumerate(names)}
    for name, value in (("alive", 1), ("length", 900), ("num_computed", 899), ("max_len", width),
                        ("draft_count", drafts)):
        columns[name].fill_(value)
    columns["tokens"] = torch.zeros(rows, width, dtype=torch.int32, device=CUDA)
    columns["blocks"] = torch.ones(rows, width // BLOCK, dtype=torch.int32, device=CUDA)
    columns["end_ids"] = torch.full((rows, 64), -1, dtype=torch.int32, device=CUDA)
    of = cases_drafts.columns_of
    row = torch.arange(lanes, dtype=torch.int32, device=CUDA)
    one = torch.ones_like(row)
    limits = torch.tensor((drafts, lanes * drafts), dtype=torch.int32, device=CUDA)
    tokens = lanes * (1 + drafts)
    args = (row, one, limits, tokens, tokens, of(draft_inputs.DraftColumns, columns), BLOCK)
    made = draft_inputs.build_draft_inputs(*args)
    token = torch.ones(tokens, dtype=torch.int32, device=CUDA)
    ok = token.bool()
    lines = torch.zeros(4 + drafts, lanes, dtype=torch.int32, device=CUDA)
    out = commit_drafts.Appended(one.clone(), row.long())
    guess = torch.zeros(lanes, drafts, dtype=torch.int32, device=CUDA)
    commit_columns = of(commit_drafts.CommitColumns, columns)
    inputs = replayed(lambda: draft_inputs.build_draft_inputs(*args))
    commit = replayed(
        lambda: commit_drafts.commit_drafts(made, token, ok, commit_columns, lines, out)
    )
    put = replayed(
        lambda: put_drafts.put_drafts(
            made.row_L, guess, one, out.appended_L, tokens_RM=columns["tokens"], alive_R=columns["alive"],
            length_R=columns["length"], max_len_R=columns["max_len"], draft_count_R=columns["draft_count"],
        )
    )
    text = f"inputs {inputs:.1f}, commit {commit:.1f}, put {put:.1f} us"
    print(f"{lanes:>3} lanes, {drafts:>2} drafts: {text}", flush=True)


def replayed(run: Callable[[], object]) -> float:
    """Microseconds of one of twenty in a graph. What fits into the L2 cache is read from there."""
    return time_kernels.graph_us([run] * 20)


def left() -> float:
    return deadline - time.perf_counter()


def check_kernels() -> None:
    check("inputs, commit, put", check_step_kernels)
    for shape in CHECKED:
        check(f"attention {shape} bfloat16", lambda shape=shape: check_attention(shape, BF16))
    check(f"attention {SMOL} float32", lambda: check_attention(SMOL, F32))


def time_kernels_of_steps() -> None:
    for lanes, drafts in ((1, 4), (64, 4), (256, 3), (60, 16)):
        time_step(lanes, drafts)
    for case in ((LLAMA, 1, 4, 4096), (LLAMA, 64, 5, 2048), (SMOL, 1, 9, 2048), (LLAMA, 256, 4, 1024),
                 (LLAMA, 16, 4, 4096), (LLAMA, 1, 17, 4096), (SMOL, 64, 9, 1024), (LLAMA, 16, 17, 2048)):
        if left() > 15:
            time_attention(*case)
        else:
            print(f"left out for time: {case}")


def check_engines() -> None:
    for uneven, name in ((False, "alike"), (True, "shared room")):
        check(f"engine with graphs, float32, drafts {name}, against plain decoding",
              lambda uneven=uneven: check_engine(uneven))


PARTS = {"kernels": check_kernels, "times": time_kernels_of_steps, "engine": check_engines}


def main() -> None:
    global deadline
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", help=", ".join(PARTS))
    parser.add_argument("--seconds", type=float, default=95.0)
    args = parser.parse_args()
    deadline = time.perf_counter() + args.seconds
    for part in args.parts or PARTS:
        PARTS[part]()
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
