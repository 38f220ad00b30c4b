"""One tokenizer for both formats: a Hugging Face folder or a GGUF file, behind the tokenizers library.

transformers is imported only for a folder whose class it must interpret; it takes seconds, and brings torch.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from slipstream.loading.gguf_file import GGUFFile, is_gguf, open_gguf
from slipstream.loading.gguf_vocab import build_tokenizer
from slipstream.loading.templates import GGUF_KEY, default_template

# Classes that add nothing to tokenizer.json; transformers rebuilds the others in ways of its own.
_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend", "Qwen2Tokenizer", "Qwen2TokenizerFast")
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """Text to ids and back. Methods may be called from several threads.

    vocab_size: ids the vocabulary has; a model's logits may be padded beyond. special_ids: what
    skip_special_tokens leaves out. end_token_ids: the vocabulary's own; the model's spec may name more.
    special_tokens: name (bos_token, ...) to text, for chat templates. chat_template: the model's own, Jinja
    source.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, special_tokens: dict[str, str], chat_template: str | None,
        extra_end_ids: Sequence[int] = (),
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = special_tokens
        self.chat_template = chat_template
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self._added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in self._added.items() if token.special)
        self.bos_token_id = self._named_id("bos_token")
        ends = (self._named_id("eos_token"), *extra_end_ids)
        self.end_token_ids = tuple(dict.fromkeys(end for end in ends if end is not None))
        self._bytes_of = _byte_rule(backend.decoder)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. add_special_tokens: with the start and end tokens that the model was trained
        with."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(
        self,
        ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Text of ids; ids beyond the vocabulary are left out. Bytes that are no UTF-8 (yet) become U+FFFD.

        spaces_between_special_tokens acts only on vocabularies without a decoder of their own, which join
        tokens by spaces; all supported families have one and never put a space.
        """
        if spaces_between_special_tokens or self._backend.decoder is not None:
            text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
            return text
        return "".join(self._backend.decode([i], skip_special_tokens=skip_special_tokens) for i in ids)

    def is_special(self, text: str) -> bool:
        """Whether a text is one special token."""
        return self._backend.token_to_id(text) in self.special_ids

    def to_json(self) -> str:
        """All of it in the tokenizers library's own form."""
        text: str = self._backend.to_str()
        return text

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """The vocabulary's own spelling of each id; empty for an id beyond it."""
        return [self._backend.id_to_token(i) or "" for i in ids]

    def token_bytes(self, token: int) -> bytes | None:
        """The bytes a token stands for in the middle of a text, whole characters or not. None where that
        depends on other tokens, so in vocabularies that are neither byte-level nor SentencePiece's: use
        decode with the tokens before it. Empty for an id beyond the vocabulary."""
        if self._bytes_of is None:
            return None
        return self._bytes_of(self._backend.id_to_token(token) or "")

    def _named_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)


def load_tokenizer(path: str | Path, field: str = "tokenizer") -> Tokenizer:
    """path: a Hugging Face folder, a GGUF file or a tokenizer.json. Raises ValueError that names what is
    missing or unsupported; field: what gave the path."""
    path = Path(path).expanduser()
    if path.is_dir():
        return _from_folder(path)
    if not path.exists():
        raise ValueError(f"{field}={str(path)!r}: no such folder or file")
    if is_gguf(path):
        return _from_gguf(open_gguf(path))
    if path.suffix == ".json":
        return Tokenizer(_from_json(path), {}, None)
    raise ValueError(f"tokenizer={str(path)!r}: must be a folder, a GGUF file or a tokenizer.json")


def _from_gguf(file: GGUFFile) -> Tokenizer:
    tokens = file.need("tokenizer.ggml.tokens")
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: file.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    special = {name: tokens[index] for name, index in ids.items() if index is not None}
    turn_end = file.get("tokenizer.ggml.eot_token_id")
    template = file.get(GGUF_KEY)
    return Tokenizer(build_tokenizer(file), special, template, () if turn_end is None else (turn_end,))


def _from_folder(folder: Path) -> Tokenizer:
    config_file, file = folder / "tokenizer_config.json", folder / "tokenizer.json"
    config: dict[str, Any] = json.loads(config_file.read_text("utf-8")) if config_file.exists() else {}
    plain = config.get("tokenizer_class", _PLAIN_CLASSES[0]) in _PLAIN_CLASSES
    if file.exists() and plain and not config.get("add_bos_token") and not config.get("add_eos_token"):
        special = {name: _text(config[name]) for name in _NAMED if config.get(name)}
        return Tokenizer(_from_json(file), special, _template(folder, config))
    return _from_transformers(folder)


def _from_json(file: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no narrower type
        raise ValueError(f"{file} cannot be read: {error}") from None


def _from_transformers(folder: Path) -> Tokenizer:
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(f"tokenizer={str(folder)!r}: {error}") from None
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        name = type(loaded).__name__
        raise ValueError(f"tokenizer={str(folder)!r}: {name} is written in Python only: not supported")
    special = {name: str(value) for name in _NAMED if (value := getattr(loaded, name, None)) is not None}
    template = loaded.chat_template
    return Tokenizer(backend, special, template.get("default") if isinstance(template, dict) else template)


def _template(folder: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja, else the config's; of several named ones, the default."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text("utf-8")
    return default_template(config)


def _text(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _byte_rule(decoder: tokenizers.decoders.Decoder | None) -> Callable[[str], bytes] | None:
    """From a token's spelling to its bytes, where a decoder joins tokens byte by byte."""
    if decoder is None:
        return None
    state = json.loads(decoder.__getstate__())
    listed: list[dict[str, Any]] = state.get("decoders", [state])
    steps = {step["type"]: step for step in listed}
    if len(steps) < len(listed):
        return None
    if steps.keys() == {"ByteLevel"}:
        return _byte_level_bytes
    replaced = steps.get("Replace", {}).get("pattern", {}).get("String")
    space = replaced or steps.get("Metaspace", {}).get("replacement")
    # Strip takes the space from the start of a text; a token in its middle keeps it.
    if space and steps.keys() <= {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}:
        return functools.partial(_piece_bytes, space, "ByteFallback" in steps)
    return None


def _byte_level_bytes(spelled: str) -> bytes:
    alphabet = _byte_alphabet()
    if all(char in alphabet for char in spelled):
        return bytes(alphabet[char] for char in spelled)
    return spelled.encode()  # an added token, spelled as it is


def _piece_bytes(space: str, byte_fallback: bool, spelled: str) -> bytes:
    if byte_fallback and (byte := _BYTE_TOKEN.fullmatch(spelled)) is not None:
        return bytes([int(byte[1], 16)])
    return spelled.replace(space, " ").encode()


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """Character to byte in byte-level vocabularies (Radford et al., 2019): printable Latin-1 bytes stand for
    themselves, the others for the characters from U+0100 on, in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
