"""Where weights come from: safetensors, GGUF or random numbers. A source names its tensors as Hugging Face
does and gives them one at a time, so that loading never holds more than one layer twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from slipstream.config.model import ModelSpec
from slipstream.loading.gguf_file import GGUFFile
from slipstream.loading.gguf_spec import ROPE_FACTORS, hf_name, interleaved_modules
from slipstream.loading.hf_config import read_json
from slipstream.loading.staged import StagedReader, StoredTensor, read_header

Tensor = torch.Tensor
Shapes = dict[str, tuple[int, ...]]


class WeightSource(Protocol):
    """shapes: of every tensor there is. get: the tensor, in any float type, on any device; several threads
    may call it at once where threaded is True. close: nothing more will be asked for."""

    shapes: Shapes
    threaded: bool

    def get(self, name: str) -> Tensor: ...

    def close(self) -> None: ...


class SafetensorsSource:
    """A folder's *.safetensors, single or sharded: mapped into memory for a CPU, else read to the device."""

    threaded = True

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.shapes: Shapes = {}
        # safe_open's handles carry no types.
        self._file_of: dict[str, Any] = {}
        self._stored: dict[str, StoredTensor] = {}
        self._reader = StagedReader(device)
        for file in _weight_files(folder):
            try:
                opened: Any = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{file} cannot be read: {error}") from None
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                self._file_of[name] = opened
                self.shapes[name] = tuple(opened.get_slice(name).get_shape())
            if device.type != "cpu":
                self._stored.update(read_header(file))

    def get(self, name: str) -> Tensor:
        if name in self._stored:
            return self._reader.read(self._stored[name])
        tensor: Tensor = self._file_of[name].get_tensor(name)
        # It is a view of the mapped file, and one view kept would keep the whole file mapped.
        return tensor.clone()

    def close(self) -> None:
        self._reader.close()


class GGUFSource:
    """Tensors dequantised to float32 on the CPU; rows of q and k in Hugging Face's order."""

    threaded = True

    def __init__(self, file: GGUFFile, spec: ModelSpec) -> None:
        self._file = file
        self._stored = {hf_name(name): name for name in file.tensors if name != ROPE_FACTORS}
        self._interleaved = interleaved_modules(file, spec)
        self.shapes = {name: file.tensors[stored].shape for name, stored in self._stored.items()}

    def get(self, name: str) -> Tensor:
        tensor = torch.from_numpy(self._file.array(self._stored[name]))
        for module, heads in self._interleaved.items():
            if f".{module}." in name:
                tensor = uninterleave(tensor, heads)
        return tensor

    def close(self) -> None:
        """The file is mapped, and let go with the source."""


class DummySource:
    """Random weights of the model's own shapes: the same for one seed, drawn in dtype on the device, in
    turn."""

    threaded = False

    def __init__(self, shapes: Shapes, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self.shapes = shapes
        self._dtype, self._device = dtype, device
        self._draw = torch.Generator(device).manual_seed(seed)

    def get(self, name: str) -> Tensor:
        """Norms near one and everything else near nought, so that activations keep their scale."""
        tensor = torch.empty(self.shapes[name], dtype=self._dtype, device=self._device)
        mean = 1.0 if len(tensor.shape) == 1 and name.endswith("norm.weight") else 0.0
        return tensor.normal_(mean, 0.02, generator=self._draw)

    def close(self) -> None:
        """Nothing is open."""


def uninterleave(rows: Tensor, heads: int) -> Tensor:
    """[heads * D, ...]: the rows of a head lie in the order 0, D/2, 1, D/2 + 1, ...; back to 0, 1, 2, ..."""
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _weight_files(folder: Path) -> list[Path]:
    """As transformers looks for them: one file, else the shards of an index; else whatever is there."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        files = [single]
    elif index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{index}: the field 'weight_map' is missing")
        files = [folder / name for name in sorted(set(weight_map.values()))]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        others = ", ".join(sorted(file.name for file in folder.glob("*.bin"))) or "none"
        raise ValueError(f"{folder} holds no *.safetensors (*.bin: {others}; not supported)")
    absent = [file.name for file in files if not file.exists()]
    if absent:
        raise ValueError(f"{folder}: {index.name} names files that are missing: {', '.join(absent)}")
    return files
