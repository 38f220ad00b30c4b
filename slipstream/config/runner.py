"""Which model runner, and how many steps it keeps in flight. resolve() calls these and nobody else does.

Raises ValueError that names both sides of a contradiction.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from slipstream.config.args import EngineArgs
from slipstream.config.device import DeviceFacts, read_compile_mode
from slipstream.config.plan import Choice

Runner = Literal["v1", "v2"]
RUNNERS = ("auto", "v1", "v2")
OUR_VARIABLE = "SLIPSTREAM_USE_V2_MODEL_RUNNER"
VLLM_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
DEFAULT_STEPS_IN_FLIGHT = 2
MAX_STEPS_IN_FLIGHT = 4


class Vote(NamedTuple):
    """What asked for a runner, spelt as the user would: `--model-runner=v1`, `VLLM_USE_V2_MODEL_RUNNER=0`."""

    source: str
    runner: Runner


def has_runner_v1() -> bool:
    """Whether the old runner's folder is there. One without a module, such as its deletion may leave, is
    not."""
    # Beside this very package: an editable install would find another tree's.
    return (Path(__file__).parents[1] / "runner_v1" / "__init__.py").exists()


def choose_runner(
    args: EngineArgs,
    facts: DeviceFacts,
    env: Mapping[str, str],
    choices: dict[str, Choice],
    *,
    device: str,
) -> Vote:
    """The flag, else our variable, else vLLM's, else v2. Adds the Choice. Raises ValueError."""
    votes = _votes(args, env)
    if not votes:
        reason = "auto: v2 for every configuration"
        if device == "cuda" and not facts.has_triton:
            reason += "; without Triton it runs on torch kernels"
        choices["model_runner"] = Choice(value="v2", reason=reason, flag="--model-runner")
        return Vote("--model-runner=auto", "v2")
    decided, *outvoted = votes
    reason = f"asked for: {decided.source}"
    if decided.source.startswith(VLLM_VARIABLE):
        reason += ", vLLM's variable, honoured here"
    against = [vote.source for vote in outvoted if vote.runner != decided.runner]
    if against:
        reason += f"; it goes before {' and '.join(against)}"
    choices["model_runner"] = Choice(value=decided.runner, reason=reason, flag="--model-runner")
    if decided.runner == "v1":
        _check_v1(args, decided.source)
    return decided


def _votes(args: EngineArgs, env: Mapping[str, str]) -> list[Vote]:
    """Whatever asks for a runner, the strongest first."""
    asked = args.model_runner
    if asked not in RUNNERS:
        raise ValueError(f"--model-runner={asked!r}: must be one of {', '.join(RUNNERS)}")
    votes = []
    if asked != "auto":
        votes.append(Vote(f"--model-runner={asked}", "v1" if asked == "v1" else "v2"))
    for name in (OUR_VARIABLE, VLLM_VARIABLE):
        value = env.get(name)
        if value not in (None, "0", "1"):
            raise ValueError(f"{name}={value!r}: must be 0 or 1")
        if value is not None:
            votes.append(Vote(f"{name}={value}", "v2" if value == "1" else "v1"))
    return votes


def _check_v1(args: EngineArgs, source: str) -> None:
    steps = args.max_steps_in_flight
    mode = read_compile_mode(args.compilation_config)
    refused = (
        (args.async_scheduling is True, "--async-scheduling", "waits for every token"),
        (steps is not None and steps > 1, f"--max-steps-in-flight={steps}", "waits for every token"),
        (args.cuda_graph_sizes is not None, "--cuda-graph-sizes", "runs every step eagerly"),
        (args.batch_invariant, "--batch-invariant", "rebuilds its batches at any size"),
        (mode != "none", f"--compilation-config (mode {mode!r})", "compiles nothing"),
    )
    for asked, flag, what in refused:
        if asked:
            raise ValueError(f"{source} contradicts {flag}: runner v1 {what}")
    if not has_runner_v1():
        raise ValueError(f"{source}: this installation has no runner v1 (slipstream/runner_v1 is absent)")


def choose_steps_in_flight(args: EngineArgs, vote: Vote, choices: dict[str, Choice]) -> int:
    """1 is synchronous. Adds the Choice of async_scheduling. Raises ValueError."""
    asked, steps = args.async_scheduling, args.max_steps_in_flight
    if asked is False and steps not in (None, 1):
        raise ValueError(
            f"--max-steps-in-flight={steps} contradicts --no-async-scheduling, which is one step"
        )
    if asked is True and steps == 1:
        raise ValueError("--max-steps-in-flight=1 contradicts --async-scheduling, which is two or more")
    if steps is not None and steps > MAX_STEPS_IN_FLIGHT:
        raise ValueError(f"--max-steps-in-flight={steps}: must be at most {MAX_STEPS_IN_FLIGHT}")
    default = DEFAULT_STEPS_IN_FLIGHT if vote.runner == "v2" and asked is not False else 1
    steps = steps or default
    if steps > 1:
        how = f"{steps} steps in flight: step N+1 is planned while step N runs"
        reason, flag = how if asked is None else f"asked for; {how}", "--no-async-scheduling"
    elif vote.runner == "v1":
        reason, flag = "runner v1 waits for every token", "--model-runner"
    elif asked is False:
        reason, flag = "asked for: one step in flight", "--async-scheduling"
    else:
        reason, flag = "--max-steps-in-flight=1: one step in flight", "--max-steps-in-flight"
    choices["async_scheduling"] = Choice(value=steps > 1, reason=reason, flag=flag)
    return steps
