"""Choices that follow from the model's files: KV cache, quantisation, loading, tokenizer, chat template.
resolve() calls these and nobody else does."""

from __future__ import annotations

from slipstream.config.args import EngineArgs
from slipstream.config.model import ModelSpec
from slipstream.config.plan import Choice

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
GIB = 2**30


def kv_cache_choice(
    args: EngineArgs,
    spec: ModelSpec,
    device: str,
    kv_dtype: str,
    max_model_len: int,
    max_num_seqs: int,
    drafter_width: int = 0,
) -> Choice:
    """drafter_width: elements a token that a drafter's layers add. value: bytes_per_token over all layers;
    num_blocks, None until memory is measured; what a request of max_model_len takes, and max_num_seqs of
    them."""
    width = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim + drafter_width
    token = width * ITEM_BYTES[kv_dtype]
    block = token * args.block_size
    request = -(-max_model_len // args.block_size) * block
    blocks, flag = args.num_gpu_blocks_override, "--num-gpu-blocks-override"
    sized = f"{blocks} blocks asked for"
    if args.kv_cache_memory_bytes is not None:
        blocks, flag = args.kv_cache_memory_bytes // block, "--kv-cache-memory-bytes"
        sized = f"what {args.kv_cache_memory_bytes:,} bytes hold"
    elif blocks is None:
        flag = "--gpu-memory-utilization"
        cpu = ", at most 4 GiB" if device == "cpu" else ""
        share = f"{args.gpu_memory_utilization:.0%} of memory"
        sized = f"at start, what weights, activations and graphs leave of {share}{cpu}"
    return Choice(
        value={
            "bytes_per_token": token,
            "block_size": args.block_size,
            "num_blocks": blocks,
            "bytes_per_request": request,
            "bytes_of_all_requests": request * max_num_seqs,
        },
        reason=f"{sized}; {max_num_seqs} requests of {max_model_len} tokens would take "
        f"{request * max_num_seqs / GIB:.2f} GiB, one {request / GIB:.3f}",
        flag=flag,
    )


def model_choices(args: EngineArgs, spec: ModelSpec, dtype: str, own_template: str) -> dict[str, Choice]:
    """quantization, load_format, tokenizer, chat_template."""
    stored = spec.quantization != "none"
    loading = {"auto": "what the model's path holds", "dummy": "asked for: random weights from --seed"}
    return {
        "quantization": Choice(
            value=spec.quantization,
            reason=f"as the GGUF file stores it; expanded to {dtype} when loaded"
            if stored
            else "the weights are stored as plain numbers",
        ),
        "load_format": Choice(
            value=args.load_format, reason=loading.get(args.load_format, "asked for"), flag="--load-format"
        ),
        "tokenizer": _tokenizer(args),
        "chat_template": _chat_template(args, own_template),
    }


def _tokenizer(args: EngineArgs) -> Choice:
    if args.skip_tokenizer_init:
        return Choice(value="none", reason="asked for: token ids in and out", flag="--skip-tokenizer-init")
    reason = "the model's own" if args.tokenizer is None else "asked for"
    return Choice(value=args.tokenizer or args.model, reason=reason, flag="--tokenizer")


def _chat_template(args: EngineArgs, own: str) -> Choice:
    if args.skip_tokenizer_init:
        return Choice(
            value="none", reason="without a tokenizer there is no text", flag="--skip-tokenizer-init"
        )
    if args.chat_template is None:
        reason = "the model's own" if own else "the model has none: chat requests are refused"
        return Choice(value=own or "none", reason=reason, flag="--chat-template")
    inline = "{" in args.chat_template
    return Choice(
        value="inline text" if inline else args.chat_template, reason="asked for", flag="--chat-template"
    )


def check_front_end(args: EngineArgs) -> None:
    """Raises ValueError for flags of text without a tokenizer."""
    for flag, given in (("--chat-template", args.chat_template), ("--tokenizer", args.tokenizer)):
        if args.skip_tokenizer_init and given is not None:
            raise ValueError(f"{flag} contradicts --skip-tokenizer-init: there is no text then")
