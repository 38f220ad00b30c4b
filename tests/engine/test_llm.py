"""LLM on a tiny model that has a tokenizer: arguments, outputs and errors as vLLM's users know them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from text_model import VOCAB, ids_of, make_text_model
from transformers import AutoModelForCausalLM

import slipstream
from slipstream import LLM, BadRequest, RequestOutputKind, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8)
SMALL = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 16, "num_gpu_blocks_override": 65}
MODEL_END = 2


@pytest.fixture(scope="module")
def folder(tiny_model) -> Path:
    return make_text_model(tiny_model)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    made = LLM(folder, **SMALL)
    yield made
    made.close()


def text_of(ids: list[int]) -> str:
    return bytes(token - 3 for token in ids if 3 <= token < 259).decode("utf-8", "replace")


def generate(llm: LLM, prompts, params=GREEDY, **arguments):
    return llm.generate(prompts, params, use_tqdm=False, **arguments)


def test_greedy_answers_are_those_of_transformers(llm, folder):
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = ["Hello", "a much longer prompt than the first", "日本語"]
    outputs = generate(llm, prompts)
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([ids_of(prompt)])
        ends = {"eos_token_id": MODEL_END, "pad_token_id": 0}
        whole = theirs.generate(ids, do_sample=False, max_new_tokens=8, **ends)
        new = whole[0, ids.shape[1] :].tolist()
        (piece,) = output.outputs
        assert (output.prompt, output.prompt_token_ids) == (prompt, ids_of(prompt))
        assert list(piece.token_ids) == new
        assert piece.text == text_of(new)
        assert piece.finish_reason == ("stop" if new[-1] == MODEL_END else "length")


def test_outputs_are_in_the_order_of_prompts_whatever_their_lengths(llm):
    prompts = [f"prompt {i}" for i in range(40)]
    params = [SamplingParams(temperature=0, max_tokens=1 + i * 7 % 23, ignore_eos=True) for i in range(40)]
    outputs = generate(llm, prompts, params)
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [one.max_tokens for one in params]
    alone = [generate(llm, prompt, one)[0] for prompt, one in zip(prompts[:5], params, strict=False)]
    assert [output.outputs[0].token_ids for output in alone] == [o.outputs[0].token_ids for o in outputs[:5]]
    assert len({output.request_id for output in [*outputs, *alone]}) == 45


@pytest.mark.parametrize(
    ("prompts", "want"),
    [
        ("hi", ["hi"]),
        (["hi"], ["hi"]),
        (ids_of("hi"), ["hi"]),
        (np.array(ids_of("hi")), ["hi"]),
        ({"prompt": "hi"}, ["hi"]),
        ({"prompt_token_ids": ids_of("hi")}, ["hi"]),
        ([ids_of("hi"), "ho", {"prompt_token_ids": tuple(ids_of("hu"))}], ["hi", "ho", "hu"]),
        ([], []),
    ],
)
def test_one_prompt_or_a_list_of_any_kind(llm, prompts, want):
    outputs = generate(llm, prompts)
    assert [output.prompt_token_ids for output in outputs] == [ids_of(text) for text in want]


def test_no_params_are_vllms_defaults(llm):
    (output,) = llm.generate("hi", use_tqdm=False)
    assert 1 <= len(output.outputs[0].token_ids) <= 16


def test_samples_of_a_request_differ_and_repeat_with_its_seed(llm):
    """Also where nobody gave a seed: samples never share one."""
    seeded = SamplingParams(n=8, temperature=1, seed=7, max_tokens=10, ignore_eos=True)
    first, again = generate(llm, ["tell", "tell"], seeded)
    samples = [tuple(piece.token_ids) for piece in first.outputs]
    assert [piece.index for piece in first.outputs] == list(range(8))
    assert len(set(samples)) == 8
    assert samples == [tuple(piece.token_ids) for piece in again.outputs]
    (alone,) = generate(llm, "tell", seeded.clone(n=1))
    assert tuple(alone.outputs[0].token_ids) == samples[0]
    unseeded = seeded.clone(seed=None)
    drawn = [tuple(p.token_ids) for o in generate(llm, ["tell", "tell"], unseeded) for p in o.outputs]
    assert len(set(drawn)) == 16


def test_a_seeded_request_says_the_same_five_times_alone_and_among_others(llm):
    seeded = SamplingParams(seed=11, temperature=1.3, max_tokens=12, ignore_eos=True)
    alone = [tuple(generate(llm, "tell", seeded)[0].outputs[0].token_ids) for _ in range(5)]
    others = SamplingParams(temperature=1.3, max_tokens=12, ignore_eos=True)
    mixed = [seeded if i % 2 else others for i in range(10)]
    outputs = generate(llm, ["tell" if i % 2 else f"other {i}" for i in range(10)], mixed)
    among = [tuple(output.outputs[0].token_ids) for output in outputs[1::2]]
    assert len(set(alone + among)) == 1


def test_an_engine_of_the_same_seed_repeats_unseeded_requests(folder, llm):
    params = SamplingParams(temperature=1, max_tokens=10)

    def answers(**changes) -> list[list[int]]:
        made = LLM(folder, **SMALL, **changes)
        outputs = generate(made, ["a", "b"], params)
        made.close()
        return [list(output.outputs[0].token_ids) for output in outputs]

    assert answers(seed=5) == answers(seed=5) != answers(seed=6)


def test_stop_strings_end_the_text_before_them(llm):
    params = GREEDY.clone(max_tokens=100, ignore_eos=True)
    (whole,) = generate(llm, "Hello", params)
    text = whole.outputs[0].text
    stop = text[20:23]
    end = text.index(stop)
    (stopped,) = generate(llm, "Hello", params.clone(stop=stop))
    (piece,) = stopped.outputs
    assert (piece.text, piece.finish_reason, piece.stop_reason) == (text[:end], "stop", stop)
    (kept,) = generate(llm, "Hello", params.clone(stop=[stop], include_stop_str_in_output=True))
    assert kept.outputs[0].text == text[: end + len(stop)]
    assert list(piece.token_ids) == whole.outputs[0].token_ids[: len(piece.token_ids)]


def test_stop_token_ids_are_named_as_the_reason(llm):
    params = GREEDY.clone(max_tokens=30, ignore_eos=True)
    ids = list(generate(llm, "Hello", params)[0].outputs[0].token_ids)
    stop = next(token for token in ids if ids.index(token) >= 3)
    (output,) = generate(llm, "Hello", params.clone(stop_token_ids=[stop]))
    (piece,) = output.outputs
    assert (piece.finish_reason, piece.stop_reason) == ("stop", stop)
    assert list(piece.token_ids) == ids[: ids.index(stop) + 1]
    assert piece.text == text_of(ids[: ids.index(stop)])


def test_logprobs_are_those_of_transformers(llm, folder):
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    (output,) = generate(llm, "Hello there", params)
    (piece,) = output.outputs
    prompt, new = ids_of("Hello there"), list(piece.token_ids)
    with torch.no_grad():
        scores = theirs(torch.tensor([prompt + new])).logits[0].log_softmax(-1)
    given = [*output.prompt_logprobs, *piece.logprobs]
    assert given[0] is None
    assert len(given) == len(prompt) + len(new)
    for position, token in enumerate((prompt + new)[1:], 1):
        want, found = scores[position - 1], given[position]
        assert next(iter(found)) == token
        for other, one in found.items():
            assert one.logprob == pytest.approx(want[other].item(), abs=1e-4)
            assert one.rank == (want > want[other]).sum().item() + 1
    assert piece.cumulative_logprob == pytest.approx(
        sum(scores[len(prompt) - 1 + i][token].item() for i, token in enumerate(new)), abs=1e-3
    )


def test_scoring_only_the_prompt_makes_no_token(llm):
    (output,) = generate(llm, "Hello", SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert (output.outputs[0].text, list(output.outputs[0].token_ids)) == ("", [])
    assert output.outputs[0].finish_reason == "length"
    assert [score and list(score) for score in output.prompt_logprobs] == [
        None, *([token] for token in ids_of("ello")),
    ]


def test_requests_are_checked_before_any_of_them_runs(llm):
    before = llm.get_tokenizer().encode("x")
    with pytest.raises(ValueError, match="stop_token_ids=400: token id is out of vocabulary"):
        generate(llm, ["fine", "bad"], [GREEDY, GREEDY.clone(stop_token_ids=[400], min_tokens=2)])
    with pytest.raises(BadRequest, match=r"needs 66 KV blocks|must fit max_model_len"):
        generate(llm, [[5] * 1050])
    with pytest.raises(ValueError, match=r"n=3000000: must be an integer, at least 1 and at most 128"):
        SamplingParams(n=3_000_000)
    with pytest.raises(ValueError, match="2 for 3 prompts"):
        generate(llm, ["a", "b", "c"], [GREEDY] * 2)
    with pytest.raises(ValueError, match="priority"):
        generate(llm, ["a"], priority=[1, 2])
    with pytest.raises(TypeError, match="sampling_params"):
        generate(llm, ["a"], [{"temperature": 0}])
    with pytest.raises(ValueError, match="allowed_token_ids"):
        generate(llm, "a", SamplingParams(allowed_token_ids=ids_of("X"), bad_words=["X"]))
    assert generate(llm, [before])[0].finished


def test_a_prompt_that_never_fits_is_refused_and_short_ones_are_served(folder):
    llm = LLM(folder, **(SMALL | {"num_gpu_blocks_override": 9}))
    with pytest.raises(BadRequest, match=r"needs 9 KV blocks of 16 tokens .* the pool has 8"):
        generate(llm, [[5] * 140], SamplingParams(max_tokens=4))
    assert len(generate(llm, "short")[0].outputs[0].token_ids) > 0
    llm.close()


def test_a_call_that_is_interrupted_while_a_step_runs_leaves_nothing_behind(llm, monkeypatch):
    core = llm._client.core
    step, waits_until = core._executor.step, []

    class Interrupted:
        def __init__(self, handle):
            self._handle = handle

        def __getattr__(self, name):
            return getattr(self._handle, name)

        def wait(self):
            if waits_until and self.step >= waits_until[0]:
                waits_until.clear()
                raise KeyboardInterrupt
            return self._handle.wait()

    monkeypatch.setattr(core._executor, "step", lambda plan: Interrupted(step(plan)))
    expected = generate(llm, "Hello", GREEDY.clone(max_tokens=3))[0].outputs[0].text
    for _ in range(2):
        waits_until.append(core.scheduler.stats().steps + 5)
        with pytest.raises(KeyboardInterrupt):
            generate(llm, [f"p {i}" for i in range(30)], GREEDY.clone(max_tokens=100))
    assert generate(llm, "Hello", GREEDY.clone(max_tokens=3))[0].outputs[0].text == expected
    assert (core.scheduler.num_running, core.scheduler.num_waiting) == (0, 0)
    core.scheduler.check_invariants()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """As at a terminal: a process in the background is started with its signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_a_call_between_two_steps_wherever_it_comes(llm):
    """In planning, in launching, in taking results: the engine goes on as if nothing had happened."""
    core = llm._client.core
    expected = generate(llm, "Hello", GREEDY.clone(max_tokens=3))[0].outputs[0].text
    for owner, name in (
        (core.scheduler, "schedule"), (core._executor, "step"), (core.scheduler, "apply"),
        (core._log, "tell"),
    ):  # fmt: skip
        real, calls = getattr(owner, name), []

        def interrupted(*args, real=real, calls=calls, **fields):
            calls.append(1)
            if len(calls) == 7:
                signal.raise_signal(signal.SIGINT)
            return real(*args, **fields)

        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(owner, name, interrupted)
            generate(llm, [f"p {i}" for i in range(30)], GREEDY.clone(max_tokens=100))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert generate(llm, "Hello", GREEDY.clone(max_tokens=3))[0].outputs[0].text == expected, name
    core.scheduler.check_invariants()


