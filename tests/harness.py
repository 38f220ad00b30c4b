"""Drives an EngineCore without text: requests by arrays, outputs collected by key.

SLIPSTREAM_TEST_DEVICE=cuda runs the tests that use it on a GPU, with graphs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from slipstream.config.args import EngineArgs
from slipstream.contracts.request import EngineRequest
from slipstream.contracts.sampling_params import SamplingParams
from slipstream.contracts.step import Finish
from slipstream.engine.core import EngineCore
from slipstream.engine.open_core import open_core

DEVICE = os.environ.get("SLIPSTREAM_TEST_DEVICE", "cpu")


@dataclass
class Collected:
    """What came back of one request. num_logprobs: as it asked (others of its batch may have asked for
    more)."""

    num_logprobs: int | None = None
    tokens: list[int] = field(default_factory=list)
    finish: Finish = Finish.NONE
    logprobs: list[dict[int, float]] = field(default_factory=list)
    prompt_logprobs: dict[int, dict[int, float]] = field(default_factory=dict)
    num_cached: int = 0
    errors: list[str] = field(default_factory=list)


def make_core(model, **args) -> EngineCore:
    defaults = {
        "distributed_executor_backend": "uni", "dtype": "float32", "max_num_seqs": 64, "max_model_len": 256,
        "num_gpu_blocks_override": 2000, "device": DEVICE,
    }  # fmt: skip
    return open_core(EngineArgs(model=str(model), **{**defaults, **args}), lambda: None)


def make_request(
    core: EngineCore,
    key: int,
    prompt: Sequence[int],
    params: SamplingParams,
    seed: int = 0,
    bad_words=(),
    **fields,
) -> EngineRequest:
    ends = tuple(params.stop_token_ids or ()) + (() if params.ignore_eos else core.info.end_token_ids)
    return EngineRequest(
        key=key,
        prompt_token_ids=np.array(prompt, np.int32),
        params=params,
        seed=seed,
        end_token_ids=ends,
        max_len=min(len(prompt) + params.max_tokens, core.info.limits.max_model_len),
        bad_word_token_ids=bad_words,
        **fields,
    )


def run(
    core: EngineCore,
    requests: Sequence[EngineRequest],
    arrive_at: Mapping[int, int] | None = None,
    abort_at: Mapping[int, int] | None = None,
) -> dict[int, Collected]:
    """Steps the engine until all is done. arrive_at, abort_at: key -> step number."""
    arrive_at, abort_at = arrive_at or {}, dict(abort_at or {})
    waiting = sorted(requests, key=lambda r: arrive_at.get(r.key, 0))
    out = {r.key: Collected(r.params.logprobs) for r in requests}
    step = 0
    while waiting or core.has_work:
        while waiting and arrive_at.get(waiting[0].key, 0) <= step:
            core.add([waiting.pop(0)])
        for key in [k for k, at in abort_at.items() if at <= step]:
            core.abort([key])
            del abort_at[key]
        collect(core.step() if core.has_work else None, out)
        step += 1
        assert step < 100_000
    core.scheduler.check_invariants()
    assert core.scheduler.num_running == core.scheduler.num_waiting == 0
    return out


def collect(outputs, out: dict[int, Collected]) -> None:
    if outputs is None:
        return
    place = 0
    for i, key in enumerate(outputs.keys.tolist()):
        count = int(outputs.num_tokens[i])
        got = out[key]
        assert got.finish is Finish.NONE, "nothing may follow the end"
        got.tokens += outputs.tokens[place : place + count].tolist()
        place += count
        got.finish = Finish(int(outputs.finish[i]))
        if got.num_logprobs is not None:
            width = 1 + got.num_logprobs
            for q in range(count):
                ids, values = outputs.logprobs.ids[i, q, :width], outputs.logprobs.values[i, q, :width]
                got.logprobs.append(dict(zip(ids.tolist(), values.tolist(), strict=True)))
    assert place == len(outputs.tokens)
    for key, piece in outputs.prompt_logprobs:
        for offset in range(len(piece.ids)):
            assert piece.start + offset not in out[key].prompt_logprobs, "a position is scored once"
            out[key].prompt_logprobs[piece.start + offset] = dict(
                zip(piece.ids[offset].tolist(), piece.values[offset].tolist(), strict=True)
            )
    for key, tokens in outputs.num_cached:
        out[key].num_cached = tokens
    for key, text in outputs.errors:
        out[key].errors.append(text)
