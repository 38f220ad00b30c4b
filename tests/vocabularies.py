"""Small vocabularies trained on Python's own documentation, as GGUF files and as oracles written out by
hand."""

from __future__ import annotations

import functools
import json
import pydoc_data.topics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import gguf
import regex
from gguf import TokenType
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

CORPUS = [text for text in pydoc_data.topics.topics.values()][:40]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SPACE = "\u2581"
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
# GPT-2's characters for bytes.
SPELLING = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(256 + i) for i, byte in enumerate(_OTHERS)}


@dataclass(frozen=True)
class Vocabulary:
    """tokens in id order; merges for byte-level BPE, scores for SentencePiece."""

    tokens: list[str]
    types: list[TokenType]
    merges: list[tuple[str, str]] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)

    def write(self, path: Path, model: str, **metadata: str | int | bool) -> Path:
        """A GGUF file without tensors. metadata: keys below tokenizer.ggml."""
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_tokenizer_model(model)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.merges:
            writer.add_token_merges([" ".join(merge) for merge in self.merges])
        if self.scores:
            writer.add_token_scores(self.scores)
        for key, value in metadata.items():
            kind = {str: gguf.GGUFValueType.STRING, bool: gguf.GGUFValueType.BOOL}.get(type(value))
            writer.add_key_value(f"tokenizer.ggml.{key}", value, kind or gguf.GGUFValueType.UINT32)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return path


@functools.cache
def byte_level(pattern: str, size: int = 900) -> Vocabulary:
    """A byte-level BPE whose text is split by pattern, with SPECIAL as its last tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    merges = _merges(tokenizer)
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    types = [TokenType.NORMAL] * len(tokens) + [TokenType.CONTROL] * len(SPECIAL)
    return Vocabulary(tokens + list(SPECIAL), types, merges)


@functools.cache
def sentencepiece(size: int = 700) -> Vocabulary:
    """A SentencePiece BPE as Llama 2's: unknown, start, end, 256 bytes, pieces whose score is minus their
    rank."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=size, show_progress=False))
    joined = ["".join(merge) for merge in _merges(tokenizer)]
    letters = sorted(set(tokenizer.get_vocab()) - set(joined))
    head = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL] + [TokenType.BYTE] * 256
    types += [TokenType.NORMAL] * (len(joined) + len(letters))
    scores = [0.0] * len(head) + [-float(rank) for rank in range(len(joined) + len(letters))]
    return Vocabulary(head + joined + letters, types, scores=scores)


def encode_bytes(text: str, vocabulary: Vocabulary, pattern: str) -> list[int]:
    """Byte-level BPE, written out: split, spell bytes as characters, merge the earliest merge there is."""
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    ranks = {merge: rank for rank, merge in enumerate(vocabulary.merges)}

    @functools.cache
    def merged(piece: str) -> list[str]:
        parts = [SPELLING[byte] for byte in piece.encode()]
        while pairs := [pair for pair in pairwise(parts) if pair in ranks]:
            parts = _join(parts, min(pairs, key=ranks.__getitem__))
        return parts

    parts = [part for piece in regex.findall(pattern, text) for part in merged(piece)]
    return [ids[part] for part in parts if part in ids]


def encode_pieces(text: str, vocabulary: Vocabulary) -> list[int]:
    """SentencePiece BPE as llama.cpp has it: join the neighbours whose piece scores best, leftmost first;
    what is no piece is spelled in bytes."""
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    parts = list(SPACE + text.replace(" ", SPACE)) if text else []
    while joined := [
        (vocabulary.scores[ids[a + b]], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ids
    ]:
        at = -max(joined)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    spelled = ([part] if part in ids else [f"<0x{byte:02X}>" for byte in part.encode()] for part in parts)
    return [ids[token] for tokens in spelled for token in tokens]


def _merges(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    stored: Sequence[Sequence[str]] = json.loads(tokenizer.to_str())["model"]["merges"]
    return [(left, right) for left, right in stored]


def _join(parts: list[str], merge: tuple[str, str]) -> list[str]:
    out: list[str] = []
    for part in parts:
        if out and (out[-1], part) == merge:
            out[-1] += part
        else:
            out.append(part)
    return out