def test_an_interrupted_call_leaves_nothing_behind(llm, monkeypatch):
    scheduler = llm._client.core.scheduler
    receive, calls = llm._client.receive, []

    def interrupted(timeout: float | None = None):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return receive(timeout)

    monkeypatch.setattr(llm._client, "receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(llm, [f"p {i}" for i in range(30)], GREEDY.clone(max_tokens=100, n=2))
    monkeypatch.undo()
    (output,) = generate(llm, "Hello")
    assert output.finished
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)
    scheduler.check_invariants()


def test_chat_is_the_template_then_generate(llm):
    turns = [{"role": "user", "content": "Hi"}]
    (output,) = llm.chat(turns, GREEDY, use_tqdm=False)
    assert output.prompt == "<user>Hi\n<assistant>"
    assert output.outputs[0].token_ids == generate(llm, "<user>Hi\n<assistant>")[0].outputs[0].token_ids
    outputs = llm.chat([turns, [*turns, {"role": "assistant", "content": "Ho"}]], GREEDY, use_tqdm=False,
                       add_generation_prompt=False)
    assert [output.prompt for output in outputs] == ["<user>Hi\n", "<user>Hi\n<assistant>Ho\n"]
    (output,) = llm.chat(turns, GREEDY, use_tqdm=False, chat_template="{{ messages[0].content }}!")
    assert output.prompt == "Hi!"
    with pytest.raises(BadRequest, match="no tools here"):
        llm.chat([{"role": "tool", "content": "x"}], GREEDY, use_tqdm=False)


