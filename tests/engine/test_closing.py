"""An engine that is closed, while somebody still has the LLM."""

import gc
import weakref

import pytest

from slipstream import LLM, SamplingParams
from slipstream.contracts.errors import EngineDeadError

PROMPT = {"prompt_token_ids": [5, 6, 7]}
PARAMS = SamplingParams(max_tokens=9, detokenize=False, ignore_eos=True)


def make(tiny_model, **more):
    """An LLM, and references to what holds its memory."""
    model = tiny_model("llama")
    llm = LLM(model, skip_tokenizer_init=True, max_model_len=64, num_gpu_blocks_override=9, **more)
    runner = llm._client.core._executor.runner
    return llm, [weakref.ref(part) for part in (runner, runner.table, runner._tick._attention)]


def test_a_closed_engine_has_given_its_memory_back_and_says_so(tiny_model):
    llm, parts = make(tiny_model)
    [output] = llm.generate(PROMPT, PARAMS, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 9
    gc.disable()  # nothing of it may wait for a collection
    try:
        llm.close()
        assert [part() for part in parts] == [None] * 3
    finally:
        gc.enable()
    with pytest.raises(EngineDeadError, match="this LLM is closed"):
        llm.generate(PROMPT, PARAMS, use_tqdm=False)
    llm.close()


@pytest.mark.parametrize("ahead", [False, True])
def test_closing_after_a_step_that_failed_is_no_other(tiny_model, monkeypatch, ahead):
    llm, parts = make(tiny_model, async_scheduling=ahead)
    tick = type(llm._client.core._executor.runner._tick)
    run, steps = tick.run, []

    def fail(self, work):
        steps.append(work)
        if len(steps) == 5:
            raise ValueError("a kernel is broken")
        return run(self, work)

    monkeypatch.setattr(tick, "run", fail)
    with pytest.raises(ValueError, match="a kernel is broken"):
        llm.generate(PROMPT, PARAMS, use_tqdm=False)
    steps.clear()
    llm.close()
    gc.collect()  # the error's frames have had the parts
    assert [part() for part in parts] == [None] * 3
    with pytest.raises(EngineDeadError, match="this LLM is closed"):
        llm.generate(PROMPT, PARAMS, use_tqdm=False)
