"""Which runner, and whether async, for many flags: ours and vLLM 0.31.0's. Every expected value was derived
by hand from the written rules (docs/which-runner.md), row by row."""

from __future__ import annotations

import pytest
from explained import CPU, H200, NO_TRITON, Explain, explain, model

from slipstream.config.device import DeviceFacts

__all__ = ["explain", "model"]  # fixtures

CUDA = "--device cuda "
COMPILE = """--compilation-config '{"mode": "stock_torch_compile"}' """
PARALLEL_SEQUENCES = """--compilation-config '{"pass_config": {"enable_sp": true}}' """


def by(method: str, more: str = "") -> str:
    return f"""--speculative-config '{{"method": "{method}", "num_speculative_tokens": 3{more}}}' """


IN_PARALLEL = ', "parallel_drafting": true'
UNPADDED = ', "disable_padded_drafter_batch": true'

# Flags, variables, ours, vLLM's; for a CUDA machine with Triton.
ON_CUDA = [
    ("", "", "v2 on", "v2 on"),
    ("--model-runner auto", "", "v2 on", "v2 on"),
    ("--model-runner v2", "", "v2 on", "v2 on"),
    ("--model-runner v1", "", "v1 off", "v2 on"),
    ("--async-scheduling", "", "v2 on", "v2 on"),
    ("--no-async-scheduling", "", "v2 off", "v2 off"),
    ("--model-runner v1 --no-async-scheduling", "", "v1 off", "v2 off"),
    ("--model-runner v1 --max-steps-in-flight 1", "", "v1 off", "v2 on"),
    ("--model-runner v1 --enforce-eager", "", "v1 off", "v2 on"),
    ("--max-steps-in-flight 1", "", "v2 off", "v2 on"),
    ("--max-steps-in-flight 3", "", "v2 on", "v2 on"),
    ("--max-steps-in-flight 2 --async-scheduling", "", "v2 on", "v2 on"),
    ("--enforce-eager", "", "v2 on", "v2 on"),
    ("--attention-backend torch", "", "v2 on", "v2 on"),
    ("--batch-invariant", "", "v2 on", "v2 on"),
    (COMPILE, "", "v2 on", "v1 on"),
    (COMPILE + "--async-scheduling", "", "v2 on", "v1 on"),
    (COMPILE + "--no-async-scheduling", "", "v2 off", "v1 off"),
    (COMPILE, "vllm=1", "v2 on", "v2 on"),
    ("", "ours=0", "v1 off", "v2 on"),
    ("", "ours=1", "v2 on", "v2 on"),
    ("", "vllm=0", "v1 off", "v1 on"),
    ("", "vllm=1", "v2 on", "v2 on"),
    ("", "ours=1 vllm=0", "v2 on", "v1 on"),
    ("", "ours=0 vllm=1", "v1 off", "v2 on"),
    ("--model-runner v2", "vllm=0", "v2 on", "v1 on"),
    ("--model-runner v2", "ours=0", "v2 on", "v2 on"),
    ("--model-runner v1", "ours=1 vllm=1", "v1 off", "v2 on"),
    ("--model-runner auto", "ours=0", "v1 off", "v2 on"),
    ("--no-async-scheduling", "vllm=0", "v1 off", "v1 off"),
    (by("ngram"), "", "v2 on", "v1 off"),
    (by("ngram"), "vllm=1", "v2 on", "v2 off"),
    (by("ngram"), "vllm=0", "v1 off", "v1 off"),
    (by("ngram") + "--no-async-scheduling", "", "v2 off", "v1 off"),
    ("""--speculative-config '{"model": "[ngram]"}'""", "", "v2 on", "v1 off"),
    (by("ngram_gpu"), "", "v2 on", "v1 on"),
    (by("suffix"), "", "v2 on", "v1 off"),
    (by("medusa"), "", "v2 on", "v1 off"),
    (by("mlp_speculator"), "", "v2 on", "v1 off"),
    (by("custom_class"), "", "v2 on", "v1 off"),
    (by("eagle"), "", "v2 on", "v2 on"),
    (by("eagle3"), "", "v2 on", "v2 on"),
    (by("mtp"), "", "v2 on", "v2 on"),
    (by("qwen3_next_mtp"), "", "v2 on", "v2 on"),
    (by("dflash"), "", "v2 on", "v2 on"),
    (by("dspark"), "", "v2 on", "v2 on"),
    (by("draft_model"), "", "v2 on", "v2 on"),
    ("""--speculative-config '{"model": "small"}'""", "", "v2 on", "v2 on"),
    (by("eagle3", IN_PARALLEL), "", "v2 on", "v1 on"),
    (by("draft_model", IN_PARALLEL), "", "v2 on", "v1 on"),
    (by("dflash", IN_PARALLEL), "", "v2 on", "v2 on"),
    (by("dspark", IN_PARALLEL), "", "v2 on", "v2 on"),
    (by("eagle", UNPADDED), "", "v2 on", "v2 off"),
    (by("draft_model", IN_PARALLEL + UNPADDED), "", "v2 on", "v1 off"),
    (by("eagle") + "--async-scheduling", "", "v2 on", "v2 on"),
    ("--mamba-cache-mode all", "", "v2 on", "v1 on"),
    ("--mamba-cache-mode align", "", "v2 on", "v2 on"),
    ("--enable-dbo", "", "v2 on", "v1 on"),
    ("--enable-dbo", "vllm=1", "v2 on", "v2 on"),
    ("--enable-elastic-ep", "", "v2 on", "v1 on"),
    (PARALLEL_SEQUENCES, "", "v2 on", "v2 on"),
    (PARALLEL_SEQUENCES + "--tensor-parallel-size 2", "", "v2 on", "v1 on"),
    ("--tensor-parallel-size 2", "", "v2 on", "v2 on"),
    ("--pipeline-parallel-size 2", "", "v2 on", "v2 on"),
    ("--pipeline-parallel-size 2", "vllm=0", "v1 off", "v1 off"),
    ("--pipeline-parallel-size 2 --mamba-cache-mode all", "", "v2 on", "v1 off"),
    ("--distributed-executor-backend external_launcher", "", "v2 on", "v2 on"),
    ("--distributed-executor-backend external_launcher --pipeline-parallel-size 2", "", "v2 on", "v1 off"),
    ("--distributed-executor-backend ray", "", "v2 on", "v2 on"),
    ("--distributed-executor-backend my.Executor", "", "v2 on", "v2 off"),
    ("--runner pooling", "", "v2 on", "v2 off"),
    ("--runner generate", "", "v2 on", "v2 on"),
]
ELSEWHERE = [
    (CPU, "", "", "v2 on", "v1 off"),
    (CPU, "--no-async-scheduling", "", "v2 off", "v1 off"),
    (CPU, "--model-runner v1", "", "v1 off", "v1 off"),
    (CPU, "", "vllm=1", "v2 on", "v2 off"),
    (CPU, "", "vllm=0", "v1 off", "v1 off"),
    (CPU, by("eagle"), "", "v2 on", "v1 off"),
    (NO_TRITON, "", "", "v2 on", "v1 on"),
    (NO_TRITON, "", "vllm=1", "v2 on", "v2 on"),
    (NO_TRITON, by("suffix"), "", "v2 on", "v1 off"),
    (NO_TRITON, "--model-runner v1", "", "v1 off", "v1 on"),
    (H200, "--device cpu", "", "v2 on", "v1 off"),
    (H200, "", "", "v2 on", "v2 on"),
]


