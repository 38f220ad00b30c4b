"""Trains drafters for a model on text that the model writes itself: an EAGLE-3 layer, Medusa heads, an MLP
speculator, a draft model that is a few of its own layers, and, if asked for, an EAGLE layer.

    python examples/train_drafter.py --model FOLDER --out drafters
    slipstream serve FOLDER --speculative-config \\
        '{"method": "eagle3", "model": "drafters/eagle3", "num_speculative_tokens": 3}'

Each drafter gets a share of --seconds and is written as a folder in its public layout, in bfloat16, with
training.json beside it: how it was made, and how often its drafts were the model's own choice on prompts that
were held out. The draft model carries the model's whole embedding and is as large as that.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from drafter_nets import CutModel, Eagle, Eagle3, MedusaHeads, MlpStages, Texts
from safetensors.torch import save_file
from torch import Tensor, nn
from training_prompts import make_prompts

# Shares of the time for training; the first three fit 20 MB together in bfloat16.
SHARES = {"eagle3": 4, "medusa": 2, "mlp_speculator": 2, "draft_model": 2, "eagle": 3}
USUAL = ("eagle3", "medusa", "mlp_speculator", "draft_model")
DECAY = 0.8
HELD_OUT_PROMPTS = 256
LONGEST = 2048  # tokens of a prompt and its answer, before they are cut to --length
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
              "generation_config.json")  # fmt: skip


@dataclass(frozen=True)
class Spoken:
    """A prompt and the model's answer. start: where the answer begins."""

    tokens: list[int]
    start: int


def parse(words: list[str]) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--model", required=True, help="folder of the model, tied embeddings, Llama's layout")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--methods", nargs="+", choices=SHARES, default=list(USUAL))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=300, help="of training, all drafters together")
    parser.add_argument("--prompts", type=int, default=12_000)
    parser.add_argument("--answer", type=int, default=256, help="most tokens of an answer")
    parser.add_argument("--length", type=int, default=512, help="most tokens of a text")
    parser.add_argument("--batch", type=int, default=32, help="texts a step")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate at its height")
    parser.add_argument("--links", type=int, default=3, help="drafts in a row, for each method")
    parser.add_argument("--draft-vocab", type=int, default=3072, help="tokens that EAGLE-3 may draft")
    parser.add_argument("--eagle3-inner", type=int, default=768, help="its and EAGLE's feed-forward size")
    parser.add_argument("--mlp-inner", type=int, default=32, help="the MLP speculator's inner size")
    parser.add_argument("--cut", type=int, nargs="+", default=[0, -1], help="layers of the draft model")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(words)


def speak(args: argparse.Namespace, prompts: list[str], seed: int) -> list[Spoken]:
    """Answers of this engine, half of them greedy and half drawn."""
    from slipstream import LLM, SamplingParams

    llm = LLM(args.model, max_model_len=LONGEST, device=args.device, gpu_memory_utilization=0.5)
    turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
    params = [
        SamplingParams(max_tokens=args.answer, temperature=number % 2 * 0.8, seed=seed + number)
        for number in range(len(turns))
    ]
    outputs = llm.chat(turns, params, use_tqdm=False)
    llm.close()
    asked = [len(out.prompt_token_ids) for out in outputs]
    return [
        Spoken([*out.prompt_token_ids, *out.outputs[0].token_ids][: args.length], start)
        for out, start in zip(outputs, asked, strict=True)
        if start < args.length - args.links - 2
    ]


class Target:
    """The model, frozen; gives Texts with its hidden states."""

    def __init__(self, args: argparse.Namespace) -> None:
        from transformers import AutoModelForCausalLM

        dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
        self.model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(args.device).eval()
        self.model.requires_grad_(False)
        self.config, self.device = self.model.config, args.device
        if not self.config.tie_word_embeddings:
            raise SystemExit("this example is for models whose head is their embedding")
        self.embed_VH = self.model.get_input_embeddings().weight

    @torch.no_grad()
    def read(self, spoken: list[Spoken]) -> Texts:
        width = max(len(each.tokens) for each in spoken)
        token_BS = torch.zeros(len(spoken), width, dtype=torch.int64)
        spoken_BS = torch.zeros(len(spoken), width, dtype=torch.bool)
        for row, each in enumerate(spoken):
            token_BS[row, : len(each.tokens)] = torch.tensor(each.tokens)
            spoken_BS[row, each.start : len(each.tokens)] = True
        token_BS, spoken_BS = token_BS.to(self.device), spoken_BS.to(self.device)
        # What pads a text stands behind it, and attention is causal.
        states = self.model.model(token_BS, output_hidden_states=True, use_cache=False).hidden_states
        return Texts(token_BS, states, spoken_BS, self.embed_VH)


