"""The memory plan against the driver, on a CUDA device, with a model that is nothing but its memory.

    python tests/gpu/check_memory.py [--utilization 0.5 0.95]

Products of one matrix stand for the model, so that weights, activations, graphs and the pool are all real;
the order is memory_cuda.py's. Prints the plan, what the driver reports and the difference; exit status 1
where it is over 1%, or where the pool leaves no room for what comes after it.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from slipstream.config.args import EngineArgs
from slipstream.config.model import ModelSpec, RopeSpec
from slipstream.config.resolve import resolve
from slipstream.engine.plan import device_facts
from slipstream.runner.memory import MIB, MemoryPlan, settle, size_kv_pool
from slipstream.runner.memory_cuda import CudaMemory

CUDA = torch.device("cuda")
WIDTH, LAYERS, TOKENS = 8192, 32, 8192
BLOCK_BYTES = 2 * LAYERS * 32 * 1024
SIZES = (TOKENS, 4096, 1024, 256, 64, 8, 1)
SPEC = ModelSpec(
    architecture="LlamaForCausalLM", vocab_size=128_000, hidden_size=64, intermediate_size=128,
    num_layers=LAYERS, num_heads=4, num_kv_heads=2, head_dim=16, rms_norm_eps=1e-5,
    rope=RopeSpec(theta=1e4, rotary_dim=16), max_model_len=131_072, windows=(None,) * LAYERS,
)
ERROR = 0.01


class Body:
    """Weights, a step of so many tokens, and its capture into one pool."""

    def __init__(self) -> None:
        self.weights = [torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16, device=CUDA) for _ in range(LAYERS)]
        self.stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()

    def forward(self, tokens: int) -> torch.Tensor:
        x = torch.ones(tokens, WIDTH, dtype=torch.bfloat16, device=CUDA)
        for weight in self.weights:
            x = torch.nn.functional.silu(x @ weight)
        return x.float()

    def step(self) -> None:
        with torch.cuda.stream(self.stream):
            self.forward(TOKENS)
        self.stream.synchronize()

    def capture(self, tokens: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        with torch.cuda.stream(self.stream):
            self.forward(tokens)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            out = self.forward(tokens)
        return graph, out


def plan_memory(body: Body, utilization: float) -> tuple[MemoryPlan, int]:
    """The plan as it came out, and the driver's count."""
    plan = resolve(
        EngineArgs(model="m", device="cuda", gpu_memory_utilization=utilization), SPEC, device_facts()
    )
    memory = CudaMemory(CUDA)
    memory.profile(body.step)
    memory.try_graphs([lambda: body.capture(SIZES[0]), lambda: body.capture(SIZES[1])], len(SIZES))
    # The trial's pool went with its graphs.
    body.pool = torch.cuda.graph_pool_handle()
    planned = size_kv_pool(plan, memory.measured(plan), BLOCK_BYTES)
    layer = (2, planned.num_blocks, BLOCK_BYTES // LAYERS // 2)
    pool = [torch.zeros(layer, dtype=torch.uint8, device=CUDA) for _ in range(LAYERS)]
    graphs, taken = memory.taken_by(lambda: [body.capture(size) for size in SIZES])
    body.step()
    for graph, _ in graphs:
        graph.replay()
    torch.cuda.synchronize()
    final, used = settle(planned, taken, memory.used()), memory.used()
    del graph, graphs, pool
    torch.cuda.empty_cache()
    return final, used


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--utilization", type=float, nargs="+", default=[0.5, 0.95])
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    body, wrong = Body(), 0
    for utilization in options.utilization:
        final, used = plan_memory(body, utilization)
        good = abs(final.error(used)) <= ERROR and final.total <= 1.01 * final.allowed
        wrong += not good
        verdict = "ok" if good else "FAILED"
        print(f"{utilization}: {final.describe()}; driver {used / MIB:,.0f} MiB, "
              f"{100 * final.error(used):+.2f}% {verdict}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
