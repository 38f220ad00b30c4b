"""read_spec and load_model: the two doors through which a model on disk becomes a spec and a Model."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

import torch

from slipstream.config.model import ModelSpec
from slipstream.layers.linear import choose_linear
from slipstream.loading.gguf_file import is_gguf, open_gguf
from slipstream.loading.gguf_spec import read_gguf_spec
from slipstream.loading.hf_config import read_hf_spec
from slipstream.loading.kv_scales import SUFFIXES
from slipstream.loading.read_ahead import Read, ReadAhead
from slipstream.loading.sources import DummySource, GGUFSource, SafetensorsSource, Shapes, WeightSource
from slipstream.models.base import Model
from slipstream.models.maths import Maths
from slipstream.models.maths_fused import FusedMaths
from slipstream.models.maths_torch import TorchMaths
from slipstream.models.registry import MODELS
from slipstream.observe.log import get_logger

Tensor = torch.Tensor
T = TypeVar("T")
log = get_logger(__name__)

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
# Weights on the device that the model has not asked for yet, and who reads them.
READ_AHEAD_BYTES = 4 << 30
READING_THREADS = 8
_SHOWN_NAMES = 8
# Buffers that old checkpoints carry and every engine computes.
_COMPUTED = ("rotary_emb.inv_freq",)


def read_spec(path: str | Path) -> ModelSpec:
    """The architecture of a Hugging Face folder or a GGUF file. Raises ValueError that names what is
    unsupported."""
    path = Path(path).expanduser()
    if not path.exists():
        raise ValueError(f"model={str(path)!r}: no such folder or file")
    if path.is_dir():
        return read_hf_spec(path)
    if is_gguf(path):
        return read_gguf_spec(open_gguf(path))
    raise ValueError(f"model={str(path)!r}: neither a Hugging Face folder nor a GGUF file")


def load_model(
    path: str | Path,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    seed: int = 0,
    fused: bool = False,
    batch_invariant: bool = False,
) -> Model:
    """The model with its weights in dtype on device. spec.max_model_len sizes the rotary table: lower it to
    save memory.

    load_format: auto (what path holds), safetensors, gguf, or dummy (random weights from seed; path may lack
    weights). fused: on Triton kernels, whose attention prepares q and k itself. batch_invariant: a row's
    results do not depend on who else is in the step. Raises ValueError that names
    weights which are missing, unexpected or of another shape.
    """
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"load_format={load_format!r}: must be one of {', '.join(LOAD_FORMATS)}")
    model_class = MODELS[spec.architecture]
    source: WeightSource
    if load_format == "dummy":
        shapes = model_class.weight_shapes(spec)
        source = DummySource(shapes, dtype, device, seed)
    else:
        source = _stored(Path(path).expanduser(), spec, device, load_format)
        spec = _as_stored(spec, source)
        shapes = model_class.weight_shapes(spec)
        _check_weights(source.shapes, shapes, str(path))

    def build(maths: Maths) -> Model:
        def weight(name: str) -> Tensor:
            return as_weight(name, get(name), dtype, device, maths)

        with _reading(source, shapes, device) as get:
            return model_class(spec, weight, maths, device)

    with torch.inference_mode(), contextlib.closing(source):
        return with_maths(build, dtype, device, fused=fused, batch_invariant=batch_invariant)


def with_maths(
    build: Callable[[Maths], T],
    dtype: torch.dtype,
    device: torch.device,
    *,
    fused: bool,
    batch_invariant: bool,
) -> T:
    """build(maths) with the maths that suit the device; once more with others where a weight is beyond what
    the first can hold (see as_weight). fused, batch_invariant: load_model's."""
    if fused:
        return build(FusedMaths(dtype, device, batch_invariant))
    try:
        return build(TorchMaths(choose_linear(dtype, device, batch_invariant=batch_invariant)))
    except _RangeError as error:
        torch_linear = choose_linear(dtype, device, batch_invariant=batch_invariant, refused=str(error))
        return build(TorchMaths(torch_linear))


def as_weight(name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device, maths: Maths) -> Tensor:
    """A stored tensor as the maths want it."""
    tensor = tensor.to(device, dtype)
    if tensor.dim() == 2 and maths.max_weight < math.inf:
        _check_range(name, tensor, maths.max_weight)
    return tensor


def _reading(source: WeightSource, order: Shapes, device: torch.device) -> AbstractContextManager[Read]:
    """How weights are got. On a CPU packing them takes longer than reading them, and both want its cores."""
    if device.type == "cpu" or not source.threaded:
        return contextlib.nullcontext(source.get)
    # Counted as float32, which is what GGUF gives; most are half of that.
    sizes = {name: 4 * math.prod(shape) for name, shape in order.items()}
    return ReadAhead(source.get, sizes, window=READ_AHEAD_BYTES, threads=READING_THREADS)


class _RangeError(ValueError):
    """A weight that the chosen linear backend cannot hold."""


def _check_range(name: str, tensor: Tensor, limit: float) -> None:
    largest = tensor.abs().max().item()
    if not largest <= limit:
        raise _RangeError(f"{name} holds a weight of {largest:g}, beyond {limit:g}")


def _stored(path: Path, spec: ModelSpec, device: torch.device, load_format: str) -> WeightSource:
    gguf = path.is_file() and is_gguf(path)
    if load_format == "gguf" and not gguf:
        raise ValueError(f"load_format='gguf': {path} is not a GGUF file")
    if load_format == "safetensors" and gguf:
        raise ValueError(f"load_format='safetensors': {path} is a GGUF file")
    return GGUFSource(open_gguf(path), spec) if gguf else SafetensorsSource(path, device)


def _as_stored(spec: ModelSpec, source: WeightSource) -> ModelSpec:
    """A head that is stored counts, whatever the config says of tied embeddings, where it is another."""
    head, embed = "lm_head.weight", "model.embed_tokens.weight"
    shape = source.shapes.get(head)
    if not spec.tie_word_embeddings or shape is None or shape != source.shapes.get(embed):
        return spec
    if torch.equal(source.get(head), source.get(embed)):
        return spec
    log.warning("tie_word_embeddings is true, but the head that is stored is another; it is used", head=head)
    return dataclasses.replace(spec, tie_word_embeddings=False)


def _check_weights(found: Shapes, wanted: Shapes, path: str) -> None:
    tied = {"lm_head.weight"} - wanted.keys()
    known = wanted.keys() | tied
    extra = [name for name in found if name not in known and not name.endswith((*_COMPUTED, *SUFFIXES))]
    lacking = [name for name in wanted if name not in found]
    if lacking or extra:
        lists = (("missing", lacking), ("unexpected", extra))
        faults = "; ".join(f"{word}: {_shown(names)}" for word, names in lists if names)
        raise ValueError(f"{path}: weights {faults}")
    for name, shape in wanted.items():
        if found[name] != shape:
            raise ValueError(f"{path}: {name} has shape {list(found[name])}, the config says {list(shape)}")


def _shown(names: list[str]) -> str:
    more = len(names) - _SHOWN_NAMES
    return ", ".join(names[:_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")