def batches(spoken: list[Spoken], size: int, seed: int) -> Iterator[list[Spoken]]:
    """For ever: texts of like length together, in a new order each time round."""
    draw = random.Random(seed)
    while True:
        ordered = sorted(spoken, key=lambda each: len(each.tokens) + draw.random() * 32)
        groups = [ordered[first : first + size] for first in range(0, len(ordered), size)]
        draw.shuffle(groups)
        yield from groups


def train(
    net: nn.Module, target: Target, spoken: list[Spoken], seconds: float, args: argparse.Namespace
) -> int:
    """AdamW with a warm start and a cosine to nought over `seconds`. Returns the steps done."""
    weights = [weight for weight in net.parameters() if weight.requires_grad]
    optimiser = torch.optim.AdamW(weights, lr=args.rate, betas=(0.9, 0.95), weight_decay=0.01)
    start, steps, said = time.monotonic(), 0, 0.0
    for group in batches(spoken, args.batch, args.seed):
        share = (time.monotonic() - start) / seconds
        if share >= 1:
            break
        half_turn = torch.cos(torch.tensor(share * torch.pi)).item()
        for options in optimiser.param_groups:
            options["lr"] = args.rate * min(1.0, (steps + 1) / 50) * (0.5 + 0.5 * half_turn)
        with torch.autocast(args.device, torch.bfloat16, enabled=args.device == "cuda"):
            found = list(net.losses(target.read(group)))  # type: ignore[operator]
            loss = sum(loss * DECAY**place for place, (loss, _) in enumerate(found))
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimiser.step()
        steps += 1
        if share >= said:
            said += 0.1
            right = " ".join(f"{right.item():.3f}" for _, right in found)
            print(f"  {share:4.0%} step {steps} loss {loss.item():.3f} right {right}", flush=True)
    return steps


@torch.no_grad()
def agreement(net: nn.Module, target: Target, spoken: list[Spoken], args: argparse.Namespace) -> list[float]:
    """How often each draft is the model's own choice where all tokens before it are the text's."""
    sums: list[list[float]] = []
    for first in range(0, len(spoken), args.batch):
        with torch.autocast(args.device, torch.bfloat16, enabled=args.device == "cuda"):
            found = net.losses(target.read(spoken[first : first + args.batch]))  # type: ignore[operator]
            sums.append([right.item() for _, right in found])
    return [round(sum(column) / len(sums), 4) for column in zip(*sums, strict=True)]


def frequent(spoken: list[Spoken], size: int, vocab: int) -> Tensor:
    """The tokens that answers hold most often, ascending."""
    said = torch.cat([torch.tensor(each.tokens[each.start :]) for each in spoken])
    counts = torch.bincount(said, minlength=vocab)
    kept = counts.argsort(descending=True)[:size]
    print(f"  {size} tokens are {counts[kept].sum() / counts.sum():.1%} of the answers")
    return kept.sort().values


Made = tuple[nn.Module, dict[str, Any]]


def layer_config(target: Target, args: argparse.Namespace) -> dict[str, Any]:
    """Of one Llama layer as wide as the model's."""
    model = target.config
    return {
        "model_type": "llama", "num_hidden_layers": 1,
        "hidden_size": model.hidden_size, "intermediate_size": args.eagle3_inner,
        "num_attention_heads": model.num_attention_heads, "num_key_value_heads": model.num_key_value_heads,
        "head_dim": model.hidden_size // model.num_attention_heads, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "rope_theta": model.rope_parameters["rope_theta"],
        "max_position_embeddings": model.max_position_embeddings, "vocab_size": model.vocab_size,
        "tie_word_embeddings": False,
    }  # fmt: skip


def make_eagle(target: Target, spoken: list[Spoken], args: argparse.Namespace) -> Made:
    config = {"architectures": ["LlamaForCausalLM"], **layer_config(target, args)}
    return Eagle(config, args.links), config


