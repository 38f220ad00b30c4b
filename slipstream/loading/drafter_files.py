"""A drafter's folder: config.json and a few tensors, in safetensors or in torch's own files, which are read
as data and never run."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from slipstream.loading.hf_config import Config, read_json

Tensor = torch.Tensor
Shape = tuple[int, ...]

# The first pattern that finds something is the one.
PATTERNS = ("*.safetensors", "pytorch_model*.bin", "*.bin", "*.pt")
SHOWN_NAMES = 8


class DrafterFiles:
    """config, and tensors by canonical name. rename: a stored name's canonical one. dummy: random tensors of
    the shapes asked for, from seed; then optional ones are absent, and the folder may hold config.json alone.

    Raises ValueError that names the folder and the tensor or field."""

    def __init__(
        self, folder: Path, rename: Callable[[str], str], *, dummy: bool = False, seed: int = 0
    ) -> None:
        self.folder = folder
        self.config: Config = read_json(folder / "config.json")
        self.dummy = dummy
        self._draw = torch.Generator().manual_seed(seed)
        stored = {} if dummy else _read(folder)
        self._tensors = {rename(name): tensor for name, tensor in stored.items()}
        self._asked: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def field(self, *keys: str) -> int:
        """The first of these keys of config.json that is there: an integer."""
        for key in keys:
            if self.config.get(key) is not None:
                value = self.config[key]
                if type(value) is not int:
                    raise ValueError(f"{self.folder / 'config.json'}: {key}={value!r}: must be an integer")
                return value
        raise ValueError(f"{self.folder / 'config.json'}: the field {' or '.join(keys)} is missing")

    def get(self, name: str, shape: Shape) -> Tensor:
        """On the CPU, in the type that is stored (dummies: float32)."""
        self._asked.add(name)
        if self.dummy:
            mean = 1.0 if len(shape) == 1 and not name.endswith("bias") else 0.0
            return torch.empty(shape).normal_(mean, 0.02, generator=self._draw)
        tensor = self.stored(name)
        if tuple(tensor.shape) != shape:
            found = list(tensor.shape)
            raise ValueError(f"{self.folder}: {name} has shape {found}, must have {list(shape)}")
        return tensor

    def stored(self, name: str) -> Tensor:
        """Of whatever shape."""
        self._asked.add(name)
        if name not in self._tensors:
            raise ValueError(f"{self.folder}: the tensor {name} is missing")
        return self._tensors[name]

    def ids(self, values: Tensor, name: str, vocab_size: int, device: torch.device) -> Tensor:
        """values, made of tensor `name`, as int32 token ids on device."""
        low, high = values.aminmax()
        if not 0 <= int(low) <= int(high) < vocab_size:
            raise ValueError(f"{self.folder}: {name} names tokens outside the vocabulary of {vocab_size}")
        return values.to(device, torch.int32)

    def finish(self, ignored: str) -> None:
        """Refuses tensors that nobody asked for: they would change the maths. ignored: a regular expression
        of names that would not."""
        extra = [
            name for name in self._tensors if name not in self._asked and not re.fullmatch(ignored, name)
        ]
        if extra:
            more = f" and {len(extra) - SHOWN_NAMES} more" if len(extra) > SHOWN_NAMES else ""
            raise ValueError(f"{self.folder}: unexpected tensors: {', '.join(extra[:SHOWN_NAMES])}{more}")


def _read(folder: Path) -> dict[str, Tensor]:
    files = next((found for pattern in PATTERNS if (found := sorted(folder.glob(pattern)))), [])
    if not files:
        raise ValueError(f"{folder} holds none of {', '.join(PATTERNS)}")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            if file.suffix == ".safetensors":
                tensors |= load_file(file)
            else:
                tensors |= torch.load(file, map_location="cpu", weights_only=True)
        except (SafetensorError, OSError, RuntimeError, pickle.UnpicklingError, TypeError) as error:
            raise ValueError(f"{file} cannot be read: {str(error).splitlines()[0]}") from None
    wrong = [name for name, value in tensors.items() if not isinstance(value, torch.Tensor)]
    if wrong:
        raise ValueError(f"{folder}: {wrong[0]} is no tensor")
    return tensors
