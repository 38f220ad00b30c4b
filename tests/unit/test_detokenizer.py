"""Text in pieces against text made at once by the tokenizers library, and stop strings against an oracle that
looks at whole texts, character by character."""

from __future__ import annotations

import functools
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from vocabularies import SPECIAL, byte_level, sentencepiece

from slipstream.contracts.sampling_params import SamplingParams
from slipstream.text.detokenizer import Detokenizers, StopFinder
from slipstream.text.tokenizer import Tokenizer, load_tokenizer

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WORLD = "naïve 👩\u200d👩\u200d👧 🇺🇳 ภาษาไทย 한국어 日本語 e\u0301 \U0001f600\ud7ff\ue000\U0010ffff end"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("vocabulary") / "v.gguf"
    return load_tokenizer(byte_level(GPT2).write(path, "gpt2", pre="gpt-2"))


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("vocabulary") / "v.gguf"
    return load_tokenizer(sentencepiece().write(path, "llama", bos_token_id=1, unknown_token_id=0))


def in_pieces(tokenizer: Tokenizer, ids: list[int], cuts: list[int] = (), **params) -> list[str]:
    """Deltas of ids fed in parts that end at cuts; by default one at a time. The last is that of the end."""
    detokenizer = Detokenizers(tokenizer).open(SamplingParams(**params), [])
    bounds = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)] if cuts else range(len(ids) + 1)
    deltas = []
    for start, end in pairwise(bounds):
        text, used = detokenizer.feed(ids[start:end])
        assert used == end - start
        deltas.append(text)
    return [*deltas, detokenizer.end()]


@settings(deadline=None, max_examples=300)
@given(ids=st.lists(st.integers(0, 910)), cuts=st.lists(st.integers(0, 10**6)), skip=st.booleans())
def test_joined_deltas_of_any_tokens_equal_the_whole_text(tokenizer, ids, cuts, skip):
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(in_pieces(tokenizer, ids, skip_special_tokens=skip)) == whole
    assert "".join(in_pieces(tokenizer, ids, cuts, skip_special_tokens=skip)) == whole


