"""Drafters as their authors publish them, in torch.nn, without a cache: every draft computes all anew. And
folders of random ones, in each public layout."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

HIDDEN, INNER, HEADS, KV_HEADS, VOCAB, EPS, THETA = 64, 96, 4, 2, 256, 1e-5, 10000.0
LAYER = {
    "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "vocab_size": VOCAB, "rms_norm_eps": EPS, "rope_theta": THETA,
    "max_position_embeddings": 64, "hidden_act": "silu", "model_type": "llama",
}


class Norm(nn.Module):
    """LlamaRMSNorm."""

    def __init__(self, size: int = HIDDEN) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.2 * torch.randn(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


class Attention(nn.Module):
    """LlamaAttention over whole sequences [S, inputs]."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        size = HIDDEN // HEADS
        self.q_proj = nn.Linear(inputs, HIDDEN, bias=False)
        self.k_proj = nn.Linear(inputs, KV_HEADS * size, bias=False)
        self.v_proj = nn.Linear(inputs, KV_HEADS * size, bias=False)
        self.o_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x_SX: Tensor) -> Tensor:
        size, length = HIDDEN // HEADS, len(x_SX)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (each(x_SX).view(length, -1, size).transpose(0, 1) for each in projections)
        angle = torch.arange(length)[:, None] / THETA ** (torch.arange(0, size, 2) / size)
        cos, sin = torch.cat((angle, angle), 1).cos(), torch.cat((angle, angle), 1).sin()

        def turn(x: Tensor) -> Tensor:
            return x * cos + torch.cat((-x[..., size // 2 :], x[..., : size // 2]), -1) * sin

        q, k, v = turn(q), *(y.repeat_interleave(HEADS // KV_HEADS, 0) for y in (turn(k), v))
        score = q @ k.transpose(1, 2) / math.sqrt(size)
        score = score.masked_fill(torch.ones(length, length).triu(1) > 0, -1e30)
        return self.o_proj((score.softmax(-1) @ v).transpose(0, 1).flatten(1))


class Mlp(nn.Module):
    """LlamaMLP."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(HIDDEN, INNER, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class EagleLayer(nn.Module):
    """cnets1.py's LlamaDecoderLayer: the first has no norm before attention."""

    def __init__(self, normed: bool) -> None:
        super().__init__()
        self.self_attn, self.mlp, self.post_attention_layernorm = Attention(HIDDEN), Mlp(), Norm()
        self.input_layernorm = Norm() if normed else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle1(nn.Module):
    """cnets1.py's Model; normed: the speculators library's, with layernorms. head: the target's."""

    def __init__(
        self, embed: Tensor, head: Tensor, *, layers: int = 1, normed: bool = False, bias: bool = False
    ) -> None:
        super().__init__()
        self.embed_VH, self.head_VH = embed, head
        self.fc = nn.Linear(2 * HIDDEN, HIDDEN, bias=bias)
        self.layers = nn.ModuleList(EagleLayer(normed or number > 0) for number in range(layers))
        self.embedding_layernorm, self.pre_lm_head_layernorm = (
            (Norm(), Norm()) if normed else (nn.Identity(), nn.Identity())
        )

    def fuse(self, feature_SX: Tensor) -> Tensor:
        return feature_SX

    def forward(self, token_S: Tensor, hidden_SH: Tensor) -> Tensor:
        x = self.fc(torch.cat((self.embedding_layernorm(self.embed_VH[token_S]), hidden_SH), -1))
        for layer in self.layers:
            x = layer(x)
        return x

    def scores(self, hidden_H: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and the target's id of each."""
        return self.pre_lm_head_layernorm(hidden_H) @ self.head_VH.T, torch.arange(VOCAB)


class Eagle3(nn.Module):
    """cnets.py's Model, and the speculators library's with norm_before_residual."""

    def __init__(self, embed: Tensor, *, draft_vocab: int = 100, norm_before_residual: bool = False) -> None:
        super().__init__()
        self.embed_VH, self.before = embed, norm_before_residual
        self.fc = nn.Linear(3 * HIDDEN, HIDDEN, bias=False)
        self.midlayer = nn.Module()
        self.midlayer.self_attn, self.midlayer.mlp = Attention(2 * HIDDEN), Mlp()
        for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
            setattr(self.midlayer, name, Norm())
        self.norm, self.lm_head = Norm(), nn.Linear(HIDDEN, draft_vocab, bias=False)
        kept = torch.randperm(len(embed))[:draft_vocab].sort().values
        self.register_buffer("d2t", kept - torch.arange(draft_vocab))
        self.register_buffer("t2d", torch.zeros(len(embed), dtype=torch.bool).index_fill_(0, kept, True))

    def fuse(self, feature_SX: Tensor) -> Tensor:
        return self.fc(feature_SX)

    def forward(self, token_S: Tensor, hidden_SH: Tensor) -> Tensor:
        layer, normed = self.midlayer, self.midlayer.hidden_norm(hidden_SH)
        x = normed if self.before else hidden_SH
        x = x + layer.self_attn(torch.cat((layer.input_layernorm(self.embed_VH[token_S]), normed), -1))
        return x + layer.mlp(layer.post_attention_layernorm(x))

    def scores(self, hidden_H: Tensor) -> tuple[Tensor, Tensor]:
        return self.lm_head(self.norm(hidden_H)), torch.arange(len(self.d2t)) + self.d2t


class MedusaHeads(nn.Module):
    """medusa_model.py's heads, as vLLM names them. mapped: one small head for all, with a token_map."""

    def __init__(
        self, heads: int = 3, depth: int = 2, mapped: bool = False, vocab: int = VOCAB, kept: int = 80
    ) -> None:
        super().__init__()
        self.depth, self.mapped = depth, mapped
        self.blocks = nn.ModuleList(nn.Module() for _ in range(heads))
        for block in self.blocks:
            block.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(depth))
        if mapped:
            self.lm_head = nn.Linear(HIDDEN, kept, bias=False)
            self.register_buffer("token_map", torch.randperm(vocab)[:kept])
        else:
            self.lm_heads = nn.ModuleList(nn.Linear(HIDDEN, vocab, bias=False) for _ in range(heads))

    def draft(self, hidden_H: Tensor) -> list[int]:
        found = []
        for number, block in enumerate(self.blocks):
            x = hidden_H
            for layer in block.layers:
                x = x + F.silu(layer(x))
            best = (self.lm_head if self.mapped else self.lm_heads[number])(x).argmax()
            found.append(int(self.token_map[best] if self.mapped else best))
        return found


class MlpStages(nn.Module):
    """fms-extras' MLPSpeculator, which vLLM's mlp_speculator.py follows."""

    def __init__(
        self, stages: int = 3, inner: int = 48, tied: bool = False, scale_input: bool = False,
        vocab: int = VOCAB,
    ) -> None:
        super().__init__()
        self.scale_input, own = scale_input, 1 if tied else stages
        self.emb = nn.ModuleList([nn.Embedding(vocab, inner) for _ in range(own)] * (stages // own))
        first, rest = nn.Linear(HIDDEN, inner, bias=False), nn.Linear(inner, inner, bias=False)
        more = [rest if tied else nn.Linear(inner, inner, bias=False) for _ in range(stages - 1)]
        self.proj = nn.ModuleList([first, *more])
        self.head = nn.ModuleList([nn.Linear(inner, vocab, bias=False) for _ in range(own)] * (stages // own))
        self.ln = nn.ModuleList([Norm(inner) for _ in range(own)] * (stages // own))
        for norm in self.ln:
            norm.bias = nn.Parameter(0.3 * torch.randn(inner))
        self.state_weight = 0.5 ** (0.5 / stages)
        self.emb_weight = math.sqrt((1 - self.state_weight**2) * (inner / 2))

    def draft(self, token: int, hidden_H: Tensor) -> list[int]:
        def unit(x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

        found, state = [token], unit(hidden_H) / 2**0.5 if self.scale_input else hidden_H
        for emb, proj, head, ln in zip(self.emb, self.proj, self.head, self.ln, strict=True):
            state = proj(state) + emb.weight[found[-1]] * (self.emb_weight / self.state_weight)
            state = F.gelu(ln.weight * unit(state) + ln.bias)
            found.append(int(head(state).argmax()))
        return found[1:]


def enlarged(module: nn.Module) -> nn.Module:
    """With weights so large that no two logits are near each other."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.randn_like(parameter) * (1.0 if "emb." in name else 0.2))
    return module.eval().requires_grad_(False)


def save(
    folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], file: str = "model.safetensors"
) -> Path:
    """A drafter's folder; the file's ending says in which format."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file)
    else:
        torch.save(tensors, folder / file)
    return folder


def make_drafters(folder: Path, drafts: int, vocab: int = VOCAB) -> dict[str, Path]:
    """A folder of random weights for each method that has some, for targets of this hidden size and
    vocabulary with four layers; but for draft models, which are any model. vocab: VOCAB or few tokens."""
    torch.manual_seed(2)
    embed, most = torch.randn(vocab, HIDDEN), 3 * vocab // 4
    layer, drawn, kept = LAYER | {"vocab_size": vocab}, min(100, most), min(80, most)
    aux = {"draft_vocab_size": drawn, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    heads = {"num_heads": drafts, "num_hidden_layers": 2, "original_lm_head": True}
    stages = {"emb_dim": HIDDEN, "inner_dim": 48, "n_predict": drafts}
    made = {
        "eagle": (layer, Eagle1(embed, embed)),
        "eagle3": (layer | aux, Eagle3(embed, draft_vocab=drawn)),
        "medusa": (heads, MedusaHeads(drafts, mapped=True, vocab=vocab, kept=kept)),
        "mlp_speculator": (stages, MlpStages(drafts, vocab=vocab)),
    }
    return {name: save(folder / name, c, enlarged(net).state_dict()) for name, (c, net) in made.items()}
