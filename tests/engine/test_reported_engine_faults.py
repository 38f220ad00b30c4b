"""Inputs that broke other engines, through the Python API and the flags. Numbers are rows of the list of
reported faults."""

import json

import pytest
from drafters import FixedDrafting
from harness import make_core, make_request, run
from text_model import ids_of, make_text_model

from slipstream import LLM, BadRequest, SamplingParams
from slipstream.cli.main import main
from slipstream.config.args import EngineArgs
from slipstream.engine.plan import make_plan

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
SMALL = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 8, "num_gpu_blocks_override": 100}


@pytest.fixture(scope="module")
def model(tiny_model):
    return make_text_model(tiny_model)


def test_all_logprobs_of_a_large_vocabulary_are_refused_by_the_cap_and_as_many_as_it_served(tiny_model):
    """Row 25."""
    vocab = 151_936
    llm = LLM(str(tiny_model("llama", vocab_size=vocab)), skip_tokenizer_init=True, **SMALL)
    prompts = [[5, 6, number] for number in range(8)]
    for field in ("logprobs", "prompt_logprobs"):
        for count in (-1, vocab, 21):
            params = SamplingParams(max_tokens=2, detokenize=False, **{field: count})
            with pytest.raises(BadRequest, match=rf"^{field}={count}: must be at most max_logprobs=20"):
                llm.generate(prompts, params, use_tqdm=False)
    params = SamplingParams(max_tokens=2, logprobs=20, ignore_eos=True, detokenize=False)
    for output in llm.generate(prompts, params, use_tqdm=False):
        assert [len(scores) in (20, 21) for scores in output.outputs[0].logprobs] == [True, True]
    llm.close()


@pytest.mark.parametrize("speculative_config", [None, NGRAM])
def test_samples_differ_and_repeat_in_deterministic_mode(model, speculative_config):
    """Row 41: with --batch-invariant."""
    llm = LLM(str(model), batch_invariant=True, speculative_config=speculative_config, **SMALL)
    for seed in (None, 7):
        params = SamplingParams(n=8, temperature=1.0, seed=seed, max_tokens=16, ignore_eos=True)
        first, again = (llm.generate("say", params, use_tqdm=False)[0].outputs for _ in range(2))
        assert len({one.text for one in first}) == 8
        assert ([one.text for one in first] == [one.text for one in again]) == (seed is not None)
    llm.close()


HYBRIDS = ["JambaForCausalLM", "Qwen3NextForCausalLM", "NemotronHForCausalLM", "MambaForCausalLM"]


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_model_with_recurrent_layers_is_refused_by_name(model, tmp_path, name):
    """Row 49: none is served, so none can resume from an old state."""
    config = json.loads((model / "config.json").read_text()) | {"architectures": [name], "model_type": "x"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=name):
        make_plan(EngineArgs(model=str(tmp_path)))


def test_as_many_drafts_are_taken_with_steps_in_flight_as_without(model):
    """Row 55."""
    taken, said = [], []
    for asynchronous in (True, False):
        core = make_core(model, speculative_config=NGRAM, async_scheduling=asynchronous)
        core.scheduler._drafting = FixedDrafting(4)
        few = {"temperature": 0.0, "allowed_token_ids": ids_of("more")}
        params = SamplingParams(max_tokens=120, ignore_eos=True, **few)
        requests = [make_request(core, key, ids_of(f"{key} more and " * 4), params) for key in range(8)]
        got, stats = run(core, requests), core.scheduler.stats()
        core.close()
        taken.append(stats.accepted_tokens / stats.draft_tokens)
        said.append([got[key].tokens for key in range(8)])
    assert said[0] == said[1]
    assert min(taken) > 0.2 and abs(taken[0] - taken[1]) < 0.05


def test_pipelines_of_devices_are_refused_at_the_start(model, capsys):
    """Row 59."""
    for command in ("serve", "generate"):
        with pytest.raises(SystemExit) as ended:
            main([command, str(model), "--pipeline-parallel-size", "2"])
        assert ended.value.code == 2 and "--pipeline-parallel-size" in capsys.readouterr().err
    with pytest.raises((TypeError, ValueError), match="pipeline_parallel_size"):
        LLM(str(model), pipeline_parallel_size=2)
