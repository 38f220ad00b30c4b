"""Arrays to outputs, against what each request was scripted to say, whatever steps its tokens come in."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_engine import LIMITS, made_up_scores, make_outputs, prompt_logprobs, token_logprobs
from text_model import BYTE_ZERO, ids_of, write_tokenizer

from slipstream.contracts.limits import MAX_N
from slipstream.contracts.sampling_params import RequestOutputKind, SamplingParams
from slipstream.contracts.step import Finish
from slipstream.engine.client import EngineInfo
from slipstream.engine.input_processor import InputProcessor
from slipstream.engine.output_processor import OutputProcessor
from slipstream.engine.outputs import Logprob
from slipstream.engine.request_state import RequestState
from slipstream.server.answers import UsageCount
from slipstream.text.tokenizer import Tokenizer, load_tokenizer

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
END, A = 2, BYTE_ZERO + ord("A")
INCLUDE = {"include_stop_str_in_output": True}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


class Front:
    """An output processor and requests that it expects."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.inputs = InputProcessor(tokenizer, EngineInfo(LIMITS, (END,)), seed=0)
        self.outputs = OutputProcessor(tokenizer)

    def open(self, prompt: list[int] | None = None, **params) -> RequestState:
        prepared = self.inputs.prepare(prompt or [5], SamplingParams(**{"max_tokens": 200, **params}))
        return self.outputs.open("name", prepared)

    def step(self, *news, **fields) -> tuple[list[RequestState], list[int]]:
        return self.outputs.process(make_outputs(news, **fields))


@pytest.fixture
def front(tokenizer: Tokenizer) -> Front:
    return Front(tokenizer)


def key_of(state: RequestState, index: int = 0) -> int:
    return state.samples[index].key


