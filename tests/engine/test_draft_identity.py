"""The real model, greedy, in fp32: real prompts (code, chat, summaries, repetitions) have the same tokens and
finish reasons with each method as without, though rows preempt each other, prompts come in pieces and other
requests are aborted in between.

A few prompts in the suite. SLIPSTREAM_TEST_IDENTITY=full takes 200, on every method; then
SLIPSTREAM_TEST_DRAFTERS=eagle3=FOLDER,medusa=FOLDER adds methods whose drafters are files.
"""

from __future__ import annotations

import inspect
import itertools
import json
import os
import random
import textwrap
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import pytest
from drafters import FixedDrafting
from harness import Collected, make_core, make_request, run
from safetensors import safe_open
from safetensors.torch import save_file

from slipstream.contracts.outputs import EngineOutputs
from slipstream.contracts.request import EngineRequest
from slipstream.contracts.sampling_params import SamplingParams
from slipstream.engine.core import EngineCore
from slipstream.text.chat_template import load_chat_template
from slipstream.text.tokenizer import load_tokenizer

FULL = os.environ.get("SLIPSTREAM_TEST_IDENTITY") == "full"
COUNT, OUTPUT = (200, 48) if FULL else (8, 20)
ABORTED = 10_000  # keys from here on are aborted
# Two sums of float32 numbers in another order are alike to this, in nats.
TIE = 1e-3
# So few rows and tokens of a step that prompts wait and are cut.
TIGHT = {"max_num_seqs": 8, "max_num_batched_tokens": 96}
PREEMPT_EVERY = 6  # steps
DRAFTERS = dict(
    entry.split("=", 1) for entry in os.environ.get("SLIPSTREAM_TEST_DRAFTERS", "").split(",") if entry
)
METHODS = ["ngram", "suffix", *(["draft_model", *DRAFTERS] if FULL else [])]


def texts(count: int) -> list[str]:
    """A quarter each of code to edit, questions, passages to sum up and lists that go on."""
    chance, names = random.Random(0), sorted(topics)
    members = [member for part in (textwrap, inspect, random) for _, member in inspect.getmembers(part)]
    sources = [inspect.getsource(member) for member in members if inspect.isfunction(member)]
    functions = [source for source in sources if 200 < len(source) < 700]
    made = []
    for number in range(count // 4):
        name = names[number * len(names) // (count // 4)]
        passage = " ".join(topics[name].split())[: 300 + 40 * (number % 8)]
        word = chance.choice(["stone", "river", "lamp", "bread"])
        lines = [f"{n}. The {word} has number {n}." for n in range(1, 9)]
        made += [
            f"Add a docstring to this function and print all of it:\n\n{functions[number % len(functions)]}",
            f"What does Python's documentation say about {name.lower().replace('_', ' ')}?",
            f"Sum up this text in its own words:\n\n{passage}",
            "\n".join(["Go on with this list up to 40:", *lines]),
        ]
    return made


class Case(NamedTuple):
    model: Path
    prompts: list[list[int]]
    expected: dict[int, Collected]


def requests(core: EngineCore, prompts: list[list[int]], **fields: Any) -> list[EngineRequest]:
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, **fields)
    return [make_request(core, key, prompt, params) for key, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def case(demo_model) -> Iterator[Case]:
    """The texts without drafts, in a pool that holds them all."""
    tokenizer = load_tokenizer(str(demo_model.folder))
    template = load_chat_template(None, tokenizer)
    assert template is not None
    prompts = [
        tokenizer.encode(template([{"role": "user", "content": text}]), add_special_tokens=False)
        for text in texts(COUNT)
    ]
    core = make_core(demo_model.folder, max_num_seqs=8, max_model_len=512)
    yield Case(demo_model.folder, prompts, run(core, requests(core, prompts, logprobs=2)))
    core.close()


@pytest.fixture(scope="module")
def cut(demo_model, tmp_path_factory) -> Path:
    """The model's first two layers."""
    folder = tmp_path_factory.mktemp("cut")
    config = json.loads((demo_model.folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    kept = {}
    for file in demo_model.folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                parts = name.split(".")
                if "layers" not in parts or int(parts[parts.index("layers") + 1]) < 2:
                    kept[name] = opened.get_tensor(name)
    save_file(kept, folder / "model.safetensors")
    return folder


def config_of(method: str, cut: Path) -> dict[str, Any]:
    if method == "ngram":
        return {"method": method, "prompt_lookup_min": 2, "prompt_lookup_max": 4, "num_speculative_tokens": 8}
    if method == "suffix":
        return {"method": method, "num_speculative_tokens": 12}
    return {"method": method, "model": str({"draft_model": cut, **DRAFTERS}[method])}


@pytest.mark.parametrize("method", METHODS)
def test_texts_are_those_of_plain_decoding(case: Case, cut: Path, method: str) -> None:
    core = make_core(case.model, max_model_len=512, speculative_config=config_of(method, cut), **TIGHT)
    # Always as many as there are: the policy may find that on this machine they don't pay.
    core.scheduler._drafting = FixedDrafting(core.scheduler.config.tokens_per_step - 1)
    wanted = requests(core, case.prompts)
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT)
    backwards = [prompt[::-1] for prompt in case.prompts[::6]]
    gone = [make_request(core, ABORTED + key, prompt, params) for key, prompt in enumerate(backwards)]
    arrive_at = {request.key: place for place, request in enumerate(wanted)}
    arrive_at |= {request.key: 6 * place + 1 for place, request in enumerate(gone)}
    abort_at = {request.key: arrive_at[request.key] + 6 for request in gone}
    preempt_now_and_then(core)
    got = run(core, [*wanted, *gone], arrive_at, abort_at)
    stats = core.scheduler.stats()
    core.close()
    ties = sum(differs(got[request.key], case.expected[request.key]) for request in wanted)
    assert ties <= COUNT // 50
    assert stats.preemptions > 0 and stats.accepted_tokens > COUNT // 2
    print(f"\n{method}: {stats.draft_tokens} drafts, {stats.accepted_tokens} taken, {ties} ties, "
          f"{stats.preemptions} preemptions")  # fmt: skip


def preempt_now_and_then(core: EngineCore) -> None:
    """The newest request leaves its row, as where blocks run out, and comes back."""
    step, numbers = core.step, itertools.count(1)

    def stepped() -> EngineOutputs | None:
        if next(numbers) % PREEMPT_EVERY == 0 and core.scheduler.num_running > 1:
            core.scheduler._preempt()
        return step()

    core.step = stepped


def differs(got: Collected, want: Collected) -> bool:
    """Whether they part at a tie of the two likeliest tokens; anywhere else that is an error."""
    if (got.tokens, got.finish) == (want.tokens, want.finish):
        return False
    place = next(n for n, pair in enumerate(zip(got.tokens, want.tokens, strict=False)) if pair[0] != pair[1])
    values = sorted(want.logprobs[place].values())
    assert values[-1] - values[-2] < TIE, f"token {place}: {got.tokens[place]}, not {want.tokens[place]}"
    return True