@pytest.mark.parametrize(("flags", "variables", "ours", "theirs"), ON_CUDA)
def test_on_cuda_both_columns_follow_the_rules(
    explain: Explain, flags: str, variables: str, ours: str, theirs: str
) -> None:
    for machine, device in ((H200, ""), (CPU, CUDA)):  # there, and assumed on a machine that has none
        answer = explain(device + flags, machine, variables)
        assert answer.status == 0 and not answer.error
        assert answer.two(answer.plan) == ours
        assert answer.two(answer.plan["vllm_0_31"]) == theirs


@pytest.mark.parametrize(("machine", "flags", "variables", "ours", "theirs"), ELSEWHERE)
def test_elsewhere_both_columns_follow_the_rules(
    explain: Explain, machine: DeviceFacts, flags: str, variables: str, ours: str, theirs: str
) -> None:
    answer = explain(flags, machine, variables)
    assert (answer.status, answer.two(answer.plan)) == (0, ours)
    assert answer.two(answer.plan["vllm_0_31"]) == theirs


@pytest.mark.parametrize(
    ("machine", "flags", "words"),
    [
        (H200, by("ngram"), ["--speculative-config", "ngram"]),
        (H200, by("suffix"), ["--speculative-config", "suffix"]),
        (H200, by("eagle", UNPADDED), ["--speculative-config", "disable_padded_drafter_batch"]),
        (H200, "--runner pooling", ["--runner", "pooling"]),
        (H200, "--distributed-executor-backend my.Executor", ["--distributed-executor-backend"]),
        (H200, COMPILE + "--pipeline-parallel-size 2", ["--pipeline-parallel-size", "V1"]),
        (CPU, "", ["--device", "CPU"]),
    ],
)
def test_asking_for_async_where_vllm_refuses_is_its_error(
    explain: Explain, machine: DeviceFacts, flags: str, words: list[str]
) -> None:
    answer = explain(flags + " --async-scheduling", machine)
    said = answer.plan["vllm_0_31"]["async_scheduling"]
    assert said["value"] is False and said["reason"].startswith("error: ")
    assert all(word in said["reason"] for word in ["--async-scheduling", *words])
    assert answer.plan["async_scheduling"]["value"] is True


