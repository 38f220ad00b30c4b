"""Scales of a float8 KV cache, read from checkpoints that this test writes."""

import pytest
import torch
from safetensors.torch import save_file

from slipstream.loading.kv_scales import read_kv_scales


def write(folder, scales):
    save_file({name: torch.tensor(value) for name, value in scales.items()}, folder / "model.safetensors")


@pytest.mark.parametrize("place", ["self_attn.{}_scale", "self_attn.{}_proj.{}_scale"])
def test_scales_of_every_layer_are_read_in_order(tmp_path, place):
    scales = {
        f"model.layers.{layer}.{place.format(kind, kind)}": 0.25 * (layer + 1) + (kind == "v")
        for layer in range(3)
        for kind in "kv"
    }
    write(tmp_path, scales)
    assert read_kv_scales(tmp_path, 3) == ((0.25, 1.25), (0.5, 1.5), (0.75, 1.75))


def test_a_checkpoint_without_scales_has_none(tmp_path):
    write(tmp_path, {"model.norm.weight": 1.0})
    assert read_kv_scales(tmp_path, 3) == ()


def test_a_missing_scale_is_named(tmp_path):
    write(tmp_path, {"model.layers.0.self_attn.k_scale": 1.0})
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn\.v_scale"):
        read_kv_scales(tmp_path, 1)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), [1.0, 2.0]])
def test_a_scale_that_is_no_positive_number_is_named(tmp_path, value):
    write(tmp_path, {"model.layers.0.self_attn.k_scale": value, "model.layers.0.self_attn.v_scale": 1.0})
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.k_scale must be one positive number"):
        read_kv_scales(tmp_path, 1)
