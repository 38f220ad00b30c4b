"""torch.compile sees the forward pass as one graph. Dynamo alone is run here: no compiler is needed."""

import pytest
import torch

from slipstream.attention.paged_torch import PagedTorchAttention
from slipstream.attention.protocol import AttentionBatch
from slipstream.config.model import ModelSpec
from slipstream.layers.linear import choose_linear
from slipstream.loading import read_spec
from slipstream.loading.sources import SafetensorsSource
from slipstream.models.compiled import CompiledModel
from slipstream.models.maths_torch import TorchMaths
from slipstream.models.registry import MODELS

CPU = torch.device("cpu")


def forward(model, spec: ModelSpec, count: int):
    """One prompt of `count` tokens, through a pool of its own."""
    attention = PagedTorchAttention(model.attention, 16, model.activation_dtype, CPU)
    attention.allocate(9)
    place = torch.arange(count)
    lane = torch.zeros(1, dtype=torch.int64)
    batch = AttentionBatch(
        query_start_L1=torch.tensor([0, count], dtype=torch.int32),
        length_L=torch.tensor([count], dtype=torch.int32),
        position_T=place,
        slot_T=place + 16,
        row_L=lane,
        blocks_RB=torch.arange(1, 9, dtype=torch.int32)[None],
        query_len_L=torch.tensor([count]).numpy(),
        length_bound_L=torch.tensor([count]).numpy(),
        num_decode_lanes=0,
    )
    token_T = torch.randint(3, spec.vocab_size, (count,), generator=torch.Generator().manual_seed(count))
    with torch.inference_mode():
        return model.logits(model.forward(token_T, place, attention.bind(batch)))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_compiled_pass_gives_what_the_plain_one_gives_and_leaves_only_the_count_of_tokens_open(
    tiny_model, family
):
    folder = tiny_model(family)
    spec = read_spec(folder)
    source = SafetensorsSource(folder, CPU)
    # The linear layers of CUDA; those of a CPU are packed where no compiler looks.
    maths = TorchMaths(choose_linear(torch.bfloat16, CPU, refused="as on CUDA"))
    plain = MODELS[spec.architecture](spec, lambda name: source.get(name).bfloat16(), maths, CPU)
    torch._dynamo.reset()
    unknown: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[object]) -> object:
        unknown.append(sum(isinstance(each, torch.SymInt) for each in inputs))
        return graph.forward

    compiled = CompiledModel(plain, backend=backend)
    for count in (5, 17, 1, 40, 77, 1):
        assert torch.equal(forward(compiled, spec, count), forward(plain, spec, count))
    assert unknown == [2, 0], "counts of tokens and of positions, which are one; then a single token"
    assert compiled.linear_name.endswith("compiled")
