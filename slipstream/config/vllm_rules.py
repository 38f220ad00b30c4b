"""What vLLM 0.31.0 would choose for the same flags: its rules as tables, first match wins. Nothing of ours
depends on it.

vLLM decides late and twice (a runner chosen by variable is checked again at the end of its configuration);
here both verdicts are in the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from slipstream.config.args import EngineArgs
from slipstream.config.device import DeviceFacts, read_compile_mode
from slipstream.config.json_flag import Speculation, read_speculation
from slipstream.config.plan import Choice
from slipstream.config.runner import VLLM_VARIABLE

V2_LACKS_METHODS = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator", "custom_class")
V2_DRAFTS_IN_PARALLEL = ("dflash", "dspark")
ASYNC_METHODS = ("eagle", "eagle3", "mtp", "dflash", "dspark", "draft_model", "ngram_gpu")
# "": vLLM picks one itself, of these.
ASYNC_EXECUTORS = ("", "uni", "mp", "ray", "external_launcher")


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOnly:
    """Flags of vLLM's that decide there and do not exist here, or not with every value; the defaults are
    vLLM's."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    distributed_executor_backend: str = ""
    enable_sp: bool = False
    enable_dbo: bool = False
    enable_elastic_ep: bool = False
    mamba_cache_mode: str = "none"
    runner: str = "auto"


NO_VLLM_FLAGS = VllmOnly()


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmFacts:
    """What the rules read. variable: VLLM_USE_V2_MODEL_RUNNER, None where unset; has_triton: on device."""

    device: str
    has_triton: bool
    variable: str | None = None
    async_scheduling: bool | None = None
    speculation: Speculation | None = None
    compile_mode: str = "none"
    only: VllmOnly = NO_VLLM_FLAGS

    @property
    def method(self) -> str:
        """Of speculation; empty without. A model's own MTP is `mtp`."""
        name = "" if self.speculation is None else self.speculation.method
        return "mtp" if name.endswith("_mtp") else name


@dataclass(frozen=True, slots=True)
class Rule:
    """applies: to these facts and, for async scheduling, the runner chosen. reason: its {names} are fields of
    VllmFacts."""

    applies: Callable[[VllmFacts, str], bool]
    reason: str
    flag: str


# What vLLM's V2 lacks, in the order that vLLM looks.
V2_LACKS = (
    Rule(
        lambda f, _: f.method in V2_LACKS_METHODS,
        "its V2 does not speculate by {facts.method}",
        "--speculative-config",
    ),
    Rule(
        lambda f, _: f.speculation is not None
        and f.speculation.parallel_drafting
        and f.method not in V2_DRAFTS_IN_PARALLEL,
        "its V2 drafts in parallel for dflash and dspark only, not for {facts.method}",
        "--speculative-config",
    ),
    Rule(lambda f, _: f.only.mamba_cache_mode == "all", "Mamba cache mode all", "--mamba-cache-mode"),
    Rule(lambda f, _: f.compile_mode == "stock_torch_compile", "stock torch.compile", "--compilation-config"),
    Rule(
        lambda f, _: f.only.enable_sp and f.only.tensor_parallel_size > 1,
        "sequence parallelism with tensor parallelism of {facts.only.tensor_parallel_size}",
        "--compilation-config",
    ),
    Rule(lambda f, _: f.only.enable_elastic_ep, "elastic expert parallelism", "--enable-elastic-ep"),
    Rule(
        lambda f, _: f.only.distributed_executor_backend == "external_launcher"
        and f.only.pipeline_parallel_size > 1,
        "an external launcher with {facts.only.pipeline_parallel_size} pipeline stages",
        "--distributed-executor-backend",
    ),
    Rule(
        lambda f, _: f.only.enable_dbo and f.variable is None,
        f"dual batch overlap, and {VLLM_VARIABLE} is unset",
        "--enable-dbo",
    ),
)
ASYNC_REFUSED = (
    Rule(lambda f, _: f.only.runner == "pooling", "a pooling model", "--runner"),
    Rule(
        lambda f, _: f.method not in ("", *ASYNC_METHODS),
        "speculation by {facts.method}; it goes with EAGLE, EAGLE3, MTP, DFlash, DSpark, a draft model and "
        "ngram_gpu",
        "--speculative-config",
    ),
    Rule(
        lambda f, _: f.speculation is not None and f.speculation.disable_padded_drafter_batch,
        "disable_padded_drafter_batch",
        "--speculative-config",
    ),
    Rule(
        lambda f, _: f.only.distributed_executor_backend not in ASYNC_EXECUTORS,
        "the executor {facts.only.distributed_executor_backend} does not support it",
        "--distributed-executor-backend",
    ),
    Rule(
        lambda f, runner: runner == "v1" and f.only.pipeline_parallel_size > 1,
        "{facts.only.pipeline_parallel_size} pipeline stages on V1",
        "--pipeline-parallel-size",
    ),
    Rule(lambda f, _: f.device == "cpu", "the CPU", "--device"),
)


