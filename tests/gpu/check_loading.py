"""Weights to a CUDA device: the same bits as safetensors' own reader gives, and gigabytes a second.

    python tests/gpu/check_loading.py [--gigabytes 8] [--folder /tmp/check_loading]

Writes random bfloat16 weights of a Llama in shards (once), reads them to the device through load_model's own
parts, compares every tensor, then times load_model from the page cache, and random weights of the same
shapes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[2]))

from slipstream.loading import load_model, read_spec
from slipstream.loading.sources import SafetensorsSource
from slipstream.models.registry import MODELS

CUDA = torch.device("cuda")
LAYER_BYTES = 436e6  # of the shapes below
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128_256, "hidden_size": 4096,
    "intermediate_size": 14_336, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "hidden_act": "silu",
    "torch_dtype": "bfloat16", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}


def write_model(folder: Path, gigabytes: float) -> None:
    """Shards of four layers; one with the embedding and the head."""
    folder.mkdir(parents=True, exist_ok=True)
    layers = max(4, int((gigabytes * 1e9 - 2.1e9) / LAYER_BYTES))
    config = CONFIG | {"num_hidden_layers": layers}
    if (folder / "config.json").exists() and json.loads((folder / "config.json").read_text()) == config:
        return
    (folder / "config.json").write_text(json.dumps(config))
    spec = read_spec(folder)
    shards: dict[str, dict[str, torch.Tensor]] = {}
    weight_map = {}
    for name, shape in MODELS[spec.architecture].weight_shapes(spec).items():
        number = 1 + int(name.split(".")[2]) // 4 if ".layers." in name else 0
        shard = f"model-{number:05}.safetensors"
        weight_map[name] = shard
        drawn = torch.empty(shape, dtype=torch.bfloat16, device=CUDA).normal_(0, 0.02)
        shards.setdefault(shard, {})[name] = drawn.cpu()
    for shard, weights in shards.items():
        save_file(weights, folder / shard, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def compare(folder: Path) -> int:
    """Tensors that differ."""
    source, wrong = SafetensorsSource(folder, CUDA), 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as theirs:
            for name in theirs.keys():  # noqa: SIM118 (not a mapping)
                wrong += not torch.equal(source.get(name), theirs.get_tensor(name).cuda())
    source.close()
    return wrong


def time_loading(folder: Path, load_format: str) -> tuple[float, float]:
    """Seconds, and gigabytes of the model."""
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    model = load_model(
        folder, read_spec(folder), dtype=torch.bfloat16, device=CUDA, load_format=load_format
    )
    torch.cuda.synchronize()
    return time.perf_counter() - begin, model.num_bytes / 1e9


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=8.0)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/check_loading"))
    options = parser.parse_args()
    begin = time.perf_counter()
    write_model(options.folder, options.gigabytes)
    print(f"written in {time.perf_counter() - begin:.1f} s", flush=True)
    wrong = compare(options.folder)
    print(f"tensors that differ: {wrong}", flush=True)
    for load_format in ("safetensors", "safetensors", "dummy"):
        seconds, gigabytes = time_loading(options.folder, load_format)
        speed = f"{gigabytes / seconds:.1f} GB/s"
        print(f"{load_format}: {gigabytes:.1f} GB in {seconds:.2f} s, {speed}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
