"""Drafters with weights on fused maths and paged Triton attention, in Triton's interpreter, against the same
in torch operations, which tests/model/test_drafters.py holds against their authors' maths."""

import pytest
import torch
from drafter_reference import LAYER, VOCAB, Eagle1, Eagle3, enlarged, save
from drafter_rows import WIDTH, Rows
from tiny_models import make_tiny_model

from slipstream.loading.load import load_model, read_spec
from slipstream.speculation.eagle import load_eagle
from slipstream.speculation.eagle3 import load_eagle3
from slipstream.speculation.target import Target

LOADERS = {"eagle": load_eagle, "eagle3": load_eagle3}
DRAFTS = 2
# A prompt in one piece and one in two; then a draft that was wrong. Few: the interpreter takes its time.
STEPS = ({0: (5, 5), 1: (3, 0)}, {0: (2, 1), 1: (2, 2)})


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafters")
    torch.manual_seed(9)
    embed = torch.randn(VOCAB, LAYER["hidden_size"])
    aux = {"eagle_aux_hidden_state_layer_ids": [0, 1, 1], "draft_vocab_size": 100}
    save(folder / "eagle", LAYER, enlarged(Eagle1(embed, embed)).state_dict())
    save(folder / "eagle3", LAYER | aux, enlarged(Eagle3(embed)).state_dict())
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
        rows = Rows(target, LOADERS[method](str(folder / method), target), temperature=0.7)
        found.append([rows.step(lanes, DRAFTS) for lanes in STEPS])
    assert found[1] == found[0]
    assert all(len(drafts) == DRAFTS for step in found[0] for drafts in step.values())
