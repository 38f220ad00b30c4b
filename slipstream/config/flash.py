"""What `--attention-backend flash` asks of device, model and the installed build of FlashAttention 3."""

from __future__ import annotations

from slipstream.config.args import EngineArgs
from slipstream.config.model import ModelSpec

HOPPER = 9
# Keys of one loop step by head size, for 16-bit numbers and causal masks (tile_size.h): what a block must be
# a multiple of to come by TMA.
TILE_KEYS = {64: 128, 96: 144, 128: 128, 192: 112, 256: 80}
# fa3-fwd 0.0.3, the package that the extra `flash` installs, is built without these.
FA3_FWD_LACKS = frozenset({"PAGEDKV", "LOCAL", "FP16", "BACKWARD"})


def check_flash(
    args: EngineArgs,
    spec: ModelSpec,
    lacks: frozenset[str] | None,
    *,
    device: str,
    name: str,
    capability: tuple[int, int],
    has_triton: bool,
    dtype: str,
    max_model_len: int,
) -> None:
    """lacks: as in DeviceFacts. Raises ValueError that says why FlashAttention 3 cannot attend here."""
    problem = ""
    if device != "cuda" or capability[0] != HOPPER:
        have = "a CPU" if device != "cuda" else f"{name} with {capability[0]}.{capability[1]}"
        problem = f"needs a Hopper GPU (compute capability 9.0), and this is {have}"
    elif lacks is None:
        problem = "FlashAttention 3 is not installed: pip install 'slipstream[flash]' (the package fa3-fwd)"
    elif not has_triton:
        problem = "needs Triton too, whose kernels store keys and attend in decode steps"
    elif args.batch_invariant:
        problem = "--batch-invariant needs one kernel for any batch, which is Triton's"
    elif args.kv_cache_dtype != "auto":
        problem = f"multiplies float8 keys by float8 queries only; --kv-cache-dtype={args.kv_cache_dtype}"
        problem += " needs Triton's attention"
    elif dtype != "bfloat16" and (dtype != "float16" or "FP16" in lacks):
        types = "bfloat16" if "FP16" in lacks else "bfloat16 or float16"
        problem = f"computes in {types}, and --dtype is {dtype}"
    else:
        problem = _misfit(args, spec, lacks, max_model_len)
    if problem:
        raise ValueError(f"--attention-backend=flash: {problem}")


def _misfit(args: EngineArgs, spec: ModelSpec, lacks: frozenset[str], max_model_len: int) -> str:
    """What the build cannot do of this model."""
    sizes = [size for size in TILE_KEYS if f"HDIM{size}" not in lacks]
    rounded = min((size for size in sizes if size >= spec.head_dim), default=0)
    if spec.head_dim % 8 or not rounded:
        return f"has no kernel for heads of {spec.head_dim}"
    window = min((size for size in spec.windows if size is not None), default=max_model_len)
    if window < max_model_len and "LOCAL" in lacks:
        return f"the installed build has no sliding windows, and the model has one of {window} positions"
    keys = TILE_KEYS[rounded]
    if args.block_size % keys and "PAGEDKV" in lacks:
        return (
            f"--block-size={args.block_size}: the installed build reads blocks by TMA only, which for heads "
            f"of {spec.head_dim} takes multiples of {keys} tokens"
        )
    return ""
