"""Choices that follow from the device: attention, type of the KV cache, compilation, CUDA graphs. resolve()
calls choose_for_device() and nobody else does.

Raises ValueError that names the flag where one cannot be honoured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from slipstream.config.args import EngineArgs, flag_name
from slipstream.config.flash import FA3_FWD_LACKS, HOPPER, check_flash
from slipstream.config.json_flag import JsonFlag, read_object
from slipstream.config.model import ModelSpec
from slipstream.config.plan import AttentionName, Choice

# A CPU computes about 500 to 1,000 prompt tokens a second: larger steps would stall the running decodes.
DEFAULT_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}
ATTENTION_BACKENDS = ("auto", "triton", "flash", "torch")
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")
COMPILE_MODES = ("none", "stock_torch_compile")
# The first GPUs that multiply and convert float8_e4m3 (Ada).
FP8_CAPABILITY = (8, 9)
# Few lanes cost what one does, so that their sizes double; further up padding lanes cost what live ones do.
FEW_LANES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
SMALLEST_TOKEN_BUCKET = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """What the machine has. kind: the best device there is; memory_bytes: that device's memory; has_triton:
    Triton's kernels run on it (on a CPU: interpreted); capability: CUDA's compute capability; assumed: the
    machine is another, this one has no such device. cpu_activations: torch's name of the weights' type ->
    that of activations, where a CPU's kernels change it. flash_lacks: what the installed FlashAttention 3 was
    built without, by its own names; None where it is not installed."""

    kind: Literal["cpu", "cuda"]
    name: str
    memory_bytes: int
    has_triton: bool = False
    capability: tuple[int, int] = (0, 0)
    assumed: bool = False
    cpu_activations: Mapping[str, str] = field(default_factory=dict)
    flash_lacks: frozenset[str] | None = None


# What `explain --device cuda` assumes where there is no CUDA device.
ASSUMED_CUDA = DeviceFacts(
    kind="cuda",
    name="NVIDIA H200",
    memory_bytes=140 << 30,
    has_triton=True,
    capability=(9, 0),
    assumed=True,
    flash_lacks=FA3_FWD_LACKS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceChoices:
    """Fields of EnginePlan, of the same meaning."""

    attention_backend: AttentionName
    kv_cache_dtype: str
    batch_invariant: bool
    compile_mode: str
    graph_sizes: tuple[int, ...]
    token_buckets: tuple[int, ...]


def choose_for_device(
    args: EngineArgs,
    spec: ModelSpec,
    facts: DeviceFacts,
    choices: dict[str, Choice],
    *,
    device: str,
    runner: str,
    dtype: str,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> DeviceChoices:
    """Adds a Choice for every field. What is given by name is final. Raises ValueError."""
    if args.attention_backend == "flash":
        check_flash(
            args,
            spec,
            facts.flash_lacks,
            device=device,
            name=facts.name,
            capability=facts.capability,
            has_triton=facts.has_triton,
            dtype=dtype,
            max_model_len=max_model_len,
        )
    attention = _attention_backend(args, facts, device, choices)
    activations = facts.cpu_activations.get(dtype, dtype) if device == "cpu" else dtype
    kv_cache_dtype = _kv_cache_dtype(args, facts, attention, activations, choices)
    compile_mode = _compile_mode(args, device, choices)
    if args.batch_invariant and device == "cuda" and attention == "torch":
        raise ValueError("--batch-invariant: needs Triton's attention; on this cuda it is in torch")
    if args.batch_invariant and compile_mode != "none":
        raise ValueError("--batch-invariant: torch.compile picks kernels by size; drop --compilation-config")
    choices["batch_invariant"] = Choice(
        value=args.batch_invariant,
        reason="asked for: a request's numbers do not depend on its batch"
        if args.batch_invariant
        else "off by default: kernels are chosen for speed at each size",
        flag="--batch-invariant",
    )
    sizes = _graph_sizes(args, _no_graphs(args, attention, device, runner), max_num_seqs, choices)
    return DeviceChoices(
        attention_backend=attention,
        kv_cache_dtype=kv_cache_dtype,
        batch_invariant=args.batch_invariant,
        compile_mode=compile_mode,
        graph_sizes=sizes,
        token_buckets=_token_buckets(max_num_batched_tokens) if sizes else (),
    )


def _attention_backend(
    args: EngineArgs, facts: DeviceFacts, device: str, choices: dict[str, Choice]
) -> AttentionName:
    asked, runs = args.attention_backend, facts.has_triton and device == facts.kind
    lacking = "a CPU" if device == "cpu" else "this CUDA device (not installed, or interpreted)"
    if asked == "triton" and not runs:
        raise ValueError(f"--attention-backend=triton: Triton does not run on {lacking}")
    chosen: AttentionName = "triton" if device == "cuda" and runs else "torch"
    if asked == "flash":
        chosen, reason = "flash", "asked for: FlashAttention 3 for long steps, Triton for the others"
    elif asked != "auto":
        chosen, reason = "triton" if asked == "triton" else "torch", "asked for"
    elif chosen == "triton":
        reason = "the default on cuda: reads lengths and blocks on the device, so that graphs can hold it"
        if facts.capability[0] == HOPPER:
            reason += "; `flash` would take FlashAttention 3 for prefill, where fa3-fwd is installed"
    else:
        reason = f"paged attention in torch operations: Triton does not run on {lacking}"
    choices["attention_backend"] = Choice(value=chosen, reason=reason, flag="--attention-backend")
    return chosen


def _kv_cache_dtype(
    args: EngineArgs, facts: DeviceFacts, attention: str, activations: str, choices: dict[str, Choice]
) -> str:
    asked = args.kv_cache_dtype
    if asked == "auto":
        value, reason = activations, "the type that layers compute in"
    elif attention == "torch":
        raise ValueError(f"--kv-cache-dtype={asked}: needs Triton's attention, and here it is in torch")
    elif facts.kind == "cuda" and facts.capability < FP8_CAPABILITY:
        have = ".".join(map(str, facts.capability))
        raise ValueError(f"--kv-cache-dtype={asked}: needs compute capability 8.9, {facts.name} has {have}")
    else:
        value, reason = "fp8", "asked for: float8_e4m3 with one scale a layer for K and one for V"
    choices["kv_cache_dtype"] = Choice(value=value, reason=reason, flag="--kv-cache-dtype")
    return value


def _compile_mode(args: EngineArgs, device: str, choices: dict[str, Choice]) -> str:
    mode = read_compile_mode(args.compilation_config)
    if mode != "none" and device == "cpu":
        raise ValueError(f"--compilation-config: mode {mode!r} is for cuda; on a CPU weights are packed")
    reason = "asked for" if args.compilation_config is not None else "off by default: no compiling at start"
    choices["compile_mode"] = Choice(value=mode, reason=reason, flag="--compilation-config")
    return mode


def read_compile_mode(config: JsonFlag) -> str:
    """The mode of a JSON object, as text or read already."""
    start = f"--compilation-config={config!r}: "
    fields = read_object("compilation_config", config)
    unknown = sorted(fields.keys() - {"mode"})
    if unknown:
        raise ValueError(f"{start}unknown field {unknown[0]!r}; the one there is: mode")
    mode = fields.get("mode", "none")
    if mode not in COMPILE_MODES:
        raise ValueError(f"{start}mode must be one of {', '.join(COMPILE_MODES)}")
    return str(mode)


def _no_graphs(args: EngineArgs, attention: str, device: str, runner: str) -> tuple[str, str]:
    """Why every step is eager, and the flag that changes it; ("", "") where graphs are captured."""
    if args.enforce_eager:
        return "--enforce-eager: asked for", "--no-enforce-eager"
    if runner == "v1":
        return "runner v1 builds each step anew", "--model-runner"
    if device == "cpu":
        return "a CPU has none", "--device"
    if attention == "torch":
        return "attention in torch operations reads lengths on the host", "--attention-backend"
    return "", ""


def _graph_sizes(
    args: EngineArgs, off: tuple[str, str], max_num_seqs: int, choices: dict[str, Choice]
) -> tuple[int, ...]:
    """Lanes that a decode graph is captured for, ascending; none where steps run eagerly."""
    asked = args.cuda_graph_sizes
    why_off, flag = off
    if why_off:
        if asked is not None:
            raise ValueError(f"--cuda-graph-sizes: graphs are off ({why_off})")
        choices["cuda_graphs"] = Choice(value="off", reason=why_off, flag=flag)
        return ()
    if asked is None:
        sizes, reason = default_graph_sizes(max_num_seqs), "the default: the whole step in one graph"
    else:
        sizes, reason = _checked_sizes(asked, max_num_seqs), "asked for; steps of more lanes run eagerly"
    choices["cuda_graphs"] = Choice(value=sizes, reason=reason, flag="--cuda-graph-sizes")
    return sizes


def default_graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24, 32, 48, 64, then in steps of 16 to 256 and of 32 beyond; max_num_seqs is the
    last."""
    sizes = (*FEW_LANES, *range(80, 257, 16), *range(288, max_num_seqs, 32))
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


def _checked_sizes(asked: Any, max_num_seqs: int) -> tuple[int, ...]:
    start = f"{flag_name('cuda_graph_sizes')}={asked!r}: "
    whole = isinstance(asked, list | tuple) and all(type(size) is int for size in asked)
    if not whole or not asked:
        raise ValueError(f"{start}must be a list of one or more integers")
    if min(asked) < 1 or max(asked) > max_num_seqs:
        raise ValueError(f"{start}each must be at least 1 and at most --max-num-seqs={max_num_seqs}")
    return tuple(sorted(set(asked)))


def _token_buckets(max_num_batched_tokens: int) -> tuple[int, ...]:
    """Tokens that a graph of a mixed step is captured for: 32, 64, ... to max_num_batched_tokens, but no
    further than its default; what exceeds the last runs eagerly."""
    most = min(max_num_batched_tokens, DEFAULT_BATCHED_TOKENS["cuda"])
    buckets, size = [], SMALLEST_TOKEN_BUCKET
    while size < most:
        buckets.append(size)
        size *= 2
    return (*buckets, most)
