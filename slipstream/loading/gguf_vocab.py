"""The vocabulary in a GGUF file's metadata, as a tokenizer of the tokenizers library. No torch.

tokenizer.ggml.model says how pieces join: gpt2 (byte-level BPE with merges, split first by
tokenizer.ggml.pre) or llama (SentencePiece BPE by scores, unknown characters as bytes). transformers' own
GGUF reader ignores `pre`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from slipstream.loading.gguf_file import GGUFFile

Splits = Callable[[], list[pre_tokenizers.PreTokenizer]]

_KEY = "tokenizer.ggml."
_SPACE = "\u2581"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def _byte_level(use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _by_regex(pattern: str) -> Splits:
    return lambda: [pre_tokenizers.Split(Regex(pattern), "isolated"), _byte_level(use_regex=False)]


def _by_digit() -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.Digits(individual_digits=True), _byte_level(use_regex=True)]


# tokenizer.ggml.pre -> what splits the text before merges.
_PRE: dict[str, Splits] = {
    "gpt-2": lambda: [_byte_level(use_regex=True)],
    "smollm": _by_digit,
    "qwen2": _by_regex(_CONTRACTIONS + _WORDS + r"\p{N}|" + _MARKS),
    "llama-bpe": _by_regex(_CONTRACTIONS + _WORDS + r"\p{N}{1,3}|" + _MARKS),
}
_PRE |= {"llama3": _PRE["llama-bpe"], "llama-v3": _PRE["llama-bpe"]}
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")


def build_tokenizer(file: GGUFFile) -> Tokenizer:
    """Raises ValueError that names what is missing or unsupported."""
    model = file.need(_KEY + "model")
    tokens: list[str] = file.need(_KEY + "tokens")
    types = file.get(_KEY + "token_type", [TokenType.NORMAL] * len(tokens))
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ValueError(f"{file.path}: {_KEY}tokens holds a token twice")
    if model == "gpt2":
        tokenizer = _byte_level_bpe(file, vocab)
    elif model == "llama":
        tokenizer = _sentencepiece_bpe(file, tokens, vocab, types)
    else:
        raise file.unsupported(f"{_KEY}model {model!r}", ("gpt2", "llama"))
    added = (TokenType.CONTROL, TokenType.USER_DEFINED)
    tokenizer.add_tokens([
        AddedToken(token, special=kind == TokenType.CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True) if kind in added
    ])
    _add_ends(file, tokenizer, tokens, model)
    return tokenizer


def _byte_level_bpe(file: GGUFFile, vocab: dict[str, int]) -> Tokenizer:
    pre = file.need(_KEY + "pre")
    if pre not in _PRE:
        raise file.unsupported(f"{_KEY}pre {pre!r}", _PRE)
    merges = [tuple(merge.split(" ", 1)) for merge in file.need(_KEY + "merges")]
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=pre in _LLAMA3))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_PRE[pre]())
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece_bpe(
    file: GGUFFile, tokens: list[str], vocab: dict[str, int], types: list[int]
) -> Tokenizer:
    scores: list[float] = file.need(_KEY + "scores")
    unknown = tokens[types.index(TokenType.UNKNOWN)] if TokenType.UNKNOWN in types else None
    joined = [i for i, kind in enumerate(types) if kind in (TokenType.NORMAL, TokenType.USER_DEFINED)]
    merges = _merges_of_scores([(tokens[i], scores[i]) for i in joined], vocab)
    byte_fallback = TokenType.BYTE in types
    tokenizer = Tokenizer(
        BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=byte_fallback)
    )
    prefix = file.get(_KEY + "add_space_prefix", True)
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    tokenizer.normalizer = normalizers.Sequence(([normalizers.Prepend(_SPACE)] if prefix else []) + spaces)
    steps: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if prefix else []))
    return tokenizer


def _merges_of_scores(pieces: list[tuple[str, float]], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """SentencePiece joins the pair whose piece scores best: every way to make a piece, best piece first."""
    ways = [
        (score, len(piece[:cut]), len(piece[cut:]), piece[:cut], piece[cut:])
        for piece, score in pieces for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    ways.sort(key=lambda way: way[:3], reverse=True)
    return [(left, right) for *_, left, right in ways]


def _add_ends(file: GGUFFile, tokenizer: Tokenizer, tokens: list[str], model: str) -> None:
    """What encode adds around a text. Where the file does not say: a start token for SentencePiece and Llama
    3."""
    default = model == "llama" or file.get(_KEY + "pre") in _LLAMA3
    wanted = (("bos", default), ("eos", False))
    ids = {
        name: file.get(f"{_KEY}{name}_token_id") for name, otherwise in wanted
        if file.get(f"{_KEY}add_{name}_token", otherwise)
    }
    special = [(tokens[index], index) for index in ids.values() if index is not None]
    if special:
        before, after = (f"{tokens[ids[name]]} " if ids.get(name) is not None else "" for name, _ in wanted)
        template = f"{before}$A {after}".strip()
        tokenizer.post_processor = processors.TemplateProcessing(template, special_tokens=special)
