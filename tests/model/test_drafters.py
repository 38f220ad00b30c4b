"""Drafters with weights propose what their authors' code does, computed anew for each draft by
drafter_reference.py from the hidden states that transformers gives. Steps are chunked, verified in part, and
of several rows; what a rejected draft left in the pool is not seen."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drafter_reference import (
    HIDDEN,
    LAYER,
    VOCAB,
    Eagle1,
    Eagle3,
    MedusaHeads,
    MlpStages,
    enlarged,
    save,
)
from drafter_rows import DRAFTS, STEPS, TEXTS, WIDTH, Rows

from slipstream.kernels.noise import PURPOSE_TOKEN, gumbel_cost, lane_keys
from slipstream.loading.load import load_model, read_spec
from slipstream.speculation.draft_model import load_draft_model
from slipstream.speculation.eagle import load_eagle
from slipstream.speculation.eagle3 import load_eagle3
from slipstream.speculation.medusa import load_medusa
from slipstream.speculation.mlp_speculator import load_mlp_speculator
from slipstream.speculation.target import Target

AUX = [1, 2, 3]


@pytest.fixture(scope="module")
def target_folder(tiny_model) -> Path:
    return tiny_model("llama", num_hidden_layers=4, rms_norm_eps=1e-5)


@pytest.fixture(scope="module")
def reference(target_folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def target(target_folder) -> Target:
    spec, device = read_spec(target_folder), torch.device("cpu")
    model = load_model(target_folder, spec, dtype=torch.float32, device=device)
    return Target(
        model=model, spec=spec, max_model_len=WIDTH, num_drafts=DRAFTS, dtype=torch.float32, device=device
    )


def check_all_steps(rows: Rows, expected: Callable[[int, int], list[int]]) -> None:
    """expected: the drafts of a row at a length."""
    for lanes in STEPS:
        for row, drafts in rows.step(lanes).items():
            assert drafts == expected(row, int(rows.columns["length"][row])), (lanes, row)


@torch.no_grad()
def states(reference, row: int, length: int) -> tuple[torch.Tensor, ...]:
    """transformers' hidden states of all tokens but the newest: into each layer, and the last normed."""
    out = reference(TEXTS[row : row + 1, : length - 1], output_hidden_states=True)
    return tuple(state[0] for state in out.hidden_states)


@torch.no_grad()
def eagle_drafts(head, reference, aux: list[int], heat: float, row: int, length: int) -> list[int]:
    """As the authors draft, without their tree. heat: the row's temperature."""
    found = states(reference, row, length)
    hidden_SH = head.fuse(torch.cat([found[layer] for layer in aux], 1) if aux else found[-1])
    token_S, drafts = TEXTS[row, 1:length], []
    for number in range(DRAFTS):
        out_SH = head(token_S, hidden_SH)
        logits_D, ids_D = head.scores(out_SH[-1])
        if heat:
            seeds = (torch.tensor([value], dtype=torch.int32) for value in (7 + row, 0))
            key = lane_keys(*seeds, torch.tensor([length + number], dtype=torch.int32), PURPOSE_TOKEN)
            logits_D = logits_D / heat - gumbel_cost(key, ids_D.int())[0].log()
        drafts.append(int(ids_D[logits_D.argmax()]))
        token_S = torch.cat((token_S, torch.tensor(drafts[-1:])))
        hidden_SH = torch.cat((hidden_SH, out_SH[-1:]))
    return drafts


def shared(reference) -> tuple[torch.Tensor, torch.Tensor]:
    return reference.model.embed_tokens.weight.detach(), reference.lm_head.weight.detach()


def renamed(tensors, *pairs):
    for ours, theirs in pairs:
        tensors = {name.replace(ours, theirs): tensor for name, tensor in tensors.items()}
    return tensors


SPECULATORS = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}]}
EAGLE_FORMS = {
    "authors": {},
    "authors-bias-two-layers": {"layers": 2, "bias": True},
    "speculators": {"normed": True},
}


