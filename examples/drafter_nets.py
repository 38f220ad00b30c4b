"""The drafters that train_drafter.py trains, under the tensor names of their public layouts, with what each
is trained to say.

Legend: B texts, S positions, H hidden size, D draft vocabulary, N positions picked, V vocabulary, I inner
size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPS = 1e-5
DECAY = 0.8  # of a draft's weight in the loss, by the place it has
PICKED = 4096  # positions a batch for heads over the whole vocabulary


class Texts:
    """A batch. token_BS: int64. states: of the target: what goes into each layer, and at the end the normed
    state that its logits are made from. spoken_BS: bool, tokens that the target wrote. embed_VH: its
    embedding, which is its head too."""

    def __init__(
        self, token_BS: Tensor, states: tuple[Tensor, ...], spoken_BS: Tensor, embed_VH: Tensor
    ) -> None:
        self.token_BS, self.states, self.spoken_BS, self.embed_VH = token_BS, states, spoken_BS, embed_VH


def soft_loss(logits: Tensor, teacher: Tensor) -> Tensor:
    """Cross entropy of each position against the target's own distribution."""
    return -(teacher.float().softmax(-1) * logits.float().log_softmax(-1)).sum(-1)


class Attention(nn.Module):
    """q, k and v of chains: chain i begins at position i, and its j-th link stands at i + j. A link sees the
    first links of all chains up to its own, and the links of its own."""

    def __init__(self, config: dict[str, Any], inputs: int) -> None:
        super().__init__()
        hidden, self.size = config["hidden_size"], config["head_dim"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.theta, self.groups = config["rope_theta"], heads // kv_heads
        self.q_proj = nn.Linear(inputs, heads * self.size, bias=False)
        self.k_proj = nn.Linear(inputs, kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(inputs, kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(heads * self.size, hidden, bias=False)

    def forward(self, x_BSX: Tensor, links: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Appends its own keys and values to links."""
        q, k, v = (self._heads(project(x_BSX)) for project in (self.q_proj, self.k_proj, self.v_proj))
        place = len(links)
        q, k = self._turn(q, place), self._turn(k, place)
        links.append((k.repeat_interleave(self.groups, 1), v.repeat_interleave(self.groups, 1)))
        first_k, first_v = links[0]
        if place == 0:
            out = F.scaled_dot_product_attention(q, first_k, first_v, is_causal=True)
            return self.o_proj(out.transpose(1, 2).flatten(2))
        length = q.shape[2]
        later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu_(1)
        scores = [(q @ first_k.transpose(2, 3)).masked_fill(later, -torch.inf)]
        scores += [(q * key).sum(-1, keepdim=True) for key, _ in links[1:]]
        shares = (torch.cat(scores, -1).float() / math.sqrt(self.size)).softmax(-1).to(q.dtype)
        out = shares[..., :length] @ first_v
        for number, (_, value) in enumerate(links[1:]):
            out = out + shares[..., length + number, None] * value
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, x_BSN: Tensor) -> Tensor:
        return x_BSN.unflatten(-1, (-1, self.size)).transpose(1, 2)

    def _turn(self, x: Tensor, offset: int) -> Tensor:
        position = torch.arange(x.shape[2], device=x.device)[:, None] + offset
        angle = position / self.theta ** (torch.arange(0, self.size, 2, device=x.device) / self.size)
        cos, sin = torch.cat((angle, angle), 1).cos(), torch.cat((angle, angle), 1).sin()
        half = self.size // 2
        return (x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin).to(x.dtype)


class Mlp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MidLayer(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.self_attn = Attention(config, 2 * hidden)
        self.mlp = Mlp(hidden, config["intermediate_size"])
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            nn.RMSNorm(hidden, EPS) for _ in range(3)
        )


class Eagle3(nn.Module):
    """EAGLE-3 with the loss of its paper's training-time test: chains of `links` drafts, each fed the state
    that the link before it made. kept_D: the target's ids that drafts may be."""

    def __init__(self, config: dict[str, Any], kept_D: Tensor, aux: tuple[int, ...], links: int) -> None:
        super().__init__()
        hidden, size = config["hidden_size"], len(kept_D)
        self.aux, self.links = aux, links
        self.fc, self.midlayer = nn.Linear(len(aux) * hidden, hidden, bias=False), MidLayer(config)
        self.norm, self.lm_head = nn.RMSNorm(hidden, EPS), nn.Linear(hidden, size, bias=False)
        mask_V = torch.zeros(config["vocab_size"], dtype=torch.bool)
        self.register_buffer("d2t", kept_D - torch.arange(size))
        self.register_buffer("t2d", mask_V.index_fill_(0, kept_D, True))

    def losses(self, texts: Texts) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each place in the chain: loss, and how often the likeliest draft is the target's likeliest."""
        layer, kept_D = self.midlayer, self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)
        head_DH = texts.embed_VH[kept_D]
        keys: list[tuple[Tensor, Tensor]] = []
        state_BSH = self.fc(torch.cat([texts.states[index] for index in self.aux], -1)).float()
        length = texts.token_BS.shape[1]
        for place in range(self.links):
            # Position i reads token i + 1 + place and speaks of the one after it.
            token_BS = _ahead(texts.token_BS, 1 + place)
            embed_BSH = layer.input_layernorm(F.embedding(token_BS, texts.embed_VH))
            joined = torch.cat((embed_BSH, layer.hidden_norm(state_BSH)), -1)
            state_BSH = state_BSH + layer.self_attn(joined, keys)
            state_BSH = state_BSH + layer.mlp(layer.post_attention_layernorm(state_BSH))
            wanted_BS = _ahead(texts.spoken_BS, 2 + place)
            wanted_BS[:, max(length - 2 - place, 0) :] = False
            picked = wanted_BS.flatten().nonzero()[:, 0]
            teacher_NH = _ahead(texts.states[-1], 1 + place).flatten(0, 1)[picked]
            logits_ND = self.lm_head(self.norm(state_BSH.flatten(0, 1)[picked]))
            yield _scored(logits_ND, teacher_NH, head_DH, kept_D, texts.embed_VH)


class FirstLayer(nn.Module):
    """Without a norm before attention."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.self_attn, self.mlp = Attention(config, hidden), Mlp(hidden, config["intermediate_size"])
        self.post_attention_layernorm = nn.RMSNorm(hidden, EPS)


class Eagle(nn.Module):
    """EAGLE with the target's own head, trained on chains of its own states as EAGLE-3 is."""

    def __init__(self, config: dict[str, Any], links: int) -> None:
        super().__init__()
        hidden, self.links = config["hidden_size"], links
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([FirstLayer(config)])

    def losses(self, texts: Texts) -> Iterator[tuple[Tensor, Tensor]]:
        picked, layer = _pick(texts, self.links), self.layers[0]
        keys: list[tuple[Tensor, Tensor]] = []
        last_BSH = texts.states[-1]
        state_BSH = last_BSH.float()
        for place in range(self.links):
            embed_BSH = F.embedding(_ahead(texts.token_BS, 1 + place), texts.embed_VH)
            state_BSH = self.fc(torch.cat((embed_BSH, state_BSH), -1)).float()
            state_BSH = state_BSH + layer.self_attn(state_BSH, keys)
            state_BSH = state_BSH + layer.mlp(layer.post_attention_layernorm(state_BSH))
            teacher_NH = _ahead(last_BSH, 1 + place).flatten(0, 1)[picked]
            logits_NV = F.linear(state_BSH.flatten(0, 1)[picked], texts.embed_VH)
            yield _scored(logits_NV, teacher_NH, texts.embed_VH)


class MedusaHeads(nn.Module):
    """Medusa-1 with one block a head and the target's own head over the vocabulary."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Module() for _ in range(heads))
        for block in self.blocks:
            block.layers = nn.ModuleList([nn.Linear(hidden, hidden, bias=False)])
            nn.init.zeros_(block.layers[0].weight)

    def losses(self, texts: Texts) -> Iterator[tuple[Tensor, Tensor]]:
        picked = _pick(texts, len(self.blocks))
        last_BSH = texts.states[-1]
        for place, block in enumerate(self.blocks):
            state_NH = last_BSH.flatten(0, 1)[picked]
            state_NH = state_NH + F.silu(block.layers[0](state_NH))
            teacher_NH = _ahead(last_BSH, 1 + place).flatten(0, 1)[picked]
            yield _scored(F.linear(state_NH, texts.embed_VH), teacher_NH, texts.embed_VH)


class MlpStages(nn.Module):
    """IBM's MLP speculator with one set of weights for all stages but the first projection."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        inner, self.stages = config["inner_dim"], config["n_predict"]
        self.emb = nn.ModuleList([nn.Embedding(config["vocab_size"], inner)])
        first, rest = nn.Linear(config["emb_dim"], inner, bias=False), nn.Linear(inner, inner, bias=False)
        self.proj = nn.ModuleList([first, rest])
        self.head = nn.ModuleList([nn.Linear(inner, config["vocab_size"], bias=False)])
        self.ln = nn.ModuleList([nn.Module()])
        self.ln[0].weight = nn.Parameter(torch.ones(inner))
        self.ln[0].bias = nn.Parameter(torch.zeros(inner))
        for weight in (self.emb[0].weight, rest.weight):
            nn.init.normal_(weight, std=1 / math.sqrt(inner))
        nn.init.normal_(first.weight, std=1 / math.sqrt(config["emb_dim"]))
        state_weight = 0.5 ** (0.5 / self.stages)
        self.token_weight = math.sqrt((1 - state_weight**2) * (inner / 2)) / state_weight

    def losses(self, texts: Texts) -> Iterator[tuple[Tensor, Tensor]]:
        picked, norm = _pick(texts, self.stages), self.ln[0]
        last_BSH = texts.states[-1]
        state_NI = _unit(last_BSH.flatten(0, 1)[picked].float()) / math.sqrt(2)
        for place in range(self.stages):
            token_N = _ahead(texts.token_BS, 1 + place).flatten()[picked]
            mixed_NI = self.proj[min(place, 1)](state_NI) + self.token_weight * self.emb[0](token_N)
            state_NI = F.gelu(norm.weight * _unit(mixed_NI.float()) + norm.bias)
            teacher_NH = _ahead(last_BSH, 1 + place).flatten(0, 1)[picked]
            yield _scored(self.head[0](state_NI), teacher_NH, texts.embed_VH)


class CutModel(nn.Module):
    """A causal language model of few layers, to be like the whole one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def losses(self, texts: Texts) -> Iterator[tuple[Tensor, Tensor]]:
        picked = _pick(texts, 0)
        state_BSH = self.model.model(texts.token_BS).last_hidden_state
        logits_NV = F.linear(state_BSH.flatten(0, 1)[picked], texts.embed_VH)
        yield _scored(logits_NV, texts.states[-1].flatten(0, 1)[picked], texts.embed_VH)


def _scored(
    logits_ND: Tensor, teacher_NH: Tensor, head_DH: Tensor, kept_D: Tensor | None = None,
    embed_VH: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Mean loss against the target's distribution over the drafter's vocabulary, and the share of positions
    where the likeliest draft is the target's likeliest token (of its whole vocabulary)."""
    with torch.no_grad():
        teacher_ND = F.linear(teacher_NH, head_DH)
        best_N = teacher_ND.argmax(-1) if embed_VH is None else F.linear(teacher_NH, embed_VH).argmax(-1)
        draft_N = logits_ND.argmax(-1)
        right_N = (draft_N if kept_D is None else kept_D[draft_N]) == best_N
    return soft_loss(logits_ND, teacher_ND).mean(), right_N.float().mean()


def _ahead(x_BS: Tensor, places: int) -> Tensor:
    """What stands `places` further on, along the second axis; what falls off comes back in front."""
    return x_BS.roll(-places, 1)


def _pick(texts: Texts, places: int) -> Tensor:
    """Some positions, flat, at which all the next 1 + places tokens are the target's own."""
    wanted_BS = torch.ones_like(texts.spoken_BS)
    for place in range(1, 2 + places):
        wanted_BS = wanted_BS & _ahead(texts.spoken_BS, place)
    wanted_BS[:, wanted_BS.shape[1] - 1 - places :] = False
    found = wanted_BS.flatten().nonzero()[:, 0]
    return found[torch.randperm(len(found), device=found.device)[:PICKED]]


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
