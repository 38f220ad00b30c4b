"""Tokenizers of both formats against transformers' own and against algorithms written out, on texts of many
kinds."""

from __future__ import annotations

import pydoc_data.topics
import subprocess
import sys
import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest
import regex
from gguf import TokenType
from transformers import AutoTokenizer, LlamaTokenizer, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter
from vocabularies import Vocabulary, byte_level, encode_bytes, encode_pieces, sentencepiece

from slipstream.loading.gguf_file import GGUFFile
from slipstream.text.tokenizer import Tokenizer, load_tokenizer

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = TikTokenConverter().pattern
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

TEXTS = [
    "", " ", "\n\n\t ", "Hello, world!", "it's  I'LL we've  DON'T", "12345 3.14159 0x7f 1e-05 ²³ ½ Ⅷ",
    "naïve café e\u0301 Straße İstanbul", "日本語のテキストと한국어 그리고 中文。", "ภาษาไทยไม่มีช่องว่าง",
    "العربية עברית", "👩\u200d👩\u200d👧 🇺🇳 👍🏽 ☃️", "a\u200bb\u00a0c\ufeffd", "\x00\x01\x7f",
    "<|im_start|>user\nhi<|im_end|>", "<|im_start|><|im_end|>", "<|im_start",
    "def f(x):\n\treturn x  # twice\r\n\r\n", "x" * 300, "  leading and trailing  ",
    *[text[:700] for text in list(pydoc_data.topics.topics.values())[:16]],
    Path(sys.modules["json"].__file__).read_text()[:2000],
]


@pytest.fixture(scope="module")
def folder_tokenizer(demo_model) -> Tokenizer:
    return load_tokenizer(demo_model.folder)


@pytest.fixture(scope="module")
def gguf_tokenizer(demo_model) -> Tokenizer:
    return load_tokenizer(demo_model.gguf)


@pytest.fixture(scope="module")
def theirs(demo_model):
    return AutoTokenizer.from_pretrained(demo_model.folder)


@pytest.mark.parametrize("source", ["folder_tokenizer", "gguf_tokenizer"])
def test_ids_and_text_are_those_of_transformers(source: str, theirs, request) -> None:
    ours = request.getfixturevalue(source)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs(text).input_ids
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
        assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)


def test_digits_are_split_one_by_one(gguf_tokenizer) -> None:
    assert len(gguf_tokenizer.encode("1234567890")) == 10


def test_the_real_vocabulary_agrees_with_bpe_written_out(demo_model, gguf_tokenizer: Tokenizer) -> None:
    """Digits(individual_digits) takes every decimal digit out before GPT-2's split sees the rest."""
    file = GGUFFile(demo_model.gguf)
    merges = [tuple(merge.split(" ")) for merge in file.need("tokenizer.ggml.merges")]
    vocabulary = Vocabulary(file.need("tokenizer.ggml.tokens"), [], merges)
    for text in TEXTS:
        if "<|" not in text:
            digits_apart = regex.split(r"(\p{N})", text)
            wanted = [i for part in digits_apart for i in encode_bytes(part, vocabulary, GPT2)]
            assert gguf_tokenizer.encode(text) == wanted


@pytest.mark.parametrize(
    ("pre", "pattern"), [("gpt-2", GPT2), ("qwen2", QWEN2), ("llama-bpe", LLAMA3)]
)
def test_byte_level_vocabularies_of_gguf_files_agree_with_bpe_written_out(
    tmp_path: Path, pre: str, pattern: str
) -> None:
    vocabulary = byte_level(pattern)
    ours = load_tokenizer(vocabulary.write(tmp_path / "v.gguf", "gpt2", pre=pre))
    for text in TEXTS:
        if "<|" not in text:
            normal = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
            ids = ours.encode(text, add_special_tokens=False)
            assert ids == encode_bytes(normal, vocabulary, pattern)
            assert ours.decode(ids) == normal
            assert b"".join(ours.token_bytes(token) or b"" for token in ids) == normal.encode()


def test_a_qwen2_vocabulary_agrees_with_transformers_as_folder_and_as_gguf(tmp_path: Path) -> None:
    vocabulary = byte_level(QWEN2)
    vocab = {token: i for i, token in enumerate(vocabulary.tokens[:-3])}
    theirs = Qwen2Tokenizer(vocab=vocab, merges=vocabulary.merges)
    theirs.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    theirs.save_pretrained(tmp_path / "folder")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "folder")
    folder = load_tokenizer(tmp_path / "folder")
    file = load_tokenizer(vocabulary.write(tmp_path / "v.gguf", "gpt2", pre="qwen2"))
    for text in TEXTS:
        ids = theirs(text).input_ids
        assert folder.encode(text) == ids == file.encode(text)
        assert folder.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert folder.special_ids == set(theirs.all_special_ids)


