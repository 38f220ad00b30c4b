"""From flags to a listening server: port first, then the engine, then HTTP."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

import uvicorn

from slipstream.config.args import EngineArgs
from slipstream.observe.log import get_logger, setup
from slipstream.server.app import build_app

log = get_logger(__name__)
DRAIN_SECONDS = 10  # for answers in flight after SIGTERM


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Where and how to listen. Levels are names of the logging module, in lower case."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: Sequence[str] = ()
    log_level: str = "info"
    uvicorn_log_level: str = "info"
    access_log: bool = True


def serve(args: EngineArgs, options: ServeOptions) -> None:
    """Runs until SIGINT or SIGTERM. Raises ValueError for flags that cannot be honoured, OSError for a port
    that cannot be had: before any weight is read."""
    from slipstream.engine.async_llm import AsyncLLM
    from slipstream.text.chat_template import load_chat_template

    setup(options.log_level)
    listener = _listen(options.host, options.port)
    begin = time.monotonic()
    engine = AsyncLLM.from_engine_args(args)
    try:
        tokenizer = None if args.skip_tokenizer_init else engine.get_tokenizer()
        render = None if tokenizer is None else load_chat_template(args.chat_template, tokenizer)
        model = args.served_model_name or args.model
        app = build_app(engine, model, tokenizer=tokenizer, render=render, api_keys=options.api_keys)
        host, port = listener.getsockname()[:2]
        log.info("ready", url=f"http://{host}:{port}", model=model, seconds=time.monotonic() - begin)
        config = uvicorn.Config(
            app,
            log_level=options.uvicorn_log_level,
            access_log=options.access_log,
            timeout_graceful_shutdown=DRAIN_SECONDS,
        )
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        engine.shutdown()
        listener.close()


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise ValueError(f"--port={port}: must be 0 to 65535")
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"--host={host} --port={port}: {error.strerror or error}") from None
    return listener
