"""The plan without an engine: what serve would choose for some flags, and what vLLM 0.31.0 would. Reads
config.json or a GGUF header, never a weight."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping

from slipstream.config.args import EngineArgs, flag_name
from slipstream.config.device import ASSUMED_CUDA
from slipstream.config.executor import BACKENDS
from slipstream.config.explanation import Explanation
from slipstream.config.json_flag import JsonFlag, read_object
from slipstream.config.plan import Choice
from slipstream.config.speculation import SpeculationError
from slipstream.config.vllm_rules import NO_VLLM_FLAGS, VllmOnly, vllm_choices, vllm_facts
from slipstream.engine.plan import device_facts, make_plan

REFUSED = "error"


def explain(
    args: EngineArgs,
    only: VllmOnly = NO_VLLM_FLAGS,
    env: Mapping[str, str] = os.environ,
) -> Explanation:
    """For this machine, or with --device cuda on one that has none for ASSUMED_CUDA.

    Speculation that cannot be honoured, and flags that only vLLM has, are explained as what they are here: a
    decision whose value is "error" beside the plan without them. Any other contradiction is the explanation's
    error. Raises ValueError for flags that nobody can read.
    """
    facts = device_facts()
    if args.device == "cuda" and facts.kind != "cuda":
        facts = ASSUMED_CUDA
    compilation, enable_sp = split_sequence_parallelism(args.compilation_config)
    args = dataclasses.replace(args, compilation_config=compilation)
    executor = args.distributed_executor_backend or ""
    only = dataclasses.replace(only, enable_sp=enable_sp, distributed_executor_backend=executor)
    vllm = vllm_choices(vllm_facts(args, facts, env, only))
    if executor in BACKENDS:
        only = dataclasses.replace(only, distributed_executor_backend="")
    else:
        args = dataclasses.replace(args, distributed_executor_backend=None)
    refused = _lacking(only)
    try:
        try:
            plan = make_plan(args, facts, env)
        except SpeculationError as error:
            refused["speculation"] = Choice(value=REFUSED, reason=str(error), flag="--speculative-config")
            plan = make_plan(dataclasses.replace(args, speculative_config=None), facts, env)
    except ValueError as error:
        return Explanation(vllm=vllm, error=str(error))
    return Explanation(vllm=vllm, choices={**plan.choices, **refused})


def split_sequence_parallelism(config: JsonFlag) -> tuple[JsonFlag, bool]:
    """--compilation-config without vLLM's pass_config, and whether that asks for sequence parallelism. Raises
    ValueError."""
    fields = read_object("compilation_config", config)
    if "pass_config" not in fields:
        return config, False
    passes = fields["pass_config"]
    if passes not in ({"enable_sp": True}, {"enable_sp": False}):
        raise ValueError(
            f"--compilation-config={json.dumps(fields)}: pass_config may hold enable_sp, true or false"
        )
    return {name: value for name, value in fields.items() if name != "pass_config"}, passes["enable_sp"]


def _lacking(only: VllmOnly) -> dict[str, Choice]:
    """A decision for the flags given that Slipstream does not have."""
    fields = dataclasses.asdict(NO_VLLM_FLAGS)
    given = [name for name, value in dataclasses.asdict(only).items() if value != fields[name]]
    if not given:
        return {}
    spelt = {"enable_sp": "--compilation-config (pass_config)"}
    flags = [spelt.get(name, flag_name(name)) for name in given]
    reason = f"{', '.join(flags)}: not there; serve refuses what only vLLM has, the plan is the one without"
    return {"vllm_flags": Choice(value=REFUSED, reason=reason)}
