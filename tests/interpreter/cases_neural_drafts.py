"""Drafters with weights on fused maths and paged Triton attention, in Triton's interpreter, against the same
in torch operations, which tests/model/test_drafters.py holds against their authors' maths."""

from dataclasses import replace

import pytest
import torch
from drafter_reference import LAYER, VOCAB, Eagle1, Eagle3, MedusaHeads, MlpStages, enlarged, save
from drafter_rows import DRAFTS, STEPS, WIDTH, Rows
from tiny_models import make_tiny_model

from slipstream.loading.load import load_model, read_spec
from slipstream.speculation.draft_model import load_draft_model
from slipstream.speculation.eagle import load_eagle
from slipstream.speculation.eagle3 import load_eagle3
from slipstream.speculation.medusa import load_medusa
from slipstream.speculation.mlp_speculator import load_mlp_speculator
from slipstream.speculation.target import Target

LOADERS = {
    "eagle": load_eagle, "eagle3": load_eagle3, "medusa": load_medusa, "mlp": load_mlp_speculator,
    "draft_model": load_draft_model,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafters")
    torch.manual_seed(9)
    embed = torch.randn(VOCAB, LAYER["hidden_size"])
    aux = {"eagle_aux_hidden_state_layer_ids": [0, 1, 1], "draft_vocab_size": 100}
    heads = {"num_heads": 3, "num_hidden_layers": 2, "original_lm_head": True}
    stages = {"emb_dim": LAYER["hidden_size"], "inner_dim": 48, "n_predict": 3}
    for name, config, module in (
        ("eagle", LAYER, Eagle1(embed, embed)),
        ("eagle3", LAYER | aux, Eagle3(embed)),
        ("medusa", heads, MedusaHeads(mapped=True)),
        ("mlp", stages, MlpStages()),
    ):
        save(folder / name, config, enlarged(module).state_dict())
    make_tiny_model(folder / "draft_model", "qwen3", seed=6)
    return folder, make_tiny_model(folder / "target", "llama")


@pytest.mark.parametrize("method", LOADERS)
def test_fused_drafts_are_those_of_torch_operations(folders, method):
    folder, model = folders
    spec, device = read_spec(model), torch.device("cpu")
    found = []
    for fused in (False, True):
        target = Target(
            model=load_model(model, spec, dtype=torch.float32, device=device, fused=fused), spec=spec,
            max_model_len=WIDTH, num_drafts=DRAFTS, dtype=torch.float32, device=device, fused=fused,
        )
        rows = Rows(target, LOADERS[method](str(folder / method), replace(target)), temperature=0.7)
        found.append([rows.step(lanes) for lanes in STEPS[:2]])
    assert found[1] == found[0]
    assert all(len(drafts) == DRAFTS for step in found[0] for drafts in step.values())
