"""Tokenizers of both formats against transformers' own, on texts of many kinds."""

from __future__ import annotations

import pydoc_data.topics
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from slipstream.text.tokenizer import Tokenizer, load_tokenizer

TEXTS = [
    "", " ", "\n\n\t ", "Hello, world!", "it's  I'LL we've  DON'T", "12345 3.14159 0x7f 1e-05 ²³ ½ Ⅷ",
    "naïve café e\u0301 Straße İstanbul", "日本語のテキストと한국어 그리고 中文。", "ภาษาไทยไม่มีช่องว่าง",
    "العربية עברית", "👩\u200d👩\u200d👧 🇺🇳 👍🏽 ☃️", "a\u200bb\u00a0c\ufeffd", "\x00\x01\x7f",
    "<|im_start|>user\nhi<|im_end|>", "<|im_start|><|im_end|>", "<|im_start",
    "def f(x):\n\treturn x  # twice\r\n\r\n", "x" * 300, "  leading and trailing  ",
    *[text[:1500] for text in list(pydoc_data.topics.topics.values())[:30]],
    Path(sys.modules["json"].__file__).read_text()[:4000],
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
