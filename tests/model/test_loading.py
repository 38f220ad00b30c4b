"""Folders: sharded, tied, damaged, of transformers 4 and 5; dummy weights; the choice of linear layers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_attention import DenseAttend
from safetensors.torch import load_file, save_file

from slipstream.loading import load_model, read_spec
from slipstream.models.base import Model

Tensor = torch.Tensor
CPU = torch.device("cpu")
LLAMA3_70B_STYLE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": [2, 3],
}


def load(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Model:
    return load_model(folder, read_spec(folder), dtype=dtype, device=CPU, **options)


def logits(model: Model, count: int = 8) -> Tensor:
    with torch.inference_mode():
        hidden = model.forward(torch.arange(count), torch.arange(count), DenseAttend(model.attention))
        return model.logits(hidden)


def write_config(folder: Path, **changes: Any) -> Path:
    config = {key: value for key, value in {**LLAMA3_70B_STYLE, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def copy(source: Path, target: Path) -> dict[str, Tensor]:
    """The folder's config in target; its weights, to be changed and saved there."""
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    return load_file(source / "model.safetensors")


def test_sharded_weights_load_as_the_single_file_does(tiny_model: Callable[..., Path]) -> None:
    single, sharded = tiny_model("llama"), tiny_model("llama", max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert torch.equal(logits(load(single)), logits(load(sharded)))


def test_a_head_that_is_stored_counts_though_the_config_ties_it(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """As transformers 5 has it."""
    weights = copy(tiny_model("qwen2", tie=True), tmp_path)
    assert "lm_head.weight" not in weights
    tied = logits(load(tiny_model("qwen2", tie=True)))
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors")
    assert torch.equal(logits(load(tmp_path)), tied)
    weights["lm_head.weight"] = 2 * weights["model.embed_tokens.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    assert torch.equal(logits(load(tmp_path)), 2 * tied)


def test_other_weights_beside_the_models_are_left_alone(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    weights = copy(tiny_model("llama"), tmp_path)
    save_file(weights, tmp_path / "model.safetensors")
    save_file({"layers.0.attention.wq.weight": torch.ones(2, 2)}, tmp_path / "consolidated.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    assert torch.equal(logits(load(tmp_path)), logits(load(tiny_model("llama"))))


def test_a_missing_shard_is_named(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    for file in tiny_model("llama", max_shard_size="100KB").iterdir():
        if not file.name.startswith("model-00002"):
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(ValueError, match=r"missing: model-00002-of-0000\d.safetensors"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("model.layers.1.mlp.up_proj.weight"), r"missing: model.layers.1.mlp.up_proj.wei"),
        (lambda w: w.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}),
         r"unexpected: model.layers.0.self_attn.q_norm.weight$"),
        (lambda w: w.update({"model.norm.weight": torch.ones(63)}),
         r"model.norm.weight has shape \[63\], the config says \[64\]"),
    ],
)
def test_weights_that_do_not_fit_are_named(
    tiny_model: Callable[..., Path], tmp_path: Path, change: Callable[[dict], Any], message: str
) -> None:
    weights = copy(tiny_model("llama"), tmp_path)
    change(weights)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_buffers_of_old_checkpoints_are_ignored(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    weights = copy(tiny_model("llama"), tmp_path)
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    save_file(weights | buffer, tmp_path / "model.safetensors")
    assert torch.equal(logits(load(tmp_path)), logits(load(tiny_model("llama"))))


def test_a_folder_without_safetensors_says_what_it_holds(tmp_path: Path) -> None:
    write_config(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match=r"no \*.safetensors .*pytorch_model.bin"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(ValueError, match="cannot be read"):
        load(tmp_path)


def test_dummy_weights_need_only_a_config_and_follow_the_seed(tmp_path: Path) -> None:
    folder = write_config(tmp_path)
    one, again, other = (load(folder, load_format="dummy", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(logits(one), logits(again))
    assert not torch.equal(logits(one), logits(other))
    assert logits(one).isfinite().all()
    assert 0 < logits(load(folder, torch.bfloat16, load_format="dummy")).std() < 10


def test_load_format_must_be_what_the_path_holds(tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match=r"load_format='gguf': .* is not a GGUF file"):
        load(tiny_model("llama"), load_format="gguf")
    with pytest.raises(ValueError, match="load_format='torch': must be one of auto, safetensors"):
        load(tiny_model("llama"), load_format="torch")
    assert load(tiny_model("llama"), load_format="safetensors").num_bytes > 0


def test_old_and_new_configs_say_the_same(tmp_path: Path) -> None:
    """transformers 4: rope_scaling, rope_theta, torch_dtype. transformers 5: rope_parameters, dtype."""
    old = read_spec(write_config(tmp_path))
    parameters = {**LLAMA3_70B_STYLE["rope_scaling"], "rope_theta": 500000.0}
    new = read_spec(write_config(
        tmp_path, rope_scaling=None, rope_theta=None, torch_dtype=None, dtype="bfloat16",
        rope_parameters=parameters,
    ))
    assert old == new
    assert (old.rope.kind, old.rope.factor, old.rope.theta) == ("llama3", 8.0, 500000.0)
    assert (old.rope.original_max_position, old.max_model_len) == (8192, 131072)
    older = {"type": "linear", "factor": 4.0}
    assert read_spec(write_config(tmp_path, rope_scaling=older)).rope.kind == "linear"


def test_end_tokens_of_both_files_end_a_text(tmp_path: Path) -> None:
    assert read_spec(write_config(tmp_path)).end_token_ids == (2, 3)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7, "bos_token_id": 5}')
    spec = read_spec(tmp_path)
    assert (spec.end_token_ids, spec.bos_token_id) == ((7, 2, 3), 5)


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        (None, 4096),
        ({"rope_type": "linear", "factor": 4.0}, 16384),
        ({"rope_type": "dynamic", "factor": 2.0}, 8192),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": None, "beta_slow": 0},
         16384),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 512}, 4096),
    ],
)
def test_the_longest_text_follows_from_the_scaling(tmp_path: Path, scaling: Any, longest: int) -> None:
    folder = write_config(tmp_path, max_position_embeddings=4096, rope_scaling=scaling)
    assert read_spec(folder).max_model_len == longest


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        ("Mistral", {}, (4096,) * 4),
        ("Mistral", {"sliding_window": 8}, (8,) * 4),
        ("Mistral", {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"] * 2},
         (None, 8) * 2),
        ("Qwen2", {"use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 4096)),
        ("Qwen2", {"sliding_window": 8, "max_window_layers": 0}, (None,) * 4),
        ("Qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
         (None, None, None, 8)),
        ("Llama", {"sliding_window": 8}, (None,) * 4),
    ],
)
def test_windows_are_those_of_transformers(
    tmp_path: Path, family: str, changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    folder = write_config(tmp_path, architectures=[f"{family}ForCausalLM"], **changes)
    assert read_spec(folder).windows == windows
    config = json.loads((folder / "config.json").read_text()) | {"sliding_window": None}
    (folder / "config.json").write_text(json.dumps(config))
    assert read_spec(folder).windows == (None,) * 4, "null is none, whatever else is said"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM is not supported, must be one of"),
        ({"architectures": None}, "model_type 'llama' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method 'awq'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "type 'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "type 'yarn' needs factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "needs low_freq_factor, high_freq_factor"),
        ({"rope_scaling": {"full_attention": {"rope_type": "default"}}}, "one set for each layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype: 'float8_e4m3fn' is not supported"),
        ({"vocab_size": None}, "the field 'vocab_size' is missing"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, "factor='4': must be a number"),
        ({"num_attention_heads": "4"}, "a value of the wrong kind"),
        ({"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "sliding_window": 8,
          "layer_types": ["full_attention"]}, "layer_types: must be 4 of"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        read_spec(write_config(tmp_path, **changes))
    assert "config.json" in str(raised.value)


def test_paths_that_hold_no_model_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder or file"):
        read_spec(tmp_path / "absent")
    with pytest.raises(ValueError, match=r"config.json does not exist"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        read_spec(tmp_path)
    with pytest.raises(ValueError, match="neither a Hugging Face folder nor a GGUF file"):
        read_spec(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("weight", "shown"), [(-70000.0, "70144"), (float("inf"), "inf"), (float("nan"), "nan")]
)
def test_weights_beyond_float16_fall_back_with_the_reason(
    tiny_model: Callable[..., Path], tmp_path: Path, weight: float, shown: str
) -> None:
    weights = copy(tiny_model("llama"), tmp_path)
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = weight
    save_file(weights, tmp_path / "model.safetensors")
    model = load(tmp_path, torch.bfloat16)
    assert model.activation_dtype == torch.bfloat16
    assert f"model.layers.1.mlp.down_proj.weight holds a weight of {shown}" in model.linear_reason
    assert load(tiny_model("llama"), torch.bfloat16).activation_dtype == torch.float32


def test_num_bytes_counts_weights_and_tables(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("llama")
    parameters = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    rotary = 256 * 2 * 16
    assert load(folder).num_bytes == 4 * (parameters + rotary)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights_take_the_memory_that_they_state(dtype: torch.dtype) -> None:
    """Resident memory around packing, in a process of its own; 576 inputs do not fill FBGEMM's blocks."""
    script = f"""
import ctypes, psutil, torch
from slipstream.layers.linear import choose_linear
linear = choose_linear({dtype}, torch.device("cpu"))
weight = torch.full((4096, 576), 0.01).to({dtype})
linear.make(weight, None)
trim, process = ctypes.CDLL(None).malloc_trim, psutil.Process()
trim(0)
before = process.memory_info().rss
kept = [linear.make(weight, None) for _ in range(20)]
trim(0)
print((process.memory_info().rss - before) / sum(layer.num_bytes for layer in kept))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert 0.97 < float(done.stdout) < 1.05
