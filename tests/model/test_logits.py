"""Logprobs against transformers in float32: every family and RoPE scaling, whole prefill and decode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from dense_attention import DenseAttend
from tiny_models import FAMILIES, ROPES
from transformers import AutoModelForCausalLM

from slipstream.layers.linear import choose_linear
from slipstream.loading import load_model, read_spec
from slipstream.loading.sources import SafetensorsSource
from slipstream.models.base import Model
from slipstream.models.maths_torch import TorchMaths
from slipstream.models.registry import MODELS

Tensor = torch.Tensor
CPU = torch.device("cpu")
TOLERANCE = 1e-4


def ours(folder: Path, dtype: torch.dtype = torch.float32) -> Model:
    return load_model(folder, read_spec(folder), dtype=dtype, device=CPU)


def theirs(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def run(model: Model, tokens_T: Tensor, cuts: list[int]) -> Tensor:
    """Logprobs [T, V] of one sequence fed in pieces that end at cuts."""
    attend, pieces, begin = DenseAttend(model.attention), [], 0
    with torch.inference_mode():
        for end in cuts:
            hidden = model.forward(tokens_T[begin:end], torch.arange(begin, end), attend)
            pieces.append(model.logits(hidden))
            begin = end
    return torch.cat(pieces).log_softmax(-1)


def reference(folder: Path, tokens_T: Tensor, cuts: list[int]) -> Tensor:
    """The same through transformers, with its cache."""
    model, cache, pieces, begin = theirs(folder), None, [], 0
    with torch.inference_mode():
        for end in cuts:
            out = model(tokens_T[None, begin:end], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            pieces.append(out.logits[0])
            begin = end
    return torch.cat(pieces).log_softmax(-1)


def tokens(count: int, vocab_size: int = 256) -> Tensor:
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(7))


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < TOLERANCE
    assert expected.std() > 0.5, "flat logits would agree whatever the model does"


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_whole_prefill_and_decode_agree_with_transformers(
    tiny_model: Callable[..., Path], family: str, rope: str
) -> None:
    folder = tiny_model(family, rope=rope)
    model, tokens_T = ours(folder), tokens(96)
    expected = reference(folder, tokens_T, [96])
    assert_same(run(model, tokens_T, [96]), expected)
    assert_same(run(model, tokens_T, list(range(1, 97))), expected)
    assert_same(run(model, tokens_T, [*range(7, 96, 7), 96]), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_goes_into_layers_agrees_with_transformers(tiny_model: Callable[..., Path], family: str) -> None:
    folder = tiny_model(family, num_hidden_layers=4)
    model, tokens_T, layers = ours(folder), tokens(40), (0, 3, 1)
    with torch.inference_mode():
        attend = DenseAttend(model.attention)
        hidden_TH, aux_TX = model.forward_aux(tokens_T, torch.arange(40), attend, layers)
        alone_TH = model.forward(tokens_T, torch.arange(40), DenseAttend(model.attention))
        states = theirs(folder)(tokens_T[None], output_hidden_states=True).hidden_states
    assert torch.equal(hidden_TH, alone_TH)
    assert (hidden_TH - states[-1][0]).abs().max() < TOLERANCE
    expected_TX = torch.cat([states[layer][0] for layer in layers], 1)
    assert aux_TX is not None and expected_TX.std() > 0.1
    assert (aux_TX - expected_TX).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("mistral", {"sliding_window": 24}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 24,
                   "layer_types": ["sliding_attention", "full_attention"]}),
    ],
)
def test_sliding_windows_agree_far_beyond_their_size(
    tiny_model: Callable[..., Path], family: str, options: dict
) -> None:
    folder = tiny_model(family, **options)
    model, tokens_T = ours(folder), tokens(96)
    assert 24 in [layer.window for layer in model.attention]
    assert_same(run(model, tokens_T, [96]), reference(folder, tokens_T, [96]))
    # transformers with every key in view: the window must have made a difference.
    full = reference(tiny_model(family), tokens_T, [96])
    assert (run(model, tokens_T, [96]) - full)[40:].abs().max() > 0.01
    cuts = [50, *range(51, 97)]
    assert_same(run(model, tokens_T, cuts), reference(folder, tokens_T, cuts))


@pytest.mark.parametrize("family", FAMILIES)
def test_dynamic_scaling_agrees_beyond_the_trained_length(
    tiny_model: Callable[..., Path], family: str
) -> None:
    folder = tiny_model(family, rope="dynamic", max_position_embeddings=64)
    model, tokens_T = ours(folder), tokens(128)
    for cuts in ([64, *range(65, 129)], list(range(1, 129))):
        assert_same(run(model, tokens_T, cuts), reference(folder, tokens_T, cuts))


def test_dynamic_scaling_does_not_depend_on_how_a_prompt_is_cut(tiny_model: Callable[..., Path]) -> None:
    model, tokens_T = ours(tiny_model("llama", rope="dynamic", max_position_embeddings=64)), tokens(128)
    whole = run(model, tokens_T, [128])
    assert_same(run(model, tokens_T, [*range(7, 128, 7), 128]), whole)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False,
         "mscale": 0.7, "mscale_all_dim": 1.3},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 0.9,
         "beta_fast": 16.0, "beta_slow": 2.0, "rope_theta": 500.0},
        {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 32, "rope_theta": 500000.0},
        {"rope_type": "linear", "factor": 3.5, "rope_theta": 123.0},
    ],
)
def test_every_option_of_a_scaling_is_read(tiny_model: Callable[..., Path], rope: dict) -> None:
    folder, tokens_T = tiny_model("llama", rope=rope), tokens(96)
    assert_same(run(ours(folder), tokens_T, [96]), reference(folder, tokens_T, [96]))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie": True, "num_key_value_heads": 4, "vocab_size": 131}),
        ("llama", {"num_key_value_heads": 1, "rms_norm_eps": 1e-2}),
        ("llama", {"head_dim": 24}),
        ("mistral", {"head_dim": 24}),
        ("qwen2", {"tie": True}),
        ("qwen3", {"attention_bias": True, "tie": True}),
    ],
)
def test_the_variants_of_a_family_agree(tiny_model: Callable[..., Path], family: str, options: dict) -> None:
    folder, tokens_T = tiny_model(family, **options), tokens(70, options.get("vocab_size", 256))
    assert_same(run(ours(folder), tokens_T, [70]), reference(folder, tokens_T, [70]))


@pytest.mark.parametrize("refused", ["", "F.linear, as other devices have it"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_worse_than_transformers(
    tiny_model: Callable[..., Path], dtype: torch.dtype, family: str, refused: str
) -> None:
    """transformers in the same type rounds every activation; our residual and rotation stay in float32."""
    folder, tokens_T = tiny_model(family), tokens(96)
    source, spec = SafetensorsSource(folder, CPU), read_spec(folder)
    linear = choose_linear(dtype, CPU, refused=refused)
    model = MODELS[spec.architecture](spec, lambda name: source.get(name).to(dtype), TorchMaths(linear), CPU)
    expected = reference(folder, tokens_T, [96])
    rounded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    with torch.inference_mode():
        theirs = rounded(tokens_T[None]).logits[0].float().log_softmax(-1)
    assert model.activation_dtype == (dtype if refused else linear.activation_dtype)
    assert (run(model, tokens_T, [96]) - expected).std() < 1.1 * (theirs - expected).std()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_computes_the_same_bits_whoever_is_in_its_step(
    tiny_model: Callable[..., Path], dtype: torch.dtype
) -> None:
    folder, tokens_T, positions_T = tiny_model("qwen3", seed=3), tokens(140), torch.arange(140)
    asked = dtype is not torch.float32  # float32 is so unasked
    model = load_model(folder, read_spec(folder), dtype=dtype, device=CPU, batch_invariant=asked)

    def attend(layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        return q_THD + k_TGD.repeat_interleave(2, 1) * v_TGD.repeat_interleave(2, 1)

    with torch.inference_mode():
        hidden = model.forward(tokens_T, positions_T, attend)
        logits = model.logits(hidden)
        for count in (1, 2, 3, 7, 8, 14, 31, 32, 64, 121, 127, 134):
            part = model.forward(tokens_T[:count], positions_T[:count], attend)
            assert torch.equal(part, hidden[:count])
            assert torch.equal(model.logits(part), logits[:count])