@pytest.mark.parametrize(
    ("flags", "variables", "named"),
    [
        ("--model-runner v1 --async-scheduling", "", ["--model-runner=v1", "--async-scheduling"]),
        ("--async-scheduling", "ours=0", ["SLIPSTREAM_USE_V2_MODEL_RUNNER=0", "--async-scheduling"]),
        ("--async-scheduling", "vllm=0", ["VLLM_USE_V2_MODEL_RUNNER=0", "--async-scheduling"]),
        ("--model-runner v1 --max-steps-in-flight 2", "", ["--model-runner=v1", "--max-steps-in-flight=2"]),
        ("--model-runner v1 --cuda-graph-sizes 1 2", "", ["--model-runner=v1", "--cuda-graph-sizes"]),
        ("--model-runner v1 --batch-invariant", "", ["--model-runner=v1", "--batch-invariant"]),
        ("--model-runner v1 " + COMPILE, "", ["--model-runner=v1", "--compilation-config"]),
        ("--max-steps-in-flight 2 --no-async-scheduling", "", ["--max-steps-in-flight=2", "--no-async-s"]),
        ("--max-steps-in-flight 1 --async-scheduling", "", ["--max-steps-in-flight=1", "--async-s"]),
        ("--max-steps-in-flight 5", "", ["--max-steps-in-flight=5"]),
        ("--model-runner v3", "", ["--model-runner='v3'"]),
        ("", "ours=2", ["SLIPSTREAM_USE_V2_MODEL_RUNNER='2'"]),
        ("--model-runner v2", "vllm=yes", ["VLLM_USE_V2_MODEL_RUNNER='yes'"]),
        ("", "vllm=", ["VLLM_USE_V2_MODEL_RUNNER=''"]),
        ("--enforce-eager --cuda-graph-sizes 4", "", ["--enforce-eager", "--cuda-graph-sizes"]),
        ("--skip-tokenizer-init --chat-template x", "", ["--skip-tokenizer-init", "--chat-template"]),
        ("--chat-template /no/such/file", "", ["--chat-template"]),
        ("--max-model-len 8192", "", ["--max-model-len=8192"]),
    ],
)
def test_flags_that_contradict_each_other_are_named_and_vllms_column_stays(
    explain: Explain, flags: str, variables: str, named: list[str]
) -> None:
    answer = explain(CUDA + flags, CPU, variables)
    assert answer.status == 2 and answer.error.startswith("error: ")
    assert all(name in answer.error and name in answer.plan["error"] for name in named)
    assert answer.plan.keys() == {"error", "vllm_0_31"}


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (by("magic"), "method must be one of ngram, suffix, draft_model"),
        ("--speculative-config '{'", "--speculative-config='{'"),
        ("--speculative-config '[1]'", "must be an object"),
        ("""--speculative-config '{"num_speculative_tokens": 3}'""", "method (or model) is missing"),
        ("""--speculative-config '{"method": "ngram", "num_speculative_tokens": 0}'""", "at least 1"),
        (by("eagle", ', "parallel_drafting": 1'), "parallel_drafting must be true or false"),
        ("""--compilation-config '{"pass_config": {"fuse": true}}'""", "pass_config may hold enable_sp"),
    ],
)
def test_what_cannot_be_read_has_no_columns(explain: Explain, flags: str, named: str) -> None:
    answer = explain(flags)
    assert (answer.status, answer.plan) == (2, {}) and named in answer.error