@pytest.mark.parametrize("form", EAGLE_FORMS)
def test_eagle_drafts_as_published(form, target, reference, tmp_path):
    torch.manual_seed(1)
    options = EAGLE_FORMS[form]
    head = enlarged(Eagle1(*shared(reference), **options))
    tensors, config = head.state_dict(), {**LAYER, "num_hidden_layers": options.get("layers", 1)}
    if form == "speculators":
        tensors = renamed(tensors, ("fc.", "fusion_fc."), ("layers.0.", "transformer."))
        config = {
            "speculators_model_type": "eagle", "transformer_layer_config": LAYER, "layernorms": True,
            "speculators_config": SPECULATORS,
        }
    else:
        tensors["embed_tokens.weight"] = shared(reference)[0]
    file = "model.safetensors" if form == "speculators" else "pytorch_model.bin"
    drafter = load_eagle(str(save(tmp_path / "eagle", config, tensors, file)), target)
    check_all_steps(Rows(target, drafter), lambda row, n: eagle_drafts(head, reference, [], 0.0, row, n))


@pytest.mark.parametrize("heat", [0.0, 0.8])
@pytest.mark.parametrize("before", [False, True])
def test_eagle3_drafts_as_published_and_with_the_samplers_noise(heat, before, target, reference, tmp_path):
    torch.manual_seed(2)
    head = enlarged(Eagle3(shared(reference)[0], norm_before_residual=before))
    tensors, more = head.state_dict(), {"draft_vocab_size": 100, "eagle_aux_hidden_state_layer_ids": AUX}
    config = {**LAYER, **more}
    if before:
        tensors = renamed(tensors, ("midlayer.", "layers.0."))
        config = {
            "speculators_model_type": "eagle3", "transformer_layer_config": LAYER,
            "norm_before_residual": True, "speculators_config": SPECULATORS, **more,
        }
    file = "model.safetensors" if before else "pytorch_model.bin"
    drafter = load_eagle3(str(save(tmp_path / "eagle3", config, tensors, file)), target)
    assert drafter.aux_layers == tuple(AUX)
    rows = Rows(target, drafter, heat)
    check_all_steps(rows, lambda row, n: eagle_drafts(head, reference, AUX, heat, row, n))


@pytest.mark.parametrize("form", ["authors", "vllm"])
def test_medusa_heads_draft_as_published(form, target, reference, tmp_path):
    torch.manual_seed(3)
    heads = enlarged(MedusaHeads(heads=4, mapped=form == "vllm"))
    tensors = heads.state_dict()
    config = {
        "model_type": "medusa", "hidden_size": HIDDEN, "vocab_size": VOCAB, "num_heads": 4,
        "num_hidden_layers": 2, "original_lm_head": True, "truncated_vocab_size": 80,
    }
    file = "model.safetensors"
    if form == "authors":
        config, file = {"medusa_num_heads": 4, "medusa_num_layers": 2}, "medusa_lm_head.pt"
        tensors = {
            "{}.{}.linear.{}".format(*name.split(".")[1::2], name.split(".")[-1]) if "blocks" in name
            else f"{name.split('.')[1]}.2.weight": tensor
            for name, tensor in tensors.items()
        }
        assert {"0.0.linear.weight", "3.1.linear.bias", "2.2.weight"} <= tensors.keys()
    drafter = load_medusa(str(save(tmp_path / "medusa", config, tensors, file)), target)
    check_all_steps(
        Rows(target, drafter), lambda row, n: heads.draft(states(reference, row, n)[-1][-1])[:DRAFTS]
    )


@pytest.mark.parametrize("tied,scaled", [(False, False), (True, True)])
def test_mlp_speculators_chain_states_as_published(tied, scaled, target, reference, tmp_path):
    torch.manual_seed(4)
    stages = enlarged(MlpStages(tied=tied, scale_input=scaled))
    config = {
        "model_type": "mlp_speculator", "emb_dim": HIDDEN, "inner_dim": 48, "n_predict": 3,
        "vocab_size": VOCAB, "tie_weights": tied, "scale_input": scaled,
    }
    tensors = renamed(stages.state_dict(), ("", "")) if tied else {
        f"speculator.{name}": tensor for name, tensor in stages.state_dict().items()
    }
    drafter = load_mlp_speculator(str(save(tmp_path / "mlp", config, tensors)), target)
    check_all_steps(
        Rows(target, drafter),
        lambda row, n: stages.draft(int(TEXTS[row, n - 1]), states(reference, row, n)[-1][-1]),
    )


