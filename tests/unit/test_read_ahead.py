"""Reading ahead of the model: in its order, within a bound, with errors where they belong; and bytes of files
that arrive as safetensors' own reader has them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from waiting import wait_for

from slipstream.layers.linear import choose_linear
from slipstream.loading import read_spec, staged
from slipstream.loading.read_ahead import ReadAhead
from slipstream.loading.sources import SafetensorsSource
from slipstream.loading.staged import StagedReader, read_header
from slipstream.models.maths_torch import TorchMaths
from slipstream.models.registry import MODELS

CPU = torch.device("cpu")
NAMES = [f"w{i}" for i in range(40)]


class Shelf:
    """What is read, by whom and when. Tensor i is filled with i."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.read: list[str] = []
        self.most = 0
        self._lock = threading.Lock()
        self._ahead: set[str] = set()
        self._taken: set[str] = set()

    def __call__(self, name: str) -> torch.Tensor:
        with self._lock:
            self.read.append(name)
            if threading.current_thread() is not threading.main_thread():
                self._ahead.add(name)
                self.most = max(self.most, self.lead)
        if name == self.fault:
            raise ValueError(f"{name} is damaged")
        return torch.full((3,), float(name[1:]))

    @property
    def lead(self) -> int:
        """Read by the threads and not yet taken."""
        return len(self._ahead - self._taken)

    def taken(self, name: str) -> None:
        with self._lock:
            self._taken.add(name)


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("window", [1, 30, 1000])
def test_any_order_of_asking_gives_what_is_stored(threads: int, window: int) -> None:
    for seed in range(10):
        asked = random.Random(seed).sample(NAMES, len(NAMES))
        shelf = Shelf()
        with ReadAhead(shelf, dict.fromkeys(NAMES, 10), window=window, threads=threads) as take:
            assert [take(name)[0].item() for name in asked] == [float(name[1:]) for name in asked]
        assert sorted(shelf.read) == sorted(NAMES), "each is read once"


def test_a_name_asked_for_again_is_read_again() -> None:
    shelf = Shelf()
    with ReadAhead(shelf, dict.fromkeys(NAMES, 1), window=100, threads=2) as take:
        for _ in range(2):
            assert [take(name)[0].item() for name in NAMES] == [float(name[1:]) for name in NAMES]
    assert len(shelf.read) == 2 * len(NAMES)


def test_reading_goes_on_in_order_while_the_caller_is_busy_and_stops_at_the_bound() -> None:
    shelf = Shelf()
    with ReadAhead(shelf, dict.fromkeys(NAMES, 10), window=75, threads=1) as take:
        assert wait_for(lambda: len(shelf.read) == 7)
        time.sleep(0.05)
        assert shelf.read == NAMES[:7]
        for number, name in enumerate(NAMES[:20], start=1):
            take(name)
            assert wait_for(lambda number=number: len(shelf.read) == 7 + number)
            assert shelf.read == NAMES[: 7 + number]


def test_many_threads_keep_the_bound() -> None:
    shelf = Shelf()
    with ReadAhead(shelf, dict.fromkeys(NAMES, 10), window=75, threads=8) as take:
        assert wait_for(lambda: shelf.lead == 7)
        for name in NAMES:
            shelf.taken(name)  # said first: the take makes room, which is used at once
            take(name)
    assert shelf.most <= 7


def test_a_tensor_beyond_the_bound_is_read_ahead_alone() -> None:
    shelf = Shelf()
    with ReadAhead(shelf, {"w1": 10, "w2": 500, "w3": 10}, window=100, threads=2) as take:
        assert wait_for(lambda: shelf.read == ["w1"])
        take("w1")
        assert wait_for(lambda: shelf.read == ["w1", "w2"])
        take("w2")
        take("w3")


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_reaches_whoever_asks_for_that_name(threads: int) -> None:
    shelf = Shelf(fault="w5")
    before = threading.active_count()
    with (
        pytest.raises(ValueError, match="w5 is damaged"),
        ReadAhead(shelf, dict.fromkeys(NAMES, 1), window=100, threads=threads) as take,
    ):
        assert wait_for(lambda: "w5" in shelf.read)
        for name in NAMES[:5]:
            take(name)
        take("w5")
    assert threading.active_count() == before


@pytest.fixture
def stored(tmp_path: Path) -> dict[str, torch.Tensor]:
    """Saved in tmp_path/model.safetensors: all types, sizes around the staging buffers', one that is none."""
    draw = torch.Generator().manual_seed(0)
    sizes = {"one": 1, "odd": 1023, "full": 2048, "over": 2049, "many": 9000}
    weights = {
        f"{name}.{dtype}": torch.randn(size, generator=draw).to(dtype)
        for name, size in sizes.items()
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    }
    weights |= {"matrix": torch.randn(7, 5, 3, generator=draw), "scalar": torch.tensor(2.5)}
    save_file(weights | {"ids": torch.arange(4)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return weights


def test_staged_reads_are_what_safetensors_reads(
    stored: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged, "BUFFER_BYTES", 4096)
    header = read_header(tmp_path / "model.safetensors")
    assert header.keys() == stored.keys()
    expected = load_file(tmp_path / "model.safetensors")
    reader = StagedReader(CPU)
    with ThreadPoolExecutor(8) as pool:
        read = pool.map(reader.read, header.values())
        for name, tensor in zip(header, read, strict=True):
            assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name
    reader.close()


def test_a_file_that_became_shorter_is_named(stored: dict[str, torch.Tensor], tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    header = read_header(path)
    last = max(header.values(), key=lambda one: one.end)
    with path.open("r+b") as file:
        file.truncate(last.end - 1)
    reader = StagedReader(CPU)
    with pytest.raises(ValueError, match=r"model.safetensors ends at byte"):
        reader.read(last)
    reader.close()


def test_a_source_read_ahead_is_the_same_source(tiny_model: Callable[..., Path]) -> None:
    source = SafetensorsSource(tiny_model("llama", max_shard_size="100KB"), CPU)
    with ReadAhead(source.get, dict.fromkeys(source.shapes, 1), window=9, threads=3) as take:
        for name in source.shapes:
            assert torch.equal(take(name), source.get(name)), name


@pytest.mark.parametrize(
    ("family", "options"),
    [("llama", {}), ("mistral", {}), ("qwen2", {}), ("qwen2", {"tie": True}), ("qwen3", {})],
)
def test_models_ask_in_the_order_that_their_shapes_have(
    tiny_model: Callable[..., Path], family: str, options: dict[str, bool]
) -> None:
    """What is read ahead of a model is what it asks for next."""
    folder = tiny_model(family, **options)
    spec, asked = read_spec(folder), []
    weights = load_file(folder / "model.safetensors")

    def weight(name: str) -> torch.Tensor:
        asked.append(name)
        return weights[name]

    model_class = MODELS[spec.architecture]
    model_class(spec, weight, TorchMaths(choose_linear(torch.float32, CPU)), CPU)
    assert asked == list(model_class.weight_shapes(spec))
