"""GGUF files written by the gguf package: every quantisation, the four families, and what is refused."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from test_logits import CPU, assert_same, ours, reference, run, tokens

from slipstream.loading import load_model, read_spec
from slipstream.loading.gguf_file import GGUFFile
from slipstream.loading.gguf_spec import hf_name

Array = np.ndarray
K_BLOCK = 256
GGUF_NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 2)


def interleave(rows: Array, heads: int) -> Array:
    """What llama.cpp's converter does to q and k of Llama-family models (LlamaModel.permute)."""
    split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def k_blocks(kind: Kind, shape: tuple[int, ...], draw: np.random.Generator) -> Array:
    """Random blocks of a K quantisation, which the package cannot write, with scales that keep weights
    small."""
    size, width = gguf.GGML_QUANT_SIZES[kind]
    blocks = draw.integers(0, 256, (int(np.prod(shape)) // size, width), np.uint8)
    scales, largest = ((width - 2,), 3e-5) if kind is Kind.Q6_K else ((0, 2), 3e-4)
    for at in scales:
        small = draw.uniform(1e-5, largest, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = small.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(*shape[:-1], -1)


def write_gguf(source: Path, target: Path, arch: str, kind: Kind = Kind.F32, **metadata: object) -> Path:
    """Writes the Hugging Face folder source as GGUF file target, matrices in kind, and puts the dequantised
    weights back in the folder for transformers to compare with."""
    spec, weights = read_spec(source), load_file(source / "model.safetensors")
    writer = gguf.GGUFWriter(target, arch)
    writer.add_context_length(spec.max_model_len)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_block_count(spec.num_layers)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.rms_norm_eps)
    writer.add_rope_freq_base(spec.rope.theta)
    for key, value in metadata.items():
        getattr(writer, key)(value)
    draw = np.random.default_rng(5)
    heads = {"self_attn.q_proj": spec.num_heads, "self_attn.k_proj": spec.num_kv_heads}
    for name, tensor in weights.items():
        rows, stored_kind = tensor.numpy(), kind if tensor.dim() == 2 else Kind.F32
        count = next((heads[module] for module in heads if module in name), 0) if arch == "llama" else 0
        rows = interleave(rows, count) if count else rows
        k_kind = stored_kind in (Kind.Q4_K, Kind.Q5_K, Kind.Q6_K)
        stored = k_blocks(kind, rows.shape, draw) if k_kind else gguf.quantize(rows, stored_kind)
        writer.add_tensor(GGUF_NAMES.get_name(name, (".weight", ".bias")), stored, raw_dtype=stored_kind)
        back = np.array(gguf.dequantize(stored, stored_kind)).reshape(rows.shape)
        # Undoes interleave by asking where it put each row.
        back = back[np.argsort(interleave(np.arange(len(rows)), count))] if count else back
        weights[name] = torch.from_numpy(back.astype(np.float32))
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., Path]:
    """A tiny model that a test may change; rows fill whole K blocks."""
    from tiny_models import make_tiny_model

    sizes = {"hidden_size": K_BLOCK, "intermediate_size": K_BLOCK, "initializer_range": 0.1}
    return lambda family, **options: make_tiny_model(tmp_path / "folder", family, **{**sizes, **options})


@pytest.mark.parametrize("kind", [Kind[name] for name in
                                  ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")])
def test_every_quantisation_gives_the_logits_of_its_dequantised_weights(
    tiny: Callable[..., Path], tmp_path: Path, kind: Kind
) -> None:
    folder, tokens_T = tiny("llama"), tokens(64)
    file = write_gguf(folder, tmp_path / "model.gguf", "llama", kind)
    found = run(ours(file), tokens_T, [64])
    assert_close(found, reference(folder, tokens_T, [64]))


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found - expected).abs().max() < 1e-4
    assert expected.std() > 0.05


@pytest.mark.parametrize(
    ("arch", "family", "options"),
    [("llama", "llama", {"tie": True}), ("llama", "llama", {"head_dim": 32}), ("qwen2", "qwen2", {}),
     ("qwen3", "qwen3", {"tie": True})],
)
def test_every_family_agrees_with_transformers(
    tiny: Callable[..., Path], tmp_path: Path, arch: str, family: str, options: dict
) -> None:
    folder, tokens_T = tiny(family, **options), tokens(64)
    file = write_gguf(folder, tmp_path / "model.gguf", arch)
    assert_same(run(ours(file), tokens_T, [64]), reference(folder, tokens_T, [64]))


def test_a_sliding_window_is_read(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder, tokens_T = tiny("mistral", sliding_window=16), tokens(64)
    file = write_gguf(folder, tmp_path / "model.gguf", "llama", add_sliding_window=16)
    assert_same(run(ours(file), tokens_T, [64]), reference(folder, tokens_T, [64]))


def test_scalings_in_metadata_agree_with_transformers(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder, tokens_T = tiny("llama", rope="yarn"), tokens(96)
    file = write_gguf(
        folder, tmp_path / "yarn.gguf", "llama", add_rope_scaling_type=gguf.RopeScalingType.YARN,
        add_rope_scaling_factor=4.0, add_rope_scaling_orig_ctx_len=64,
    )
    assert_same(run(ours(file), tokens_T, [96]), reference(folder, tokens_T, [96]))
    folder = tiny("llama", rope="linear")
    file = write_gguf(
        folder, tmp_path / "linear.gguf", "llama", add_rope_scaling_type=gguf.RopeScalingType.LINEAR,
        add_rope_scaling_factor=2.0,
    )
    assert_same(run(ours(file), tokens_T, [96]), reference(folder, tokens_T, [96]))


def test_llama3_scaling_comes_as_a_tensor(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """llama.cpp's converter writes what each frequency is divided by, as rope_freqs.weight."""
    folder, tokens_T = tiny("llama", rope="llama3"), tokens(96)
    frequencies = 1.0 / 10000.0 ** (np.arange(0, 64, 2) / 64)
    wavelengths = 2 * np.pi / frequencies
    smooth = (64 / wavelengths - 1.0) / (4.0 - 1.0)
    factors = np.where(wavelengths < 64 / 4.0, 1.0, np.where(wavelengths > 64 / 1.0, 8.0,
                       1.0 / ((1 - smooth) / 8.0 + smooth)))
    weights = load_file(folder / "model.safetensors")
    plain = write_gguf(folder, tmp_path / "plain.gguf", "llama")
    writer = gguf.GGUFWriter(tmp_path / "scaled.gguf", "llama")
    reader = gguf.GGUFReader(plain)
    for field in reader.fields.values():
        if field.name.startswith("llama."):
            writer.add_key_value(field.name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert_same(run(ours(tmp_path / "scaled.gguf"), tokens_T, [96]), reference(folder, tokens_T, [96]))


def test_the_container_reads_as_the_gguf_package_does(tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = write_gguf(tiny("qwen3"), tmp_path / "model.gguf", "qwen3", Kind.Q8_0,
                      add_languages=["en", "de"], add_file_type=7, add_quantized_by="ü")
    ours_file, theirs = GGUFFile(path), gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours_file.metadata == fields
    for tensor in theirs.tensors:
        wanted = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(ours_file.array(tensor.name), wanted.reshape(tuple(reversed(tensor.shape))))


def test_k_quantisations_follow_ggmls_formula() -> None:
    """Q6_K is d * scale * (q - 32), Q4_K is d * scale * q - dmin * min, on blocks laid out by hand."""
    block = np.zeros(210, np.uint8)
    block[0], block[128] = 0x05, 0x02  # low 4 bits and high 2 bits of the first value: 0x25 = 37
    block[192] = np.int8(-3).view(np.uint8)
    block[208:] = np.array([0.5], np.float16).view(np.uint8)
    assert gguf.dequantize(block[None], Kind.Q6_K)[0, 0] == 0.5 * -3 * (37 - 32)
    block = np.zeros(144, np.uint8)
    block[:4] = np.array([0.5, 0.25], np.float16).view(np.uint8)
    block[4], block[8], block[16] = 7, 9, 0x0B
    assert gguf.dequantize(block[None], Kind.Q4_K)[0, 0] == 0.5 * 7 * 11 - 0.25 * 9


def test_eps_is_the_decimal_that_was_meant(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny("llama", rms_norm_eps=1e-5)
    assert read_spec(write_gguf(folder, tmp_path / "model.gguf", "llama")).rms_norm_eps == 1e-5


def test_what_is_not_supported_is_named(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny("llama")
    with pytest.raises(ValueError, match=r"general.architecture 'gemma3' is not supported"):
        read_spec(write_gguf(folder, tmp_path / "a.gguf", "gemma3"))
    with pytest.raises(ValueError, match="type Q5_0 is not supported, must be one of F32"):
        read_spec(write_gguf(folder, tmp_path / "b.gguf", "llama", Kind.Q5_0))
    with pytest.raises(ValueError, match="dimension_count 16 is not supported, must be one of 64"):
        read_spec(write_gguf(folder, tmp_path / "c.gguf", "llama", add_rope_dimension_count=16))
    with pytest.raises(ValueError, match=r"scaling.type 'longrope' is not supported"):
        read_spec(write_gguf(folder, tmp_path / "d.gguf", "llama",
                             add_rope_scaling_type=gguf.RopeScalingType.LONGROPE))


def test_a_damaged_file_is_an_error_and_not_a_crash(tiny: Callable[..., Path], tmp_path: Path) -> None:
    whole = write_gguf(tiny("llama"), tmp_path / "whole.gguf", "llama").read_bytes()
    for length in (4, 20, 60, 400, 1500):
        (tmp_path / f"{length}.gguf").write_bytes(whole[:length])
        with pytest.raises(ValueError, match="damaged"):
            read_spec(tmp_path / f"{length}.gguf")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[:-4096])
    with pytest.raises(ValueError, match="cut short"):
        load_model(cut, read_spec(cut), dtype=torch.float32, device=CPU)
    old = tmp_path / "old.gguf"
    old.write_bytes(b"GGUF" + struct.pack("<I", 1) + whole[8:])
    with pytest.raises(ValueError, match="version 1 is not supported"):
        read_spec(old)


def test_unknown_tensors_are_reported_by_their_own_name(tmp_path: Path) -> None:
    assert hf_name("blk.7.attn_k.bias") == "model.layers.7.self_attn.k_proj.bias"
    assert hf_name("output.weight") == "lm_head.weight"
    assert hf_name("blk.0.ffn_gate_exps.weight") == "blk.0.ffn_gate_exps.weight"


def test_options_of_yarn_are_read_or_refused(tiny: Callable[..., Path], tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 4.0,
            "beta_slow": 0.5}  # fmt: skip
    folder, tokens_T = tiny("llama", rope=yarn), tokens(96)
    stored = dict(
        add_rope_scaling_type=gguf.RopeScalingType.YARN, add_rope_scaling_factor=4.0,
        add_rope_scaling_orig_ctx_len=64, add_rope_scaling_yarn_beta_fast=4.0,
        add_rope_scaling_yarn_beta_slow=0.5, add_rope_scaling_yarn_attn_factor=1.0,
    )
    file = write_gguf(folder, tmp_path / "yarn.gguf", "llama", **stored)
    assert_same(run(ours(file), tokens_T, [96]), reference(folder, tokens_T, [96]))
    stored["add_rope_scaling_yarn_attn_factor"] = 1.3
    file = write_gguf(folder, tmp_path / "other.gguf", "llama", **stored)
    with pytest.raises(ValueError, match=r"yarn_attn_factor 1\.2999.* is not supported, must be one of 1\.0"):
        read_spec(file)