def test_progress_counts_requests_and_can_be_any_bar(llm):
    class Bar:
        def __init__(self, **arguments):
            self.total, self.done, self.postfix, self.closed = arguments["total"], 0, "", False

        def update(self, count):
            self.done += count

        def close(self):
            self.closed = True

    bars = []
    llm.generate(["a", "b", "c"], GREEDY, use_tqdm=lambda **a: bars.append(Bar(**a)) or bars[0])
    (bar,) = bars
    assert (bar.total, bar.done, bar.closed) == (3, 3, True)
    assert "tok/s" in bar.postfix


def test_the_default_bar_shows_tokens_a_second(llm, capsys):
    llm.generate(["a", "b"], GREEDY)
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "output: " in shown


def test_output_kind_of_the_params_makes_no_difference_to_generate(llm):
    wanted = [generate(llm, "a", GREEDY.clone(output_kind=kind))[0].outputs for kind in RequestOutputKind]
    assert wanted[0] == wanted[1] == wanted[2]


def test_unknown_arguments_and_flags_that_cannot_be_honoured_are_named(folder, tmp_path):
    with pytest.raises(TypeError, match=r"LLM\(\) got an unexpected keyword argument 'tensor_parallel'"):
        LLM(folder, tensor_parallel=2)
    with pytest.raises(ValueError, match="--dtype"):
        LLM(folder, dtype="int3")
    with pytest.raises(ValueError, match="nowhere"):
        LLM(tmp_path / "nowhere")


