"""What examples/train_drafter.py trains is what the published modules compute, and on prompts that are not
held out."""

import sys
from pathlib import Path

import drafter_reference as published
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import drafter_nets
import training_prompts

LENGTH, SPOKEN, DRAFTS, AUX = 9, 3, 3, (1, 2, 3)


@pytest.fixture
def texts():
    torch.manual_seed(0)
    states = tuple(torch.randn(1, LENGTH, published.HIDDEN) for _ in range(5))
    spoken = torch.arange(LENGTH)[None] >= SPOKEN
    token = torch.randint(0, published.VOCAB, (1, LENGTH))
    return drafter_nets.Texts(token, states, spoken, torch.randn(published.VOCAB, published.HIDDEN))


@pytest.fixture
def scored(monkeypatch):
    """Logits and the target's states of every draft whose loss is taken."""
    found = []

    def keep(logits, teacher, *_):
        found.append((logits.detach(), teacher))
        return logits.sum(), logits.sum()

    monkeypatch.setattr(drafter_nets, "_scored", keep)
    return found


def test_each_link_of_a_trained_chain_is_the_published_layers_output(texts, scored):
    """Link j of the chain from i reads the text's own token, and its parents' states; it speaks of token
    i + 2 + j, which must be the answer's, and is held against the target's state before that."""
    config = {**published.LAYER, "head_dim": published.HIDDEN // published.HEADS}
    kept = torch.randperm(published.VOCAB)[:100].sort().values
    net = published.enlarged(drafter_nets.Eagle3(config, kept, AUX, DRAFTS))
    head = published.enlarged(published.Eagle3(texts.embed_VH))
    head.load_state_dict(net.state_dict())
    list(net.losses(texts))
    token_S, fused = texts.token_BS[0], head.fuse(torch.cat([texts.states[layer][0] for layer in AUX], 1))
    for place, (logits, teacher) in enumerate(scored):
        starts = range(max(SPOKEN - 2 - place, 0), LENGTH - 2 - place)
        for found, state, start in zip(logits, teacher, starts, strict=True):
            out_H = published_link(head, token_S, fused, start, place)
            torch.testing.assert_close(found, head.scores(out_H)[0], atol=1e-4, rtol=1e-4)
            assert torch.equal(state, texts.states[-1][0, start + 1 + place])


def published_link(head, token_S, feature_SH, start, place):
    """The state of link `place` in the chain from position `start`."""
    hidden = feature_SH[: start + 1]
    for link in range(place + 1):
        out = head(token_S[1 : start + 2 + link], hidden)
        hidden = torch.cat((hidden, out[-1:]))
    return out[-1]


def test_a_trained_eagle_layer_is_the_published_one_on_the_last_states(texts, scored):
    config = {**published.LAYER, "head_dim": published.HIDDEN // published.HEADS}
    net = published.enlarged(drafter_nets.Eagle(config, DRAFTS))
    head = published.enlarged(published.Eagle1(texts.embed_VH, texts.embed_VH))
    head.load_state_dict(net.state_dict())
    torch.manual_seed(3)
    list(net.losses(texts))
    torch.manual_seed(3)
    picked = drafter_nets._pick(texts, DRAFTS)
    last_SH = texts.states[-1][0]
    for place, (logits, teacher) in enumerate(scored):
        for found, state, start in zip(logits, teacher, picked.tolist(), strict=True):
            out_H = published_link(head, texts.token_BS[0], last_SH, start, place)
            torch.testing.assert_close(found, head.scores(out_H)[0], atol=1e-3, rtol=1e-4)
            assert torch.equal(state, last_SH[start + 1 + place])


def test_heads_are_trained_on_the_token_that_they_draft(texts, scored):
    """Head k reads the state that gave token i + 1, and speaks of token i + 2 + k."""
    heads = drafter_nets.MedusaHeads(published.HIDDEN, DRAFTS)
    torch.manual_seed(3)
    list(heads.losses(texts))
    torch.manual_seed(3)
    picked = drafter_nets._pick(texts, DRAFTS)
    assert sorted(picked.tolist()) == list(range(SPOKEN - 1, LENGTH - 1 - DRAFTS))
    for place, (logits, teacher) in enumerate(scored):
        # A block of noughts changes nothing: the logits are those of the state that it reads.
        expected = texts.states[-1][0, picked] @ texts.embed_VH.T
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        assert torch.equal(teacher, texts.states[-1][0, picked + 1 + place])


def test_no_passage_or_subject_is_both_trained_on_and_held_out():
    seen, held_out = (training_prompts.make_prompts(400, held_out=kind) for kind in (False, True))
    assert len(set(seen)) == len(set(held_out)) == 400

    def quoted(prompts):
        return {prompt.split("\n\n", 1)[1] for prompt in prompts if "\n\n" in prompt}

    assert quoted(seen) and quoted(held_out) and not quoted(seen) & quoted(held_out)
