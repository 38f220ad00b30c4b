"""What a grammar forces is drafted where an engine verifies drafts: fewer steps, and every token the same."""

import numpy as np
import pytest
from drafters import FixedDrafting
from harness import make_core, make_request, run
from text_model import BYTE_ZERO, VOCAB, ids_of, make_text_model, write_tokenizer

from slipstream.config.structured_outputs import StructuredOutputsConfig
from slipstream.contracts.sampling_params import SamplingParams
from slipstream.contracts.step import Finish
from slipstream.contracts.structured_outputs import StructuredOutputsParams
from slipstream.grammar.compiler import Compiler, open_library
from slipstream.grammar.matchers import Grammars
from slipstream.text.tokenizer import load_tokenizer

K = 6
NGRAM = {"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_min": 1}
LIBRARIES = pytest.mark.parametrize("backend", ["guidance", "xgrammar"])
FORCED = "(ab|cd)-0123456789-(x|yy)-0123456789"
CASES = [
    {}, {"logprobs": 2}, {"temperature": 0.0}, {"max_tokens": 7}, {"max_tokens": 14}, {"min_tokens": 20},
    {"stop_token_ids": [BYTE_ZERO + ord("5")]}, {"logit_bias": {BYTE_ZERO + ord("3"): -9.0}},
    {"repetition_penalty": 1.7},
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tiny_model):
    return make_text_model(tiny_model)


def text_of(library, regex):
    config = StructuredOutputsConfig(backend="guidance")
    return library.text(StructuredOutputsParams(regex=regex), config)


def answers(model, backend, bad_words=(), **args):
    """Constrained requests of every case among plain ones, and the engine's figures."""
    core = make_core(model, max_num_seqs=8, structured_outputs_config={"backend": backend}, **args)
    if "speculative_config" in args:
        core.scheduler._drafting = FixedDrafting(K)
    grammar = text_of(open_library(backend, load_tokenizer(model), VOCAB, [2]), FORCED)
    requests = [
        make_request(core, key, ids_of("again and again"), SamplingParams(
            **{"max_tokens": 60, "temperature": 1.0, **CASES[key // 2]}), seed=key, bad_words=bad_words,
            grammar=grammar if key % 2 else "")
        for key in range(2 * len(CASES))
    ]  # fmt: skip
    got = run(core, requests)
    core.scheduler.check_invariants()
    stats = core.scheduler.stats()
    core.close()
    return got, stats


@pytest.fixture(scope="module")
def plain(model):
    return answers(model, "guidance")


@LIBRARIES
@pytest.mark.parametrize("runner", ["v2", "v1"])
def test_what_a_grammar_forces_changes_no_token_and_no_logprob(model, plain, backend, runner):
    got, stats = answers(model, backend, speculative_config=NGRAM, model_runner=runner)
    for key, want in plain[0].items():
        assert (got[key].tokens, got[key].finish) == (want.tokens, want.finish), CASES[key // 2]
        for ours, theirs in zip(got[key].logprobs, want.logprobs, strict=True):
            assert ours == pytest.approx(theirs, abs=2e-4)
    # The old runner has one mask a row, so it verifies none of them.
    assert (stats.accepted_tokens > 0) == (runner == "v2")


@LIBRARIES
def test_forced_tokens_cost_few_steps(model, backend):
    grammar = text_of(open_library(backend, load_tokenizer(model), VOCAB, [2]), "[ab]" + "0123456789" * 2)
    core = make_core(model, speculative_config=NGRAM, structured_outputs_config={"backend": backend})
    core.scheduler._drafting = FixedDrafting(K)
    got = run(core, [make_request(core, 0, ids_of("x"), SamplingParams(max_tokens=40), grammar=grammar)])
    stats = core.scheduler.stats()
    core.close()
    said = bytes(token - BYTE_ZERO for token in got[0].tokens[:-1]).decode()
    assert said[1:] == "0123456789" * 2 and got[0].tokens[-1] == 2
    # The first token alone, then four drafts and one more a step.
    assert stats.steps <= 7 and stats.accepted_tokens >= 15


@LIBRARIES
def test_a_ban_within_what_is_forced_ends_the_row_there(model, backend):
    got, _ = answers(model, backend, bad_words=((BYTE_ZERO + ord("4"),),), speculative_config=NGRAM)
    assert got[1].finish is Finish.ERROR and len(got[1].tokens) == 7, "ab-0123, and nothing after it"
    assert got[0].finish in (Finish.STOP, Finish.LENGTH)


@LIBRARIES
def test_masks_of_drafts_are_those_of_going_there_token_by_token(tmp_path, backend):
    folder = write_tokenizer(tmp_path)
    grammars = Grammars(Compiler(backend, lambda: load_tokenizer(folder), VOCAB, [2]), places=5)
    library = open_library(backend, load_tokenizer(folder), VOCAB, [2])
    grammar = text_of(library, "abc[de]?")
    request = make_request_like(grammar, min_tokens=4)
    grammars.open(request)
    while not grammars.take_opened():
        grammars.wait(5)
    legal, drafts = grammars.legal([request.key], 9)
    assert drafts.tolist() == [ids_of("abc")] and legal.shape == (1, 4, VOCAB // 32)
    matcher, mask = library.compile(grammar)(), np.zeros(VOCAB // 32, np.int32)
    for place, token in enumerate(ids_of("abc")):
        matcher.fill(mask)
        assert (legal[0, place] == mask).all()
        matcher.consume([token])
    after = np.flatnonzero(np.unpackbits(legal[0, 3].view(np.uint8), bitorder="little")).tolist()
    assert after == ids_of("de"), "the end is put off to min_tokens"
    assert grammars.legal([request.key], 1)[1].tolist() == [ids_of("a")]
    assert grammars.legal([request.key], 0)[1].shape == (1, 0)
    grammars.shut_down()


def make_request_like(grammar, **params):
    class Core:
        class info:
            end_token_ids = (2,)

            class limits:
                max_model_len = 64

    return make_request(Core, 7, [5], SamplingParams(max_tokens=9, **params), grammar=grammar)