def test_without_a_tokenizer_ids_go_in_and_out(folder):
    """The arguments of the benchmark that this engine shares with vLLM."""
    llm = LLM(model=str(folder), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
              max_model_len=128, max_num_seqs=8, gpu_memory_utilization=0.8, enable_prefix_caching=False,
              kv_cache_memory_bytes=2**22, seed=0)
    prompts = [{"prompt_token_ids": list(range(5, 5 + n))} for n in (3, 40)]
    params = [
        SamplingParams(max_tokens=n, ignore_eos=True, detokenize=False, temperature=0.0) for n in (9, 4)
    ]
    outputs = generate(llm, prompts, params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 4]
    assert [output.outputs[0].text for output in outputs] == ["", ""]
    with pytest.raises(ValueError, match="skip_tokenizer_init"):
        llm.get_tokenizer()
    with pytest.raises(BadRequest, match="must be token ids"):
        generate(llm, "text")
    llm.close()


def test_importing_the_package_is_light_and_its_names_are_there():
    script = (
        "import sys, slipstream; before = set(sys.modules); names = [getattr(slipstream, n) for n in "
        "slipstream.__all__]; import json; print(json.dumps([slipstream.__version__, len(names), "
        "[m for m in ('torch', 'transformers', 'numpy') if m in before], "
        "[m for m in ('torch', 'transformers') if m in sys.modules]]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True,
                          cwd=Path(slipstream.__file__).parents[1])
    version, names, at_import, after = json.loads(done.stdout)
    assert (version, at_import, after) == (slipstream.__version__, [], [])
    assert names == len(slipstream.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = slipstream.Nothing


def test_the_vocabulary_of_the_tests_has_ids_that_no_token_has(llm):
    """Such an id may be sampled: it has no text and does no harm."""
    assert llm.get_tokenizer().vocab_size < VOCAB
    (output,) = generate(llm, "a", GREEDY.clone(allowed_token_ids=[VOCAB - 1], logprobs=0))
    assert (output.outputs[0].text, set(output.outputs[0].token_ids)) == ("", {VOCAB - 1})
