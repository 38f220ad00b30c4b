"""What a server tells of itself: metrics under vLLM's names, and the state that the dashboard draws."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from live import Live, serve
from prometheus_client.parser import text_string_to_metric_families
from real import real_server
from scripted import ByteTokenizer
from scripted_state import BusyEngine
from text_model import make_text_model
from waiting import wait_for

from slipstream.server.app import build_app

# Of vLLM 0.31: what its Grafana dashboard and the routers in front of it read, but for what we have none of.
VLLM_NAMES = """
num_requests_running num_requests_waiting kv_cache_usage_perc cache_config_info num_preemptions_total
prefix_cache_queries_total prefix_cache_hits_total prompt_tokens_total generation_tokens_total
request_success_total time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket
request_time_per_output_token_seconds_bucket e2e_request_latency_seconds_bucket
request_queue_time_seconds_bucket request_prefill_time_seconds_bucket request_decode_time_seconds_bucket
request_inference_time_seconds_bucket request_prompt_tokens_bucket request_generation_tokens_bucket
request_params_n_bucket request_params_max_tokens_bucket spec_decode_num_drafts_total
spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total
"""


@pytest.fixture(scope="module")
def real(tiny_model: Callable[..., Path]) -> Iterator[Live]:
    with real_server(make_text_model(tiny_model)) as live:
        yield live


def series(live: Live) -> dict[str, float]:
    """Every series by its name, summed over labels, read by Prometheus' own parser."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(live.http.get("/metrics").text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def ask(live: Live, tokens: int, **more: Any) -> Any:
    body = {"prompt": "hey", "max_tokens": tokens, "ignore_eos": True, "temperature": 0} | more
    return live.raw_json("/v1/completions", body)


def test_a_requests_times_add_up_and_the_engines_counts_are_true(real: Live) -> None:
    before = series(real)
    for _ in range(3):
        ask(real, 20)
    after = series(real)

    def grown(name: str) -> float:
        return after[name] - before[name]

    assert [name for name in VLLM_NAMES.split() if f"vllm:{name}" not in after] == []
    times = {
        part: grown(f"vllm:request_{part}_time_seconds_sum")
        for part in ("queue", "prefill", "decode", "inference")
    }
    assert times["prefill"] + times["decode"] == pytest.approx(times["inference"])
    whole = grown("vllm:e2e_request_latency_seconds_sum")
    assert times["queue"] + times["inference"] == pytest.approx(whole, rel=0.2)
    first = grown("vllm:time_to_first_token_seconds_sum")
    assert times["queue"] + times["prefill"] == pytest.approx(first, rel=0.01)
    assert grown("vllm:request_queue_time_seconds_count") == 3
    assert grown("slipstream:engine_steps_total") >= 3 * 20
    # Prompts of three tokens, and all outputs but the last token of each are computed.
    assert grown("slipstream:computed_tokens_total") >= 3 * (3 + 19)
    busy, idle = grown("slipstream:device_busy_seconds_total"), grown("slipstream:device_idle_seconds_total")
    assert 0 < busy + idle < whole
    assert 0 < grown("slipstream:host_seconds_total") < whole
    assert after["slipstream:rows"] == 16 and after["slipstream:rows_in_use"] == 0


def test_acceptance_is_told_by_position() -> None:
    engine = BusyEngine()
    with serve(build_app(engine, "busy", tokenizer=ByteTokenizer())) as live:
        text = live.http.get("/metrics").text
    counts = engine.counts.accepted_per_position
    for place, count in enumerate(counts):
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        assert f'{name}{{engine="0",model_name="busy",position="{place}"}} {float(count)}' in text
    assert sum(counts) == engine.counts.accepted_tokens


def test_the_engine_is_asked_only_when_somebody_looks_and_once_for_all_of_them() -> None:
    engine = BusyEngine()
    with serve(build_app(engine, "busy", tokenizer=ByteTokenizer())) as live:
        live.raw_json("/v1/completions", {"prompt": "hi", "max_tokens": 4})
        assert live.http.get("/metrics").status_code == live.http.get("/").status_code == 200
        assert engine.looks == 0
        for _ in range(5):
            assert live.http.get("/v1/engine/state").status_code == 200
        assert engine.looks <= 2, "five looks within a tenth of a second or two"


def test_a_real_engine_shows_its_rows_while_they_run(real: Live) -> None:
    def state() -> Any:
        return real.http.get("/v1/engine/state").json()

    assert state()["owners"] == {}
    seen: list[Any] = []
    thread = threading.Thread(target=ask, args=(real, 200))
    thread.start()
    assert wait_for(lambda: seen.append(state()) or seen[-1]["owners"])
    thread.join()
    ((row, owner),) = seen[-1]["owners"].items()
    assert owner["id"].startswith("cmpl-") and owner["prompt"] == 3
    rows = seen[-1]["rows"]
    assert rows["phase"][int(row)] in (1, 2)
    assert 3 <= rows["length"][int(row)] <= rows["max_len"][int(row)] == 203
    after = state()
    assert after["owners"] == {} and set(after["rows"]["phase"]) == {0}
    assert after["stats"]["num_rows"] == len(after["rows"]["phase"]) == 16
    assert len(after["steps"][-1]) == len(after["step_columns"])
    assert all(time <= 0 for time in after["steps"][-1][3:])
