"""An engine that is closed, while somebody still has the LLM."""

import gc
import weakref

import pytest

from slipstream import LLM, SamplingParams
from slipstream.contracts.errors import EngineDeadError


def test_a_closed_engine_has_given_its_memory_back_and_says_so(tiny_model):
    llm = LLM(tiny_model("llama"), skip_tokenizer_init=True, max_model_len=64, num_gpu_blocks_override=9)
    prompt = {"prompt_token_ids": [5, 6, 7]}
    params = SamplingParams(max_tokens=4, detokenize=False, ignore_eos=True)
    [output] = llm.generate(prompt, params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4
    runner = llm._client.core._executor.runner
    parts = [weakref.ref(part) for part in (runner, runner.table, runner._tick._attention)]
    del runner
    gc.disable()  # nothing of it may wait for a collection
    try:
        llm.close()
        assert [part() for part in parts] == [None] * 3
    finally:
        gc.enable()
    with pytest.raises(EngineDeadError, match="this LLM is closed"):
        llm.generate(prompt, params, use_tqdm=False)
    llm.close()