@functools.cache
def tokens_by_bytes(tokenizer: Tokenizer) -> dict[bytes | None, int]:
    return {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size)}


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token a byte."""
    return [tokens_by_bytes(tokenizer)[bytes([byte])] for byte in data]


@settings(deadline=None, max_examples=200)
@given(data=st.binary(max_size=40))
@example(data=b"\xf0\x9f\x98")
@example(data=b"\xf0\x9f\xf0\x9f\x98\x80\x80\xff")
@example(data=b"\xed\xa0\x80\xc0\xaf\xf4\x90\x80\x80")
def test_bytes_that_are_no_text_give_what_the_library_gives_for_the_whole(tokenizer, data):
    ids = byte_ids(tokenizer, data)
    assert "".join(in_pieces(tokenizer, ids)) == tokenizer.decode(ids) == data.decode("utf-8", "replace")


@settings(deadline=None, max_examples=200)
@given(text=st.text(max_size=30))
@example(text=WORLD)
def test_every_character_comes_with_its_last_byte_and_never_in_parts(tokenizer, text):
    data = text.encode("utf-8", "replace")
    deltas = in_pieces(tokenizer, byte_ids(tokenizer, data))
    for count in range(len(data) + 1):
        # A cut character is a tail that "ignore" leaves out.
        assert "".join(deltas[:count]) == data[:count].decode("utf-8", "ignore")
    assert deltas[-1] == ""


@settings(deadline=None, max_examples=200)
@given(text=st.text(alphabet=st.characters(exclude_characters="\u2581", codec="utf-8"), max_size=30))
@example(text=WORLD)
def test_pieces_with_byte_fallback_keep_spaces_and_characters_whole(pieces, text):
    context, ids = pieces.encode("x"), pieces.encode(f"x{text}")
    if ids[: len(context)] != context:  # the first word merged with the context
        return
    deltas = in_pieces(pieces, ids[len(context) :])
    assert "".join(deltas) == text
    assert ("\ufffd" in "".join(deltas)) == ("\ufffd" in text)


def test_a_vocabulary_without_bytes_goes_through_its_decoder():
    vocab = {token: i for i, token in enumerate(["[UNK]", "un", "##believ", "##able", "yes", "!", "\ufffd"])}
    backend = Backend(models.WordPiece(vocab))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=True)
    backend.add_special_tokens(["[END]"])
    wordpiece = Tokenizer(backend, {}, None)
    assert wordpiece.token_bytes(0) is None
    context = wordpiece.encode("yes")
    detokenizer = Detokenizers(wordpiece).open(SamplingParams(), context)
    ids = [1, 2, 3, 4, *[7] * 40, 5, 6, 4, 6]
    text = "".join(detokenizer.feed([token])[0] for token in ids) + detokenizer.end()
    whole = wordpiece.decode(context + ids)
    assert whole == "yes unbelievable yes! \ufffd yes \ufffd"
    assert text == whole.removeprefix("yes")


def test_the_demo_models_text_streams_whole(demo_model):
    tokenizer = load_tokenizer(demo_model.gguf)
    ids = tokenizer.encode(WORLD * 3)
    deltas = in_pieces(tokenizer, ids)
    assert "".join(deltas) == tokenizer.decode(ids)
    assert "\ufffd" not in "".join(deltas)


def test_special_tokens_are_shown_only_on_request(tokenizer):
    ids = [*tokenizer.encode("a b"), tokenizer.encode(SPECIAL[2])[0], *tokenizer.encode("c")]
    assert "".join(in_pieces(tokenizer, ids)) == "a bc"
    assert "".join(in_pieces(tokenizer, ids, skip_special_tokens=False)) == f"a b{SPECIAL[2]}c"


def test_the_text_of_one_token_keeps_its_space(tokenizer, pieces):
    for each in (tokenizer, pieces):
        assert Detokenizers(each).token_text(each.encode("the the")[-1]) == " the"


def stopped_text(
    texts: list[str], stops: list[str], min_tokens: int, include: bool
) -> tuple[str, str | None, int]:
    """(text, stop string or None, tokens used): characters are added one by one, and the first that ends a
    stop string, past min_tokens tokens, is the last."""
    whole = ""
    for used, text in enumerate(texts, 1):
        for char in text:
            whole += char
            found = [stop for stop in stops if whole.endswith(stop)]
            if found and used > min_tokens:
                stop = max(found, key=len)
                return (whole if include else whole[: -len(stop)]), stop, used
    return whole, None, len(texts)


small_text = st.text(alphabet="ab ", max_size=4)


@settings(deadline=None, max_examples=500)
@given(
    texts=st.lists(small_text, max_size=15),
    stops=st.lists(st.text(alphabet="ab ", min_size=1, max_size=6), min_size=1, max_size=4),
    min_tokens=st.integers(0, 4),
    include=st.booleans(),
)
@example(texts=["ab", "ab", "aa"], stops=["ababaa"], min_tokens=0, include=False)
@example(texts=["aab", "aa", "b"], stops=["aabaab", "baa"], min_tokens=0, include=False)
def test_stop_strings_end_the_text_where_an_oracle_on_the_whole_text_does(texts, stops, min_tokens, include):
    want, want_stop, want_used = stopped_text(texts, stops, min_tokens, include)
    finder, shown, used = StopFinder(stops, include), "", 0
    for used, text in enumerate(texts, 1):
        shown += finder.feed(text, used > min_tokens)
        assert want.startswith(shown), "a piece of a stop string was shown"
        if finder.found is not None:
            break
        held = "".join(texts[:used])[len(shown) :]
        assert not include or held == "", "nothing is held back where the stop string is part of the text"
        assert not held or any(stop.startswith(held) and stop != held for stop in stops), "held for nothing"
    shown += finder.end()
    assert (shown, finder.found, used) == (want, want_stop, want_used)


@settings(deadline=None, max_examples=200)
@given(
    text=st.text(alphabet="xyé👍", max_size=20),
    stop=st.text(alphabet="xyé👍", min_size=1, max_size=4),
    min_tokens=st.integers(0, 6),
)
def test_stop_strings_work_on_characters_that_are_several_tokens(tokenizer, text, stop, min_tokens):
    ids = byte_ids(tokenizer, text.encode())
    texts = ["".join(piece) for piece in in_pieces(tokenizer, ids)][:-1]
    want, want_stop, want_used = stopped_text(texts, [stop], min_tokens, False)
    detokenizer = Detokenizers(tokenizer).open(SamplingParams(stop=stop, min_tokens=min_tokens), [])
    shown, used = detokenizer.feed(ids)
    assert (shown + detokenizer.end(), detokenizer.stopped, used) == (want, want_stop, want_used)


def test_text_that_only_began_a_stop_string_is_shown_at_the_end(tokenizer):
    detokenizer = Detokenizers(tokenizer).open(SamplingParams(stop=["Wednesday, Thursday"]), [])
    shown, _ = detokenizer.feed(tokenizer.encode("Monday, Tuesday, Wednesday, Thu"))
    assert shown == "Monday, Tuesday, "
    assert detokenizer.end() == "Wednesday, Thu"
    assert detokenizer.stopped is None


def test_a_broken_character_at_the_end_may_complete_a_stop_string(tokenizer):
    ids = byte_ids(tokenizer, b"a\xf0\x9f")
    detokenizer = Detokenizers(tokenizer).open(SamplingParams(stop=["a\ufffd"]), [])
    assert detokenizer.feed(ids) == ("", 3)
    assert (detokenizer.end(), detokenizer.stopped) == ("", "a\ufffd")


def test_long_stop_strings_cost_no_more_a_character_than_short_ones():
    """A search that starts anew at every character would compare a thousand times as often."""

    class Counting(str):
        compared = 0

        def __getitem__(self, index):
            Counting.compared += 1
            return super().__getitem__(index)

    stop = Counting("a" * 1023 + "b")
    finder = StopFinder([stop], False)
    for _ in range(2000):
        finder.feed("a")
    assert Counting.compared < 10 * 3000
