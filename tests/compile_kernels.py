"""python tests/compile_kernels.py MODEL KIND: Triton's front end on every kernel that bucketed steps of an
engine launch, for a Hopper GPU that need not be there. Prints how many they are."""

import dataclasses
import functools
import gc
import json
import sys
import weakref
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from drafter_reference import HIDDEN, LAYER, VOCAB, Eagle1, Eagle3, MedusaHeads, MlpStages, save

from slipstream.kernels import backend, precompile

HOPPER = precompile._NoDevice(90)
HOPPER.get_current_stream = lambda device: 0
import_module("triton.runtime.driver").driver.set_active(HOPPER)
# Before the launchers take these by name: tensors of a CPU stand for a GPU's.
backend.use_triton = lambda tensor: True
backend.pdl_options = lambda tensor: {"PDL": True, "launch_pdl": True}

from slipstream.config.args import EngineArgs  # noqa: E402
from slipstream.engine.plan import make_plan  # noqa: E402
from slipstream.runner.bucket_tick import BucketTick  # noqa: E402
from slipstream.runner.build import make_bucketed, make_parts  # noqa: E402
from slipstream.runner.shapes import Shape  # noqa: E402
from slipstream.speculation.build import build_drafter  # noqa: E402


def drafters(folder: Path, model: str) -> list[dict[str, object]]:
    """Speculation by every method whose drafter has weights."""
    layer = LAYER | {"draft_vocab_size": 100, "eagle_aux_hidden_state_layer_ids": [0, 1, 1]}
    stages = {"n_predict": 3, "inner_dim": 48, "emb_dim": HIDDEN, "vocab_size": VOCAB}
    embed = torch.randn(VOCAB, HIDDEN)
    made = {
        "eagle": (layer, Eagle1(embed, embed)),
        "eagle3": (layer, Eagle3(embed)),
        "medusa": ({"medusa_num_heads": 3, "medusa_num_layers": 2}, MedusaHeads()),
        "mlp_speculator": (stages, MlpStages()),
    }
    for method, (config, module) in made.items():
        save(folder / method, config, module.state_dict())
    chosen = {method: str(folder / method) for method in made} | {"draft_model": model}
    return [{"method": name, "model": at, "num_speculative_tokens": 3} for name, at in chosen.items()]


def launches_of(model: str, kind: str, drafting: dict[str, object] | None) -> list[str]:
    plan = make_plan(
        EngineArgs(
            model=model, device="cpu", dtype="bfloat16", max_model_len=128, max_num_seqs=40,
            num_gpu_blocks_override=4, max_num_batched_tokens=240 if drafting else 64,
            speculative_config=drafting,
        )
    )
    plan = dataclasses.replace(
        plan, attention_backend="triton", graph_sizes=(1, 8, 16, 32), token_buckets=(32, 64),
        kv_cache_dtype="fp8" if kind == "float8" else "bfloat16", batch_invariant=kind == "invariant",
        compile_mode="stock_torch_compile" if kind == "compiled" else "none",
    )
    parts = make_parts(plan, torch.device("cpu"), build_drafter)
    made = make_bucketed(parts)
    made.attention.allocate(2)
    shapes, tick = made.shapes.all(), made.tick
    with torch.inference_mode():
        launches = precompile.list_launches(functools.partial(tick.launch_each_kind, shapes))
        if kind != "compiled":
            whole = precompile.list_launches(functools.partial(launch_all, tick, shapes))
            # Else a graph's capture would be the first to launch a kernel.
            assert set(whole) == set(launches), "layers alike launch what others do not"
    left = weakref.ref(tick)
    del parts, made, tick
    assert left() is None, "an engine's memory waits for a collection of cycles"
    return launches


def launch_all(tick: BucketTick, shapes: list[Shape]) -> None:
    tick._table.door.launch(tick._table.arena)
    for shape in shapes:
        tick.launch(shape)


def to_ttir(launch: str) -> None:
    """The first stage: Python to Triton's own representation, with all its checks of types."""
    described = json.loads(launch)
    data = json.loads(described["data"])
    kernel = getattr(import_module(described["module"]), data["name"].rpartition(".")[2])
    compiler, stop = import_module("triton.compiler.compiler"), RuntimeError("far enough")

    class Stages(dict):
        def __setitem__(self, name, stage):
            if name != "ttir":
                stage = halt
            super().__setitem__(name, stage)

    def halt(*_):
        raise stop

    make_backend = compiler.make_backend

    def with_halting_stages(target):
        found = make_backend(target)
        add = found.add_stages
        found.add_stages = lambda stages, *rest: (add(table := Stages(), *rest), stages.update(table))
        return found

    compiler.make_backend = with_halting_stages
    try:
        kernel.preload(described["data"])
    except RuntimeError as error:
        if error is not stop:
            raise
    finally:
        compiler.make_backend = make_backend


if __name__ == "__main__":
    model, kind = sys.argv[1:3]
    gc.disable()
    with TemporaryDirectory() as folder:
        ways: list[dict[str, object] | None] = [None]
        if kind == "drafts":
            ways = [{"method": "ngram", "num_speculative_tokens": 5}]
        elif kind == "drafters":
            ways = [*drafters(Path(folder), model)]
        found = dict.fromkeys(launch for way in ways for launch in launches_of(model, kind, way))
    for launch in found:
        to_ttir(launch)
    print(len(found), "kernels")