def vllm_facts(
    args: EngineArgs,
    facts: DeviceFacts,
    env: Mapping[str, str],
    only: VllmOnly = NO_VLLM_FLAGS,
) -> VllmFacts:
    """On the device that we would choose. Raises ValueError for a JSON flag that cannot be read."""
    device = facts.kind if args.device == "auto" else args.device
    return VllmFacts(
        device=device,
        has_triton=facts.has_triton and device == facts.kind,
        variable=env.get(VLLM_VARIABLE),
        async_scheduling=args.async_scheduling,
        speculation=read_speculation(args.speculative_config),
        compile_mode=read_compile_mode(args.compilation_config),
        only=only,
    )


def vllm_choices(facts: VllmFacts) -> dict[str, Choice]:
    """model_runner and async_scheduling. A refusal of vLLM's is a value of False and a reason that begins
    with `error:`."""
    runner = _model_runner(facts)
    return {"model_runner": runner, "async_scheduling": _async_scheduling(facts, runner.value)}


def _first(rules: tuple[Rule, ...], facts: VllmFacts, runner: str = "") -> tuple[str, str] | None:
    """Reason and flag of the first rule that applies."""
    found = next((rule for rule in rules if rule.applies(facts, runner)), None)
    return None if found is None else (found.reason.format(facts=facts), found.flag)


def _model_runner(facts: VllmFacts) -> Choice:
    lacks = _first(V2_LACKS, facts)
    if facts.variable is not None:
        reason = f"{VLLM_VARIABLE}={facts.variable} goes before every rule"
        if facts.variable == "1" and lacks is not None:
            reason += f"; vLLM then refuses to start: {lacks[0]}"
        return Choice(value="v2" if facts.variable == "1" else "v1", reason=reason, flag=VLLM_VARIABLE)
    if not facts.has_triton:
        return Choice(value="v1", reason="no Triton on this device", flag="--device")
    if lacks is not None:
        return Choice(value="v1", reason=lacks[0], flag=lacks[1])
    return Choice(value="v2", reason="the default: nothing here that its V2 lacks", flag=VLLM_VARIABLE)


def _async_scheduling(facts: VllmFacts, runner: str) -> Choice:
    refused = _first(ASYNC_REFUSED, facts, runner)
    if facts.async_scheduling is False:
        return Choice(value=False, reason="asked for: --no-async-scheduling", flag="--async-scheduling")
    if refused is None:
        reason = "asked for" if facts.async_scheduling else "the default: nothing here rules it out"
        return Choice(value=True, reason=reason, flag="--no-async-scheduling")
    reason, flag = refused
    if facts.async_scheduling:
        reason = f"error: vLLM refuses to start: --async-scheduling contradicts {flag} ({reason})"
    return Choice(value=False, reason=reason, flag=flag)
