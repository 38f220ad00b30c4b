"""What reaches the engine of what users give, and what is refused at the door by the field's name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_engine import LIMITS
from text_model import ids_of, write_tokenizer
from vocabularies import byte_level

from slipstream.contracts.errors import BadRequest
from slipstream.contracts.limits import MAX_END_TOKEN_IDS
from slipstream.contracts.sampling_params import SamplingParams
from slipstream.engine.client import EngineInfo
from slipstream.engine.input_processor import InputProcessor, mix_seed
from slipstream.text.tokenizer import Tokenizer, load_tokenizer

END = 2
INFO = EngineInfo(LIMITS, (END,))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def inputs(tokenizer: Tokenizer) -> InputProcessor:
    return InputProcessor(tokenizer, INFO, seed=0)


def refused(inputs: InputProcessor, prompt, priority: int = 0, **params) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        inputs.prepare(prompt, SamplingParams(**params), priority)
    return caught.value


@pytest.mark.parametrize(
    ("prompt", "text", "ids"),
    [
        ("hi", "hi", ids_of("hi")),
        ([7, 8], None, [7, 8]),
        ((7, 8), None, [7, 8]),
        (range(7, 9), None, [7, 8]),
        (np.array([7, 8], np.int64), None, [7, 8]),
        ({"prompt": "hi"}, "hi", ids_of("hi")),
        ({"prompt_token_ids": [7, 8]}, None, [7, 8]),
        ({"prompt_token_ids": [7, 8], "prompt": "as text"}, "as text", [7, 8]),
    ],
)
def test_every_kind_of_prompt_becomes_text_and_ids(inputs, prompt, text, ids):
    prepared = inputs.prepare(prompt, SamplingParams())
    assert (prepared.text, prepared.token_ids, prepared.tokens.tolist()) == (text, ids, ids)
    assert prepared.tokens.dtype == np.int32
    assert all(type(token) is int for token in prepared.token_ids)


@pytest.mark.parametrize(
    "prompt",
    [
        "", [], {"prompt": ""}, {"prompt_token_ids": []}, {}, {"prompt": None}, {"prompt": 3}, 3, None, [1.5],
        [True], ["a", "b"], [[1]], {"prompt_token_ids": "abc"}, {"text": "abc"}, [7, -3, 9], [2**40],
        [LIMITS.vocab_size], np.array([1.5]), {"prompt": "a", "multi_modal_data": {}},
        {"prompt": 3, "prompt_token_ids": [1]}, [1] * LIMITS.max_model_len, "half of \ud83d",
    ],
)
def test_prompts_that_are_none_are_refused_by_name(inputs, prompt):
    assert refused(inputs, prompt).field == "prompt"


def test_an_empty_prompt_is_the_start_token_where_the_tokenizer_adds_one(tmp_path):
    inputs = InputProcessor(load_tokenizer(write_tokenizer(tmp_path, adds_start=True)), INFO, seed=0)
    assert inputs.prepare("", SamplingParams()).token_ids == [1]
    assert inputs.prepare("a", SamplingParams()).token_ids == [1, *ids_of("a")]


def test_cache_salt_is_carried_and_checked(inputs):
    assert inputs.prepare({"prompt": "a", "cache_salt": "s"}, SamplingParams()).cache_salt == "s"
    assert inputs.prepare("a", SamplingParams()).cache_salt is None
    for salt in ("", 3, "\udead"):
        assert refused(inputs, {"prompt": "a", "cache_salt": salt}).field == "cache_salt"


def test_lengths_end_at_max_tokens_or_the_models_most(inputs):
    assert inputs.prepare("abc", SamplingParams(max_tokens=5)).max_len == 8
    assert inputs.prepare("abc", SamplingParams(max_tokens=0)).max_len == 3
    assert inputs.prepare("abc", SamplingParams(max_tokens=None)).max_len == LIMITS.max_model_len
    assert refused(inputs, "abc", max_tokens=LIMITS.max_model_len).field == "max_tokens"


def test_a_prompt_that_can_never_fit_the_pool_is_refused_with_both_numbers(tokenizer):
    small = InputProcessor(tokenizer, EngineInfo(replace(LIMITS, num_blocks=5), (END,)), seed=0)
    error = refused(small, [5] * 100, max_tokens=1)
    assert "needs 7 KV blocks" in str(error)
    assert "the pool has 5" in str(error)


def test_end_ids_are_the_models_and_the_tokenizers_and_the_requests(tokenizer):
    inputs = InputProcessor(tokenizer, EngineInfo(LIMITS, (40, END)), seed=0)
    assert tokenizer.end_token_ids == (END,)
    assert inputs.prepare("a", SamplingParams()).end_token_ids == (40, END)
    assert inputs.prepare("a", SamplingParams(stop_token_ids=[9, END])).end_token_ids == (40, END, 9)
    assert inputs.prepare("a", SamplingParams(stop_token_ids=[9], ignore_eos=True)).end_token_ids == (9,)
    assert InputProcessor(None, INFO, 0).prepare([1], SamplingParams(ignore_eos=True)).end_token_ids == ()


def test_more_end_ids_than_the_table_has_room_for_are_refused(inputs):
    most = list(range(10, 10 + MAX_END_TOKEN_IDS))
    assert refused(inputs, "a", stop_token_ids=most).field == "stop_token_ids"
    prepared = inputs.prepare("a", SamplingParams(stop_token_ids=most[1:]))
    assert len(prepared.end_token_ids) == MAX_END_TOKEN_IDS
    prepared = inputs.prepare("a", SamplingParams(stop_token_ids=most, ignore_eos=True))
    assert prepared.end_token_ids == tuple(most)


def test_bad_words_are_banned_as_first_word_and_after_a_space(tmp_path):
    words = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+"
    tokenizer = load_tokenizer(byte_level(words).write(tmp_path / "v.gguf", "gpt2", pre="gpt-2"))
    inputs = InputProcessor(tokenizer, EngineInfo(replace(LIMITS, vocab_size=2000), ()), seed=0)

    def spelled(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text))

    def banned(*words: str) -> tuple[tuple[int, ...], ...]:
        return inputs.prepare("a", SamplingParams(bad_words=words)).bad_word_token_ids

    assert len(spelled("the")) == len(spelled(" the")) == 1
    assert banned("the") == banned(" the") == (spelled("the"), spelled(" the"))
    assert len(spelled("which")) != len(spelled(" which")) == 1
    assert banned("which") == (spelled("which"),), "vLLM's rule: only where the lengths agree"
    assert banned("the", "\n") == (spelled("the"), spelled(" the"), spelled("\n"))
    assert banned() == ()


def test_a_word_without_tokens_cannot_be_banned(demo_model):
    """21 bytes have no token in this vocabulary."""
    info = EngineInfo(replace(LIMITS, vocab_size=49152), ())
    inputs = InputProcessor(load_tokenizer(demo_model.gguf), info, seed=0)
    assert refused(inputs, "a", bad_words=["\x04"]).field == "bad_words"


def test_bans_that_leave_no_token_are_refused(inputs):
    for temperature in (0, 1):
        error = refused(inputs, "a", allowed_token_ids=ids_of("X"), bad_words=["X"], temperature=temperature)
        assert error.field == "allowed_token_ids"
    inputs.prepare("a", SamplingParams(allowed_token_ids=ids_of("XY"), bad_words=["X"]))


@pytest.mark.parametrize("params", [{"stop": "x"}, {"bad_words": ["x"]}])
def test_text_needs_a_tokenizer(params):
    inputs = InputProcessor(None, INFO, seed=0)
    assert refused(inputs, [1], **params).field == next(iter(params))
    assert refused(inputs, "text").field == "prompt"
    assert inputs.prepare([1], SamplingParams()).token_ids == [1]


def test_priority_needs_its_policy(tokenizer, inputs):
    assert refused(inputs, "a", priority=-1).field == "priority"
    info = EngineInfo(LIMITS, (END,), {"scheduling_policy": {"value": "priority", "reason": "", "flag": ""}})
    assert InputProcessor(tokenizer, info, 0).prepare("a", SamplingParams(), -1).priority == -1


def test_seeds_are_the_users_or_drawn_from_the_engines(tokenizer):
    def drawn(engine_seed: int) -> list[int]:
        inputs = InputProcessor(tokenizer, INFO, engine_seed)
        return [inputs.prepare("a", SamplingParams()).seed for _ in range(50)]

    assert len({*drawn(0), *drawn(1)}) == 100
    assert drawn(0) == drawn(0)
    assert all(-(2**63) <= seed < 2**63 for seed in drawn(0))
    inputs = InputProcessor(tokenizer, INFO, 0)
    for seed in (0, -1, 2**63 - 1, -(2**63)):
        assert inputs.prepare("a", SamplingParams(seed=seed)).seed == seed


@given(seed=st.integers(-(2**63), 2**63 - 1), index=st.integers(1, 127))
def test_seeds_of_samples_are_mixed_in_every_bit(seed, index):
    mixed, plain = mix_seed(seed, index), mix_seed(seed, 0)
    assert plain == seed
    assert -(2**63) <= mixed < 2**63
    assert 8 <= ((mixed ^ mix_seed(seed ^ 1, index)) & (2**64 - 1)).bit_count() <= 56, "one bit changes half"


def test_mixing_is_splitmix64():
    """First outputs of the reference implementation for the state 1234567."""
    assert [mix_seed(1234567, i) % 2**64 for i in (1, 2, 3)] == [
        6457827717110365317, 3203168211198807973, 9817491932198370423,
    ]