@pytest.mark.parametrize("most", [256, 20])
def test_a_draft_model_writes_its_own_text_up_to_its_own_context(most, target, tiny_model):
    from transformers import AutoModelForCausalLM

    folder = tiny_model("qwen3", max_position_embeddings=most, seed=6)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def expected(row: int, length: int) -> list[int]:
        text = TEXTS[row : row + 1, :length]
        for _ in range(max(0, min(DRAFTS, most + 1 - length))):
            text = torch.cat((text, model(text).logits[:, -1:].argmax(-1)), 1)
        return text[0, length:].tolist()

    check_all_steps(Rows(target, load_draft_model(str(folder), target)), expected)


def test_a_plain_step_keeps_a_drafter_up_to_date(target, reference, tmp_path):
    torch.manual_seed(7)
    head = enlarged(Eagle3(shared(reference)[0]))
    config = {**LAYER, "draft_vocab_size": 100, "eagle_aux_hidden_state_layer_ids": AUX}
    rows = Rows(target, load_eagle3(str(save(tmp_path / "e", config, head.state_dict())), target))
    assert rows.step({0: (9, 9)}, drafts=0) == {0: []}
    assert rows.step({0: (1, 1)}, drafts=0) == {0: []}
    assert rows.step({0: (1, 1)}, drafts=2) == {0: eagle_drafts(head, reference, AUX, 0.0, 0, 12)[:2]}


def test_what_does_not_fit_is_refused_by_name(target, reference, tmp_path):
    torch.manual_seed(8)
    head = Eagle3(shared(reference)[0])
    good = {**LAYER, "draft_vocab_size": 100, "eagle_aux_hidden_state_layer_ids": AUX}
    tensors = head.state_dict()
    wide = {**tensors, "fc.weight": torch.zeros(HIDDEN, 2 * HIDDEN)}
    far = {**tensors, "d2t": tensors["d2t"] + VOCAB}
    without = {name: tensor for name, tensor in tensors.items() if name != "d2t"}
    cases = [
        (good, wide, "fc.weight has shape"),
        (good, far, "d2t names tokens outside"),
        (good, without, "the tensor d2t is missing"),
        (good, {**tensors, "input_norm.weight": torch.ones(3)}, "unexpected tensors: input_norm.weight"),
        ({**good, "eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, tensors, "the model has 4 layers"),
        ({**good, "num_hidden_layers": 2}, tensors, "num_hidden_layers=2"),
        ({**good, "draft_vocab_size": VOCAB + 1}, tensors, "draft_vocab_size=257"),
    ]
    for number, (config, stored, text) in enumerate(cases):
        folder = save(tmp_path / str(number), config, stored)
        with pytest.raises(ValueError, match=text):
            load_eagle3(str(folder), target)
    few = {"medusa_num_heads": 2, "medusa_num_layers": 1}
    with pytest.raises(ValueError, match="2 heads give no 3 drafts"):
        load_medusa(str(save(tmp_path / "few", few, {"x": torch.ones(1)})), target)
    folder = save(tmp_path / "code", few, {}, "medusa_lm_head.pt")
    torch.save({"0.0.linear.weight": print}, folder / "medusa_lm_head.pt")
    with pytest.raises(ValueError, match=r"medusa_lm_head\.pt cannot be read"):
        load_medusa(str(folder), target)


@pytest.mark.parametrize("method", ["eagle", "eagle3", "medusa", "mlp"])
def test_random_weights_need_no_more_than_a_config(method, target, tmp_path):
    configs = {
        "eagle": LAYER,
        "eagle3": {
            **LAYER, "draft_vocab_size": 100,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
        },
        "medusa": {"medusa_num_heads": 3, "medusa_num_layers": 1},
        "mlp": {"emb_dim": HIDDEN, "inner_dim": 0, "n_predict": 3},
    }
    load = {
        "eagle": load_eagle, "eagle3": load_eagle3, "medusa": load_medusa, "mlp": load_mlp_speculator,
    }[method]
    (tmp_path / "config.json").write_text(json.dumps(configs[method]))
    drafter = load(str(tmp_path), replace(target, load_format="dummy"))
    assert drafter.aux_layers == ((1, 2, 3) if method == "eagle3" else ())
    found = Rows(target, drafter).step({0: (9, 9), 1: (6, 0)})
    assert len(found[0]) == DRAFTS
    assert all(0 <= token < (100 if method == "eagle3" else VOCAB) for token in found[0])