def test_a_sentencepiece_vocabulary_agrees_with_the_algorithm_written_out(tmp_path: Path) -> None:
    vocabulary = sentencepiece()
    ours = load_tokenizer(vocabulary.write(
        tmp_path / "v.gguf", "llama", bos_token_id=1, eos_token_id=2, unknown_token_id=0
    ))
    assert (ours.bos_token_id, ours.end_token_ids, ours.special_ids) == (1, (2,), {1, 2})
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == [1, *encode_pieces(text, vocabulary)], "a start token unless the file says otherwise"
        assert ours.decode(ids) == text
        spelled = b"".join(ours.token_bytes(token) or b"" for token in ids[1:])
        assert spelled == (f" {text}" if text else "").encode(), "the space before a first word is its own"
    plain = load_tokenizer(vocabulary.write(
        tmp_path / "w.gguf", "llama", bos_token_id=1, add_bos_token=False, add_space_prefix=False
    ))
    assert plain.decode(plain.encode(" a b")) == " a b"
    assert plain.encode(" a b") == ours.encode("a b")[1:]


def test_a_class_that_transformers_interprets_goes_through_it(tmp_path: Path) -> None:
    vocabulary = sentencepiece()
    vocab = {token: i for i, token in enumerate(vocabulary.tokens)}
    pairs = [(token[:i], token[i:]) for token in vocabulary.tokens[259:] for i in range(1, len(token))]
    merges = [pair for pair in pairs if pair[0] in vocab and pair[1] in vocab]
    LlamaTokenizer(vocab=vocab, merges=merges, add_bos_token=True).save_pretrained(tmp_path)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    assert ours.encode("Hello there")[0] == ours.bos_token_id == 1
    for text in TEXTS:
        assert ours.encode(text) == theirs(text).input_ids
        bare = theirs(text, add_special_tokens=False).input_ids
        assert ours.encode(text, add_special_tokens=False) == bare


@pytest.mark.parametrize(
    ("metadata", "before", "after"),
    [
        ({}, [], []),
        ({"add_bos_token": True}, [901], []),
        ({"add_bos_token": True, "add_eos_token": True}, [901], [902]),
        ({"add_eos_token": True}, [], [902]),
    ],
)
def test_start_and_end_tokens_follow_the_metadata(
    tmp_path: Path, metadata: dict, before: list[int], after: list[int]
) -> None:
    ends = {"bos_token_id": 901, "eos_token_id": 902, "eot_token_id": 900}
    file = byte_level(GPT2).write(tmp_path / "v.gguf", "gpt2", pre="gpt-2", **ends, **metadata)
    ours = load_tokenizer(file)
    bare = ours.encode("some text", add_special_tokens=False)
    assert ours.encode("some text") == before + bare + after
    assert ours.decode([901, *bare, 902]) == "some text"
    assert ours.decode([901, *bare, 902], skip_special_tokens=False) == "<|im_start|>some text<|im_end|>"
    assert (ours.vocab_size, ours.end_token_ids) == (903, (902, 900))
    assert ours.token_bytes(901) == b"<|im_start|>"
    beyond = 5000
    assert (ours.token_bytes(beyond), ours.decode([beyond])) == (b"", "")
    assert ours.convert_ids_to_tokens([beyond]) == [""]


def test_user_defined_tokens_are_whole_and_not_special(tmp_path: Path) -> None:
    vocabulary = byte_level(GPT2)
    vocabulary = replace(vocabulary, types=[*vocabulary.types[:-1], TokenType.USER_DEFINED])
    ours = load_tokenizer(vocabulary.write(tmp_path / "v.gguf", "gpt2", pre="gpt-2"))
    assert ours.encode("<|im_end|>") == [902]
    assert ours.decode([902], skip_special_tokens=True) == "<|im_end|>"
    assert ours.special_ids == {900, 901}


def test_vocabularies_that_are_not_supported_are_named(tmp_path: Path) -> None:
    vocabulary = byte_level(GPT2)
    with pytest.raises(ValueError, match=r"ggml.pre 'tekken' is not supported, must be one of gpt-2"):
        load_tokenizer(vocabulary.write(tmp_path / "a.gguf", "gpt2", pre="tekken"))
    with pytest.raises(ValueError, match=r"tokenizer.ggml.pre' is missing"):
        load_tokenizer(vocabulary.write(tmp_path / "b.gguf", "gpt2"))
    with pytest.raises(ValueError, match="model 'bert' is not supported, must be one of gpt2, llama"):
        load_tokenizer(vocabulary.write(tmp_path / "c.gguf", "bert"))
    vocabulary = replace(vocabulary, tokens=[*vocabulary.tokens[:-1], vocabulary.tokens[0]])
    with pytest.raises(ValueError, match="holds a token twice"):
        load_tokenizer(vocabulary.write(tmp_path / "d.gguf", "gpt2", pre="gpt-2"))


def test_paths_that_hold_no_tokenizer_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder or file"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(ValueError, match=r"tokenizer='.*'"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json cannot be read"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_reading_a_gguf_vocabulary_loads_neither_torch_nor_transformers(tmp_path: Path) -> None:
    path = byte_level(GPT2).write(tmp_path / "v.gguf", "gpt2", pre="gpt-2")
    script = (
        "import sys, slipstream.text.chat_template; from slipstream.text.tokenizer import load_tokenizer;"
        f"load_tokenizer({str(path)!r}); print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
