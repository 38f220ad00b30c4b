"""A tiny random model that has a tokenizer: every byte a token, so any text is a prompt and any output is
bytes.

Ids: 0 pad, 1 start, 2 end, 3 + b the byte b; 259 to 319 are logits that no token has.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

VOCAB = 320
BYTE_ZERO = 3
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_text_model(tiny_model: Callable[..., Path], adds_start: bool = False, **overrides: Any) -> Path:
    """A llama of tests/tiny_models.py and its tokenizer; adds_start: the tokenizer begins prompts with id
    1."""
    # The seed tells the folders of both tokenizers apart and changes no expectation.
    folder = tiny_model("llama", vocab_size=VOCAB, seed=int(adds_start), **overrides)
    return write_tokenizer(folder, adds_start)


def write_tokenizer(folder: Path, adds_start: bool = False) -> Path:
    """The tokenizer alone, in folder, which is returned."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=_byte_of)
    vocab = {char: BYTE_ZERO + _byte_of(char) for char in alphabet}
    special = {"<pad>": 0, "<s>": 1, "</s>": 2}
    tokenizer = Tokenizer(models.BPE(vocab={**special, **vocab}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    if adds_start:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": TEMPLATE,
        "pad_token": "<pad>",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def _byte_of(char: str) -> int:
    """The byte that a character of the byte-level alphabet stands for (Radford et al., 2019)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if ord(char) < 256:
        return ord(char)
    return [byte for byte in range(256) if byte not in printable][ord(char) - 256]


def ids_of(text: str) -> list[int]:
    return [BYTE_ZERO + byte for byte in text.encode()]
