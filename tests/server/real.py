"""The server over the real engine, in its own process, as `slipstream serve` joins them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from live import Live, serve

from slipstream.config.args import EngineArgs
from slipstream.engine.async_llm import AsyncLLM
from slipstream.server.app import build_app
from slipstream.server.options import ServerOptions
from slipstream.text.chat_template import load_chat_template

SMALL = {
    "dtype": "float32",
    "max_model_len": 256,
    "num_gpu_blocks_override": 129,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "spare_processes": False,  # what they import costs other tests their time
}


@contextmanager
def real_server(
    model: Path, options: ServerOptions = ServerOptions(), **args: Any  # noqa: B008 (frozen)
) -> Iterator[Live]:
    """A server of the model under the name "real", with SMALL's flags and those given."""
    engine_args = EngineArgs(model=str(model), **(SMALL | args))
    engine = AsyncLLM.from_engine_args(engine_args)
    tokenizer = engine.get_tokenizer()
    render = None if tokenizer is None else load_chat_template(None, tokenizer)
    app = build_app(engine, "real", tokenizer=tokenizer, render=render, options=options)
    with serve(app) as live:
        yield live