def cut_at_stop(text: str, stops: list[str], include: bool) -> tuple[str, str | None, int]:
    """(text, stop string, characters used) as the first complete stop string has it."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop, end
    return text, None, len(text)


script = st.fixed_dictionaries({
    "kind": st.sampled_from(list(RequestOutputKind)),
    "replies": st.lists(st.text(alphabet="abc", max_size=12), min_size=1, max_size=3),
    "stops": st.lists(st.text(alphabet="abc", min_size=1, max_size=3), max_size=2),
    "include": st.booleans(),
    "finish": st.sampled_from([Finish.STOP, Finish.LENGTH]),
})


@settings(deadline=None, max_examples=150)
@given(scripts=st.lists(script, max_size=8), seed=st.integers(0, 10**9), most=st.integers(1, 3))
def test_every_kind_of_output_says_what_the_script_said_in_whatever_steps(tokenizer, scripts, seed, most):
    rng, front = random.Random(seed), Front(tokenizer)
    running: dict[int, list[int]] = {}
    states, taken = [], {}
    waiting = list(scripts)
    while waiting or running:
        while waiting and rng.random() < 0.4:  # arrivals between steps take slots that others left
            wanted = waiting.pop()
            state = front.open(
                n=len(wanted["replies"]), stop=wanted["stops"] or None, output_kind=wanted["kind"],
                include_stop_str_in_output=wanted["include"],
            )
            states.append((state, wanted))
            for sample, reply in zip(state.samples, wanted["replies"], strict=True):
                running[sample.key] = ids_of(reply) + ([END] if wanted["finish"] == Finish.STOP else [])
        news = []
        for key, tokens in list(running.items()):
            now, rest = tokens[: (count := rng.randint(0, most))], tokens[count:]
            running[key] = rest
            owner = next(w for s, w in states if any(x.key == key for x in s.samples))
            finish = Finish.NONE if rest or (owner["finish"] == Finish.STOP and not now) else owner["finish"]
            if now or finish:
                news.append((key, now, finish))
            if finish:
                del running[key]
        rng.shuffle(news)
        ready, stopped = front.step(*news)
        for key in stopped:
            assert key in running
            running[key] = []  # late news of a request that has ended
            front.step((key, [BYTE_ZERO], Finish.NONE))
            del running[key]
        for state in ready:
            if rng.random() < 0.5 or state.finished:
                taken.setdefault(id(state), []).append(state.take())
    assert front.outputs.num_live == 0
    for state, wanted in states:
        check_outputs(taken[id(state)], wanted)


def check_outputs(outputs, wanted) -> None:
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert wanted["kind"] != FINAL_ONLY or len(outputs) == 1
    for index, reply in enumerate(wanted["replies"]):
        pieces = [piece for output in outputs for piece in output.outputs if piece.index == index]
        want, stop, used = cut_at_stop(reply, wanted["stops"], wanted["include"])
        want_ids = ids_of(reply[:used])
        if stop is None and wanted["finish"] == Finish.STOP:
            want_ids.append(END)
        if wanted["kind"] == DELTA:
            text = "".join(piece.text for piece in pieces)
            token_ids = [token for piece in pieces for token in piece.token_ids]
        else:
            text, token_ids = pieces[-1].text, pieces[-1].token_ids
            assert all(want.startswith(piece.text) for piece in pieces)
        assert (text, token_ids) == (want, want_ids)
        ended = [piece for piece in pieces if piece.finished()]
        assert wanted["kind"] != DELTA or len(ended) == 1
        natural = "stop" if wanted["finish"] == Finish.STOP else "length"
        assert ended[-1].finish_reason == ("stop" if stop is not None else natural)
        assert ended[-1].stop_reason == stop


def test_a_reader_that_falls_behind_gets_its_deltas_joined(front):
    state = front.open(output_kind=DELTA, n=2)
    for token in ids_of("abc"):
        front.step((key_of(state), [token], Finish.NONE))
    front.step((key_of(state, 1), ids_of("x"), Finish.LENGTH))
    output = state.take()
    assert [(piece.index, piece.text, piece.finish_reason) for piece in output.outputs] == [
        (0, "abc", None), (1, "x", "length"),
    ]
    assert state.take() is None
    front.step((key_of(state), ids_of("d"), Finish.LENGTH))
    output = state.take()
    assert output.finished
    assert [(piece.index, piece.text) for piece in output.outputs] == [(0, "d")], "sample 1 is done"


def test_cumulative_outputs_show_every_sample_each_time(front):
    state = front.open(n=2)
    front.step((key_of(state), ids_of("a"), Finish.NONE), (key_of(state, 1), ids_of("x"), Finish.LENGTH))
    first = state.take()
    front.step((key_of(state), ids_of("b"), Finish.NONE))
    second = state.take()
    assert [piece.text for piece in first.outputs] == ["a", "x"], "an output that was given stays as it is"
    assert [piece.text for piece in second.outputs] == ["ab", "x"]
    assert [list(piece.token_ids) for piece in first.outputs] == [ids_of("a"), ids_of("x")]


@pytest.mark.parametrize(
    ("last", "finish", "params", "told"),
    [
        (END, Finish.STOP, {}, ("stop", None, "a")),
        (A, Finish.STOP, {"stop_token_ids": [A]}, ("stop", A, "a")),
        (A, Finish.STOP, {"stop_token_ids": [A], **INCLUDE}, ("stop", A, "aA")),
        (A, Finish.LENGTH, {"stop_token_ids": [A + 1]}, ("length", None, "aA")),
        (END, Finish.STOP, {"skip_special_tokens": False}, ("stop", None, "a")),
        (END, Finish.STOP, {"skip_special_tokens": False, **INCLUDE}, ("stop", None, "a</s>")),
        (A, Finish.ERROR, {}, ("error", None, "aA")),
    ],
)
@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_ends_are_told_as_openai_and_vllm_tell_them(front, kind, last, finish, params, told):
    state = front.open(output_kind=kind, **params)
    front.step((key_of(state), [*ids_of("a"), last], finish))
    (piece,) = state.take().outputs
    assert (piece.finish_reason, piece.stop_reason, piece.text) == told
    assert list(piece.token_ids) == [*ids_of("a"), last]


def test_a_request_that_fails_alone_says_why_and_the_others_go_on(front):
    bad, good = front.open(), front.open()
    ready, _ = front.step(
        (key_of(bad), [], Finish.ERROR), (key_of(good), ids_of("ok"), Finish.LENGTH),
        errors=[(key_of(bad), "no token was left to choose")],
    )
    assert ready == [bad, good]
    failed, fine = bad.take(), good.take()
    assert (failed.error, failed.finished, failed.outputs[0].finish_reason) == (
        "no token was left to choose", True, "error",
    )
    assert (fine.error, fine.outputs[0].text) == (None, "ok")


def test_without_a_tokenizer_or_detokenize_there_is_no_text(front):
    for each, params in ((Front(None), {}), (front, {"detokenize": False})):
        state = each.open(logprobs=1, **params)
        each.step((key_of(state), [50, 60], Finish.LENGTH), logprobs=token_logprobs([[50, 60]], 2, 1))
        (piece,) = state.take().outputs
        assert (piece.text, piece.token_ids) == ("", [50, 60])
        assert piece.logprobs[0][50].decoded_token is None


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_logprobs_hold_the_token_and_as_many_alternatives_as_were_asked(front, kind):
    """Others in the batch asked for more: columns beyond one's own count are not one's own."""
    two, none, zero = front.open(logprobs=2, output_kind=kind), front.open(), front.open(logprobs=0)
    tokens = [ids_of("a"), ids_of("b"), ids_of("cd")]
    news = [
        (key_of(state), one, Finish.LENGTH)
        for state, one in zip((two, none, zero), tokens, strict=True)
    ]
    front.step(*news, logprobs=token_logprobs(tokens, 2, 5))
    (a,), (c, d) = tokens[0], tokens[2]
    (piece,) = two.take().outputs
    ids, values, rank = made_up_scores(a, 2)
    (score,) = piece.logprobs
    assert list(score) == ids
    assert list(score.values()) == [
        Logprob(values[0], rank, "a"), Logprob(values[1], 1, "b"), Logprob(values[2], 2, "c"),
    ]
    assert piece.cumulative_logprob == pytest.approx(values[0])
    assert none.take().outputs[0].logprobs is None
    (piece,) = zero.take().outputs
    assert [list(score) for score in piece.logprobs] == [[c], [d]]
    assert piece.cumulative_logprob == pytest.approx(made_up_scores(c, 0)[1][0] + made_up_scores(d, 0)[1][0])


def test_the_token_is_listed_once_where_it_is_among_the_likeliest(front):
    state = front.open(logprobs=2)
    found = token_logprobs([[70]], 1, 2)
    found.ids[0, 0], found.values[0, 0], found.rank[0, 0] = [70, 80, 70], [-1.5, -0.5, -1.5], 2
    front.step((key_of(state), [70], Finish.LENGTH), logprobs=found)
    (score,) = state.take().outputs[0].logprobs
    assert {token: (one.logprob, one.rank) for token, one in score.items()} == {70: (-1.5, 2), 80: (-0.5, 1)}


def test_logprobs_end_with_the_token_that_completes_a_stop_string(front):
    state = front.open(logprobs=0, stop="bc")
    tokens = ids_of("abcd")
    _, stopped = front.step((key_of(state), tokens, Finish.NONE), logprobs=token_logprobs([tokens], 4, 0))
    assert stopped == [key_of(state)]
    (piece,) = state.take().outputs
    assert (piece.text, list(piece.token_ids), piece.stop_reason) == ("a", ids_of("abc"), "bc")
    assert [list(score) for score in piece.logprobs] == [[token] for token in ids_of("abc")]


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_prompt_logprobs_come_in_chunks_and_are_given_whole(front, kind):
    prompt = ids_of("hello")
    state = front.open(prompt, prompt_logprobs=1, n=2, output_kind=kind)
    key = key_of(state)
    ready, _ = front.step(prompt_logprobs=[(key, prompt_logprobs(1, prompt[1:3], 4))])
    assert ready == []
    front.step((key_of(state, 1), ids_of("x"), Finish.LENGTH))
    early = state.take()
    assert (early is None) == (kind == FINAL_ONLY)
    assert early is None or early.prompt_logprobs is None, "they are not complete"
    front.step((key, ids_of("y"), Finish.NONE), prompt_logprobs=[(key, prompt_logprobs(3, prompt[3:], 4))])
    outputs = [state.take()]
    front.step((key, ids_of("z"), Finish.LENGTH))
    outputs.append(state.take())
    given = [output.prompt_logprobs for output in outputs if output is not None and output.prompt_logprobs]
    assert len(given) == (2 if kind == CUMULATIVE else 1)
    assert given[0][0] is None
    assert [list(score) for score in given[0][1:]] == [[token, token + 1] for token in prompt[1:]]
    assert given[0][1][prompt[1]].decoded_token == "e"


def test_a_prompt_of_one_token_has_no_score(front):
    state = front.open([9], prompt_logprobs=3)
    front.step((key_of(state), ids_of("y"), Finish.LENGTH))
    assert state.take().prompt_logprobs == [None]


def test_cached_tokens_are_those_of_the_first_sample(front):
    state = front.open(n=2)
    front.step(num_cached=[(key_of(state), 16), (key_of(state, 1), 32)])
    front.step((key_of(state), ids_of("a"), Finish.LENGTH), (key_of(state, 1), ids_of("a"), Finish.LENGTH))
    assert state.take().num_cached_tokens == 16


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_what_is_closed_ends_as_aborted_with_what_it_had_and_takes_nothing_more(front, kind):
    state, other = front.open(output_kind=kind, n=2), front.open(output_kind=kind)
    keys = [key_of(state), key_of(state, 1)]
    front.step((keys[0], ids_of("ab"), Finish.NONE), (keys[1], ids_of("x"), Finish.LENGTH))
    assert front.outputs.close([state]) == keys[:1], "sample 1 had ended"
    assert front.outputs.close([state]) == []
    newcomer = front.open(output_kind=kind)
    front.step((keys[0], ids_of("late"), Finish.LENGTH), (key_of(newcomer), ids_of("n"), Finish.LENGTH))
    output = state.take()
    told = [(piece.text, piece.finish_reason) for piece in output.outputs]
    assert (output.finished, told) == (True, [("ab", "abort"), ("x", "length")])
    assert newcomer.take().outputs[0].text == "n", "the slot's former owner leaves nothing behind"
    assert front.outputs.num_live == 1
    front.outputs.close([other])
    assert front.outputs.num_live == 0


def test_a_slot_whose_owner_ended_is_reused_for_another_key(front):
    keys = set()
    for _ in range(300):
        state = front.open()
        keys.add(key_of(state))
        front.step((key_of(state), ids_of("a"), Finish.LENGTH))
        assert state.take().outputs[0].text == "a"
    assert len(keys) == 300


def test_many_requests_of_many_lengths_keep_their_tokens_apart(tokenizer):
    front, rng = Front(tokenizer), np.random.default_rng(0)
    states = [front.open(output_kind=FINAL_ONLY) for _ in range(700)]
    replies = [rng.integers(3, 250, size=rng.integers(1, 150)).tolist() for _ in states]
    for position in range(150):
        news = [
            (key_of(state), [reply[position]], Finish.LENGTH if position + 1 == len(reply) else Finish.NONE)
            for state, reply in zip(states, replies, strict=True)
            if position < len(reply)
        ]
        front.step(*news)
    assert [list(state.take().outputs[0].token_ids) for state in states] == replies


def test_steps_cost_no_python_for_samples_that_nobody_watches(tokenizer, monkeypatch):
    front = Front(tokenizer)
    quiet = [front.open(output_kind=FINAL_ONLY) for _ in range(50)]
    stream, watched = front.open(output_kind=DELTA), front.open(output_kind=DELTA, stop=["zz"])
    looked_at, told = [], []
    advance = type(watched.samples[0]).advance
    monkeypatch.setattr(
        type(watched.samples[0]), "advance", lambda s, *a: (looked_at.append(s), advance(s, *a))[1]
    )
    for token in ids_of("abc"):
        news = ((key_of(state), [token], Finish.NONE) for state in [*quiet, stream, watched])
        told.append(stream in front.step(*news)[0])
    assert looked_at == watched.samples * 3
    assert told == [True, False, False], "a reader that is behind is told once"
    assert stream.take().outputs[0].text == "abc" and stream.take() is None
    ready, _ = front.step((key_of(stream), ids_of("d"), Finish.NONE))
    assert ready == [stream] and stream.take().outputs[0].token_ids == ids_of("d")


def test_each_sample_is_an_engine_request_with_its_own_key_and_seed(front):
    state = front.open(n=MAX_N, seed=11, prompt_logprobs=0)
    requests = state.engine_requests()
    assert len({request.key for request in requests}) == len({request.seed for request in requests}) == MAX_N
    assert requests[0].seed == 11, "the first sample is what n=1 gives"
    assert all(-(2**63) <= request.seed < 2**63 for request in requests)
    assert [request.params.prompt_logprobs for request in requests[:2]] == [0, None]
    again = front.open(n=2, seed=11).engine_requests()
    assert [request.seed for request in again] == [request.seed for request in requests[:2]]


def test_times_of_a_request_are_in_order(front):
    for kind in RequestOutputKind:
        state = front.open(output_kind=kind)
        front.step((key_of(state), ids_of("a"), Finish.NONE))
        front.step((key_of(state), ids_of("b"), Finish.LENGTH))
        times = state.take().metrics
        assert times.arrival_time <= times.first_token_time < times.finished_time


def test_a_requests_drafts_are_counted_to_its_end_whoever_ends_it(front: Front) -> None:
    def drafted(*counts: int) -> np.ndarray:
        return np.array(counts, np.int32)

    watched, quiet = front.open(stop=["AB"]), front.open(output_kind=FINAL_ONLY)
    keys = key_of(watched), key_of(quiet)
    tokens = ids_of("xABy")
    # Three drafts of four are taken; the stop string ends within them. The other takes none of two.
    _, stopped = front.step(
        (keys[0], tokens, Finish.NONE), (keys[1], tokens[:1], Finish.NONE), drafted=drafted(4, 2)
    )
    assert stopped == [keys[0]]
    front.step((keys[0], tokens, Finish.NONE), (keys[1], tokens[:2], Finish.LENGTH), drafted=drafted(4, 1))
    output = watched.take()
    assert output is not None and output.outputs[0].token_ids == tokens[:3]
    assert (watched.metrics.draft_tokens, watched.metrics.accepted_tokens) == (4, 3)
    count = UsageCount()
    count.add(0, output)
    details = {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 1}
    assert count.usage()["completion_tokens_details"] == details
    assert count.usage(2)["completion_tokens_details"] == {"reasoning_tokens": 2, **details}
    assert (quiet.metrics.draft_tokens, quiet.metrics.accepted_tokens) == (3, 1)
    again = front.open(output_kind=FINAL_ONLY)  # in a slot that was used
    front.step((key_of(again), tokens, Finish.LENGTH))
    assert (again.metrics.draft_tokens, again.metrics.accepted_tokens) == (0, 0)
