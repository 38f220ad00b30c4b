"""resolve(): flags + model + device into one EnginePlan, every choice with its reason. Decides once.

Raises ValueError that names the flag where a flag cannot be honoured; nothing is silently ignored.
"""

from __future__ import annotations

import numbers
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import get_args, get_type_hints

from slipstream.config.args import EngineArgs, flag_name
from slipstream.config.device import (
    ATTENTION_BACKENDS,
    DEFAULT_BATCHED_TOKENS,
    KV_CACHE_DTYPES,
    DeviceFacts,
    choose_for_device,
)
from slipstream.config.executor import executor_choice
from slipstream.config.json_flag import read_object
from slipstream.config.model import ModelSpec
from slipstream.config.model_choices import check_front_end, kv_cache_choice, model_choices
from slipstream.config.plan import Choice, EnginePlan
from slipstream.config.runner import choose_runner, choose_steps_in_flight
from slipstream.config.speculation import (
    LOOKUPS,
    NO_FACTS,
    DrafterFacts,
    SpeculativeConfig,
    read_speculative_config,
)
from slipstream.config.structured_outputs import DECISION, structured_outputs_choice
from slipstream.config.vllm_rules import vllm_choices, vllm_facts

# As people read it: what runs, on what, with how much.
ORDER = (
    "model_runner", "async_scheduling", "speculation", "device", "attention_backend", "cuda_graphs",
    "compile_mode", "batch_invariant", "parallel", "executor", "kv_cache", "kv_cache_dtype", "prefix_caching",
    "dtype", "quantization", "load_format", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
    "scheduling_policy", DECISION, "max_logprobs", "tokenizer", "chat_template",
)  # fmt: skip
DTYPES = ("float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
DEFAULT_MAX_NUM_SEQS = 256
# NumPy's numbers are of these forms, too.
_KINDS: dict[type, tuple[type, str]] = {
    int: (numbers.Integral, "an integer"), float: (numbers.Real, "a number"), bool: (bool, "true or false"),
}  # fmt: skip
MOST_WORDS = 2**31  # of the row table: the host's writes have 32-bit addresses
POLICY = (
    "each step has room for as many as gave the most tokens a second, by acceptance and step times measured "
    "some steps ago; none where they don't pay or would preempt a request"
)


def resolve(
    args: EngineArgs,
    spec: ModelSpec,
    facts: DeviceFacts,
    env: Mapping[str, str] = os.environ,
    own_template: str = "",
    drafter: DrafterFacts = NO_FACTS,
) -> EnginePlan:
    """The plan of one engine. env: where variables that choose a runner are read. own_template: where the
    model keeps its chat template, empty where it has none. drafter: of the one that --speculative-config
    names. Raises ValueError."""
    _check(args)
    check_front_end(args)
    choices: dict[str, Choice] = {}
    device = _device(args, facts, choices)
    dtype = _dtype(args, spec, device, choices)
    max_model_len = _max_model_len(args, spec, choices)
    max_num_seqs = args.max_num_seqs or DEFAULT_MAX_NUM_SEQS
    _check_table(max_num_seqs, max_model_len, args.block_size)
    batched = _batched_tokens(args, device, max_num_seqs, choices)
    vote = choose_runner(args, facts, env, choices, device=device)
    steps = choose_steps_in_flight(args, vote, choices)
    chosen = choose_for_device(
        args, spec, facts, choices, device=device, runner=vote.runner, dtype=dtype,
        max_model_len=max_model_len, max_num_seqs=max_num_seqs, max_num_batched_tokens=batched,
    )
    speculation, choices["speculation"] = _speculation(args, spec, drafter, vote.runner)
    choices["parallel"] = Choice(
        value={"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1},
        reason="one device: there are no other layouts",
    )
    choices["executor"] = executor_choice(args.distributed_executor_backend)
    choices["kv_cache"] = kv_cache_choice(
        args, spec, device, chosen.kv_cache_dtype, max_model_len, max_num_seqs, drafter.kv_width
    )
    _scheduling(args, choices)
    choices["max_logprobs"] = _max_logprobs(args, spec)
    choices[DECISION] = structured_outputs_choice(args)
    choices |= model_choices(args, spec, dtype, own_template)
    return EnginePlan(
        args=args,
        spec=spec,
        model_runner=vote.runner,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=batched,
        block_size=args.block_size,
        steps_in_flight=steps,
        num_blocks=args.num_gpu_blocks_override,
        max_logprobs=choices["max_logprobs"].value,
        speculation=speculation,
        choices={name: choices[name] for name in ORDER},
        vllm_0_31=vllm_choices(vllm_facts(args, facts, env)),
        **asdict(chosen),
    )


def _check(args: EngineArgs) -> None:
    """Types and ranges of single flags."""
    for name, hint in get_type_hints(EngineArgs).items():
        kinds, value = get_args(hint) or (hint,), getattr(args, name)
        if kinds[0] not in _KINDS or (value is None and type(None) in kinds):
            continue
        form, words = _KINDS[kinds[0]]
        if not isinstance(value, form) or (isinstance(value, bool) and kinds[0] is not bool):
            raise ValueError(f"{flag_name(name)}={value!r}: must be {words}")
    positive = (
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "kv_cache_memory_bytes",
        "num_gpu_blocks_override",
        "max_steps_in_flight",
        "block_size",
    )
    for name in positive:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"{flag_name(name)}={value!r}: must be an integer of at least 1")
    for name, allowed in (
        ("load_format", LOAD_FORMATS),
        ("dtype", ("auto", *DTYPES)),
        ("device", ("auto", "cpu", "cuda")),
        ("scheduling_policy", ("fcfs", "priority")),
        ("attention_backend", ATTENTION_BACKENDS),
        ("kv_cache_dtype", KV_CACHE_DTYPES),
    ):
        value = getattr(args, name)
        if value not in allowed:
            raise ValueError(f"{flag_name(name)}={value!r}: must be one of {', '.join(allowed)}")
    if not 0 < args.gpu_memory_utilization <= 1:
        raise ValueError(
            f"--gpu-memory-utilization={args.gpu_memory_utilization}: must be over 0 and at most 1"
        )
    for name in ("engine_progress_timeout", "max_engine_restarts"):
        if not 0 <= (value := getattr(args, name)) < float("inf"):
            raise ValueError(f"{flag_name(name)}={value}: must be finite and at least 0")
    if args.num_gpu_blocks_override is not None and args.num_gpu_blocks_override < 2:
        raise ValueError("--num-gpu-blocks-override: must be at least 2 (block 0 is the null block)")
    if args.num_gpu_blocks_override is not None and args.kv_cache_memory_bytes is not None:
        raise ValueError(
            "--num-gpu-blocks-override and --kv-cache-memory-bytes both size the KV pool: give one"
        )


def _check_table(max_num_seqs: int, max_model_len: int, block_size: int) -> None:
    """The bulk of a row: its tokens, and its blocks twice."""
    words = max_num_seqs * (max_model_len + 2 * -(-max_model_len // block_size))
    if words >= MOST_WORDS:
        raise ValueError(
            f"--max-num-seqs={max_num_seqs}, --max-model-len={max_model_len}: the table of rows would have "
            f"{words:,} words, and must have fewer than {MOST_WORDS:,}"
        )


def _device(args: EngineArgs, facts: DeviceFacts, choices: dict[str, Choice]) -> str:
    if args.device == "cuda" and facts.kind != "cuda":
        raise ValueError("--device=cuda: this machine has no CUDA device")
    device = facts.kind if args.device == "auto" else args.device
    reason = f"found {facts.name}" if args.device == "auto" else "asked for"
    if facts.assumed and device == facts.kind:
        reason = f"asked for; this machine has none, so {facts.name} with Triton is assumed"
    choices["device"] = Choice(value=device, reason=reason, flag="--device")
    return device


def _dtype(args: EngineArgs, spec: ModelSpec, device: str, choices: dict[str, Choice]) -> str:
    if args.dtype != "auto":
        dtype, reason = args.dtype, "asked for"
    else:
        dtype, reason = (
            (spec.dtype, "the model's own") if spec.dtype in DTYPES else ("bfloat16", "the default")
        )
        if dtype == "float32" and device == "cuda":
            dtype, reason = "bfloat16", "float32 weights are served in bfloat16 unless asked for"
    choices["dtype"] = Choice(value=dtype, reason=reason, flag="--dtype")
    return dtype


def _max_model_len(args: EngineArgs, spec: ModelSpec, choices: dict[str, Choice]) -> int:
    value = args.max_model_len or spec.max_model_len
    if value > spec.max_model_len:
        raise ValueError(
            f"--max-model-len={value}: the model was made for at most {spec.max_model_len} positions"
        )
    if value < 2:
        raise ValueError(f"--max-model-len={value}: must be at least 2, for a prompt and its answer")
    reason = "asked for" if args.max_model_len else "the model's own"
    choices["max_model_len"] = Choice(value=value, reason=reason, flag="--max-model-len")
    return value


def _batched_tokens(args: EngineArgs, device: str, max_num_seqs: int, choices: dict[str, Choice]) -> int:
    value = args.max_num_batched_tokens or max(DEFAULT_BATCHED_TOKENS[device], max_num_seqs)
    if value < max_num_seqs:
        raise ValueError(
            f"--max-num-batched-tokens={value}: must be at least --max-num-seqs={max_num_seqs}, so that "
            "every running request can decode in each step"
        )
    reason = (
        "asked for"
        if args.max_num_batched_tokens
        else f"the default on {device}: prompts come in chunks of it"
    )
    choices["max_num_batched_tokens"] = Choice(value=value, reason=reason, flag="--max-num-batched-tokens")
    asked = "asked for" if args.max_num_seqs else "the default"
    choices["max_num_seqs"] = Choice(
        value=max_num_seqs, reason=f"rows of the table, {asked}", flag="--max-num-seqs"
    )
    return value


def _scheduling(args: EngineArgs, choices: dict[str, Choice]) -> None:
    choices["prefix_caching"] = Choice(
        value=args.enable_prefix_caching,
        reason="on by default: equal prefixes share blocks" if args.enable_prefix_caching else "asked for",
        flag="--no-enable-prefix-caching" if args.enable_prefix_caching else "--enable-prefix-caching",
    )
    first_come = args.scheduling_policy == "fcfs"
    choices["scheduling_policy"] = Choice(
        value=args.scheduling_policy,
        reason="first come, first served" if first_come else "lower priority numbers first",
        flag="--scheduling-policy",
    )


def _speculation(
    args: EngineArgs, spec: ModelSpec, drafter: DrafterFacts, runner: str
) -> tuple[SpeculativeConfig | None, Choice]:
    flag = "--speculative-config"
    chosen = read_speculative_config(
        args.speculative_config, drafter, vocab_size=spec.vocab_size, hidden_size=spec.hidden_size
    )
    if chosen is None:
        return None, Choice(value="none", reason="not asked for: one token a row and step", flag=flag)
    asked = read_object("speculative_config", args.speculative_config)
    given = "num_speculative_tokens" in asked
    whose = "asked for" if given else "the drafter's own" if drafter.num_tokens else "the default"
    where = "on the device, inside the step" if runner == "v2" else "by runner v1, which waits for them"
    if runner == "v1" and chosen.method in LOOKUPS:
        where = "by runner v1 on the host"
    tokens = chosen.num_speculative_tokens
    reason = f"asked for; up to {tokens} drafts a step ({whose}), made {where}; {POLICY}"
    if chosen.acceptance:
        rates = ", ".join(f"{rate:.3g}" for rate in chosen.acceptance)
        reason += f"; synthetic: drafts are taken by chance ({rates}), so texts mean nothing"
    return chosen, Choice(value=chosen.method, reason=reason, flag=flag)


def _max_logprobs(args: EngineArgs, spec: ModelSpec) -> Choice:
    asked = args.max_logprobs
    if asked < -1:
        raise ValueError(f"--max-logprobs={asked}: must be at least 0, or -1 for the whole vocabulary")
    value = spec.vocab_size if asked == -1 else min(asked, spec.vocab_size)
    reason = "the whole vocabulary" if value == spec.vocab_size else "most logprobs a request may ask"
    return Choice(value=value, reason=reason, flag="--max-logprobs")
