"""--speculative-config: vLLM's keys and defaults, every contradiction an error that names its key, and what
`explain` says of it. Expected values come from vLLM's documentation or are worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from explained import CONFIG, H200, Explain, explain, model

from slipstream.config.speculation import (
    LONGEST_MATCH,
    MAX_SPECULATIVE_TOKENS,
    NO_FACTS,
    DrafterFacts,
    SpeculativeConfig,
    read_speculative_config,
)

__all__ = ["explain", "model"]  # fixtures


def read(facts: DrafterFacts = NO_FACTS, **fields: Any) -> SpeculativeConfig:
    found = read_speculative_config(fields, facts, vocab_size=1000, hidden_size=64)
    assert found is not None
    return found


def test_without_the_flag_there_is_no_speculation() -> None:
    assert read_speculative_config(None, NO_FACTS, vocab_size=10, hidden_size=4) is None


def test_limits_are_those_of_the_kernels() -> None:
    from slipstream.kernels.history import LONGEST_MATCH as LONGEST
    from slipstream.speculation.protocol import MAX_DRAFTS

    assert (LONGEST_MATCH, MAX_SPECULATIVE_TOKENS) == (LONGEST, MAX_DRAFTS)


def test_defaults_are_vllms() -> None:
    suffix = read(method="suffix")
    assert suffix.suffix_decoding_max_tree_depth == 24
    assert suffix.suffix_decoding_max_cached_requests == 10_000
    assert suffix.suffix_decoding_max_spec_factor == 1.0
    assert suffix.suffix_decoding_min_token_prob == 0.1
    ngram = read(model="[ngram]", num_speculative_tokens=3)
    assert (ngram.method, ngram.prompt_lookup_min, ngram.prompt_lookup_max) == ("ngram", 5, 5)
    for given in ({"prompt_lookup_max": 4}, {"prompt_lookup_min": 4}):
        one = read(method="ngram", **given)
        assert (one.prompt_lookup_min, one.prompt_lookup_max) == (4, 4)
    assert read(model="folder").method == "draft_model"
    assert read(method="ngram_gpu").method == "ngram"
    assert read(method="ngram", rejection_sample_method="standard").rejection_sample_method == "strict"


def test_the_drafters_own_number_is_taken_and_its_heads_are_a_limit() -> None:
    medusa = DrafterFacts(num_tokens=3, max_tokens=3)
    assert read(medusa, method="medusa", model="m").num_speculative_tokens == 3
    assert read(medusa, method="medusa", model="m", num_speculative_tokens=2).num_speculative_tokens == 2
    with pytest.raises(ValueError, match="num_speculative_tokens=4: must be at most 3"):
        read(medusa, method="medusa", model="m", num_speculative_tokens=4)


@pytest.mark.parametrize(
    ("key", "fields"),
    [
        ("num_speculative_tokens=17: must be at most 16", {"method": "ngram", "num_speculative_tokens": 17}),
        ("num_speculative_tokens=0", {"method": "ngram", "num_speculative_tokens": 0}),
        ("num_speculative_tokens=True", {"method": "ngram", "num_speculative_tokens": True}),
        ("nonsense=1: unknown key", {"method": "ngram", "nonsense": 1}),
        ("method='mtp'", {"method": "mtp"}),
        ("method='dflash'", {"method": "dflash"}),
        ("model=None: method eagle3 needs", {"method": "eagle3"}),
        ("model=None: must be the import path", {"method": "custom_class"}),
        ("model='nodots'", {"method": "custom_class", "model": "nodots"}),
        ("model='m': method suffix has none", {"method": "suffix", "model": "m"}),
        ("prompt_lookup_min=5: must be at most prompt_lookup_max=4",
         {"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 4}),
        ("prompt_lookup_max=64: must be an integer of at least 1 and at most 63",
         {"method": "ngram", "prompt_lookup_max": 64}),
        ("suffix_decoding_max_tree_depth=1",
         {"method": "suffix", "suffix_decoding_max_tree_depth": 1}),
        ("prompt_lookup_max=0", {"method": "ngram", "prompt_lookup_max": 0}),
        ("prompt_lookup_max=3: is for method ngram", {"method": "suffix", "prompt_lookup_max": 3}),
        ("suffix_decoding_max_tree_depth=9: is for method suffix",
         {"method": "ngram", "suffix_decoding_max_tree_depth": 9}),
        ("suffix_decoding_min_token_prob=1.5", {"method": "suffix", "suffix_decoding_min_token_prob": 1.5}),
        ("suffix_decoding_max_spec_factor=-1", {"method": "suffix", "suffix_decoding_max_spec_factor": -1}),
        ("suffix_decoding_max_cached_requests=-1",
         {"method": "suffix", "suffix_decoding_max_cached_requests": -1}),
        ("draft_tensor_parallel_size=2: must be 1", {"method": "ngram", "draft_tensor_parallel_size": 2}),
        ("rejection_sample_method='block'", {"method": "ngram", "rejection_sample_method": "block"}),
        ("rejection_sample_method='synthetic': needs one of",
         {"method": "ngram", "rejection_sample_method": "synthetic"}),
        ("synthetic_acceptance_length=2: needs rejection_sample_method",
         {"method": "ngram", "synthetic_acceptance_length": 2}),
    ],
)  # fmt: skip
def test_a_contradiction_names_its_key(key: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="--speculative-config") as caught:
        read(**fields)
    assert key in str(caught.value)


def synthetic(tokens: int = 3, **fields: Any) -> tuple[float, ...]:
    fields = {"method": "ngram", "num_speculative_tokens": tokens, **fields}
    return read(rejection_sample_method="synthetic", **fields).acceptance


def test_synthetic_acceptance_is_conditional_whatever_it_was_given_as() -> None:
    # 0.7 each, given all before: 0.7, 0.49 and 0.343 of all steps.
    assert synthetic(synthetic_acceptance_rates=[0.7, 0.49, 0.343]) == pytest.approx([0.7] * 3)
    assert synthetic(synthetic_acceptance_rates=[0.5, 0, 0]) == (0.5, 0.0, 0.0)
    # vLLM's schedule of the least variance: 2.25 tokens are one draft always, a second in a quarter.
    assert synthetic(synthetic_acceptance_length=2.25) == pytest.approx((1.0, 0.25, 0.0))
    assert synthetic(synthetic_acceptance_length=4) == (1.0, 1.0, 1.0)
    each = synthetic(synthetic_acceptance_rate=0.511)
    assert each == pytest.approx([0.7] * 3, abs=1e-9)  # (0.7 + 0.49 + 0.343) / 3
    for key, fields in (
        ("synthetic_acceptance_rates", {"synthetic_acceptance_rates": [0.5, 0.6, 0.1]}),
        ("synthetic_acceptance_rates", {"synthetic_acceptance_rates": [0.5]}),
        ("synthetic_acceptance_rates", {"synthetic_acceptance_rates": [1.5, 1, 1]}),
        ("synthetic_acceptance_length", {"synthetic_acceptance_length": 4.5}),
        ("not 2", {"synthetic_acceptance_length": 2, "synthetic_acceptance_rate": 0.5}),
    ):
        with pytest.raises(ValueError, match=key):
            synthetic(**fields)


def folder(tmp_path: Path, **config: Any) -> Path:
    made = tmp_path / "drafter"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(config))
    return made


def flag(**fields: Any) -> str:
    return f"--device cuda --speculative-config '{json.dumps(fields)}'"


def test_drafter_files_are_held_against_the_model_before_anything_is_loaded(
    explain: Explain, tmp_path: Path
) -> None:
    def reason(**fields: Any) -> str:
        plan = explain(flag(**fields), H200).plan
        assert plan["model_runner"]["value"] == "v2" and plan["async_scheduling"]["value"] is True
        return f"{plan['speculation']['value']}: {plan['speculation']['reason']}"

    missing = str(tmp_path / "nowhere")
    for method in ("eagle", "eagle3", "medusa", "mlp_speculator", "draft_model"):
        said = reason(method=method, model=missing)
        assert said.startswith("error: --speculative-config: model=") and missing in said
    other = folder(tmp_path, **{**CONFIG, "vocab_size": 999})
    assert "has 999 tokens, the model's 1000" in reason(method="draft_model", model=str(other))
    wide = tmp_path / "wide"
    wide.mkdir()
    (wide / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": 128}))
    assert "hidden size of 128, the model's is 64" in reason(method="eagle3", model=str(wide))


def test_the_kv_cache_counts_a_drafters_layers(explain: Explain, tmp_path: Path) -> None:
    drafter = folder(tmp_path, **{**CONFIG, "num_hidden_layers": 1})
    plain = explain("--device cuda", H200).plan["kv_cache"]["value"]["bytes_per_token"]
    drafted = explain(flag(method="draft_model", model=str(drafter)), H200).plan["kv_cache"]["value"]
    assert drafted["bytes_per_token"] * 3 == plain * 4  # three layers of the model, one of the drafter


def test_explain_states_the_number_of_drafts_and_the_policy(explain: Explain) -> None:
    said = explain(flag(method="ngram", num_speculative_tokens=5), H200).plan["speculation"]
    assert said["value"] == "ngram" and said["flag"] == "--speculative-config"
    assert "up to 5 drafts a step (asked for), made on the device" in said["reason"]
    assert "measured some steps ago" in said["reason"]
    assert "(the default)" in explain(flag(method="suffix"), H200).plan["speculation"]["reason"]
    v1 = explain("--model-runner v1 " + flag(method="suffix"), H200).plan["speculation"]
    assert "runner v1 on the host" in v1["reason"]