def make_eagle3(target: Target, spoken: list[Spoken], args: argparse.Namespace) -> Made:
    model, layers = target.config, target.config.num_hidden_layers
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], **layer_config(target, args),
        "draft_vocab_size": args.draft_vocab,
    }  # fmt: skip
    kept_D = frequent(spoken, args.draft_vocab, model.vocab_size)
    aux = (2, layers // 2, layers - 3)
    if layers < 6:
        aux = (0, layers // 2, layers - 1)
        config["eagle_aux_hidden_state_layer_ids"] = list(aux)
    net = Eagle3(config, kept_D, aux, args.links)
    net.lm_head.weight.data.copy_(target.embed_VH[kept_D.to(target.device)])
    return net, config


def make_medusa(target: Target, spoken: list[Spoken], args: argparse.Namespace) -> Made:
    model = target.config
    config = {
        "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size, "truncated_vocab_size": model.vocab_size, "num_heads": args.links,
        "num_hidden_layers": 1, "medusa_fc_bias": False, "original_lm_head": True,
    }  # fmt: skip
    return MedusaHeads(model.hidden_size, args.links), config


def make_mlp(target: Target, spoken: list[Spoken], args: argparse.Namespace) -> Made:
    model = target.config
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator",
        "emb_dim": model.hidden_size, "inner_dim": args.mlp_inner, "n_predict": args.links,
        "n_candidates": 5, "top_k_tokens_per_head": [1] * args.links, "vocab_size": model.vocab_size,
        "tie_weights": True, "scale_input": True,
    }  # fmt: skip
    return MlpStages(config), config


def make_cut(target: Target, spoken: list[Spoken], args: argparse.Namespace) -> Made:
    """Some of the model's layers between its own embedding and its last norm."""
    from transformers import AutoModelForCausalLM

    fields = {**target.config.to_dict(), "num_hidden_layers": len(args.cut)}
    config = target.config.__class__.from_dict(fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    own, whole = model.model, target.model.model
    own.embed_tokens.load_state_dict(whole.embed_tokens.state_dict())
    own.norm.load_state_dict(whole.norm.state_dict())
    for place, layer in enumerate(args.cut):
        own.layers[place].load_state_dict(whole.layers[layer].state_dict())
    own.embed_tokens.requires_grad_(False)
    return CutModel(model), config.to_dict()


MAKERS: dict[str, Callable[[Target, list[Spoken], argparse.Namespace], Made]] = {
    "eagle3": make_eagle3, "medusa": make_medusa, "mlp_speculator": make_mlp, "draft_model": make_cut,
    "eagle": make_eagle,
}  # fmt: skip


def write(folder: Path, name: str, net: nn.Module, config: dict[str, Any], args: argparse.Namespace) -> int:
    """The folder, whole. Returns the bytes of its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(net, CutModel):
        net.model.to(torch.bfloat16).save_pretrained(folder)
        for file in TEXT_FILES:
            if (Path(args.model) / file).exists():
                shutil.copy(Path(args.model) / file, folder / file)
    else:
        (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}, indent=2) + "\n")
        tensors = {
            key: tensor.to("cpu", torch.bfloat16 if tensor.is_floating_point() else tensor.dtype).contiguous()
            for key, tensor in net.state_dict().items()
        }
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return (folder / "model.safetensors").stat().st_size


def main(words: list[str]) -> None:
    args, begun = parse(words), time.monotonic()
    torch.manual_seed(args.seed)
    seen, kept = (
        speak(args, make_prompts(count, held_out=held_out, seed=args.seed), args.seed)
        for count, held_out in ((args.prompts, False), (min(HELD_OUT_PROMPTS, args.prompts), True))
    )
    tokens = sum(len(each.tokens) - each.start for each in seen)
    print(f"{tokens} tokens of {len(seen)} answers in {time.monotonic() - begun:.0f} s", flush=True)
    target = Target(args)
    total = sum(SHARES[name] for name in args.methods)
    for name in args.methods:
        print(f"{name}:", flush=True)
        net, config = MAKERS[name](target, seen, args)
        net.to(args.device)
        seconds = args.seconds * SHARES[name] / total
        steps = train(net, target, seen, seconds, args)
        right = agreement(net, target, kept, args)
        size = write(args.out / name, name, net, config, args)
        facts = {
            "command": " ".join(["python", *sys.argv]), "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if args.device == "cuda" else args.device,
            "seconds": seconds, "steps": steps, "texts": len(seen), "tokens": tokens,
            "held_out_texts": len(kept), "held_out_agreement": right, "bytes": size,
        }  # fmt: skip
        (args.out / name / "training.json").write_text(json.dumps(facts, indent=2) + "\n")
        print(f"  {steps} steps in {seconds:.0f} s; held out {right}; {size / 1e6:.1f} MB", flush=True)
    print(f"all in {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
