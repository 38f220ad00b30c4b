"""From flags to a listening server: certificate and port first, then the engine, then HTTP; at SIGTERM
answers in flight go on until the deadline."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields

import uvicorn
from uvicorn.config import LOGGING_CONFIG, SSL_PROTOCOL_VERSION, create_ssl_context

from slipstream.config.args import EngineArgs
from slipstream.contracts.errors import EngineDeadError
from slipstream.observe.log import get_logger, setup, uvicorn_config
from slipstream.server.app import build_app
from slipstream.server.options import ServerOptions

log = get_logger(__name__)
LAST_WORDS_SECONDS = 3  # after the deadline, for errors to reach their clients


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Files as vLLM's flags name them. cert_reqs: 0, 1 or 2, of the ssl module: whether clients must have
    one."""

    certfile: str | None = None
    keyfile: str | None = None
    keyfile_password: str | None = None
    ca_certs: str | None = None
    cert_reqs: int = int(ssl.CERT_NONE)
    ciphers: str = "TLSv1"

    def check(self) -> bool:
        """Whether there is a certificate. Raises ValueError for flags that make no TLS server."""
        if self.certfile is None:
            given = [flag.name for flag in fields(self) if getattr(self, flag.name) != flag.default]
            if given:
                flags = ", ".join(f"--ssl-{name.replace('_', '-')}" for name in given)
                raise ValueError(f"{flags}: of no use without --ssl-certfile")
            return False
        try:
            create_ssl_context(
                self.certfile, self.keyfile, self.keyfile_password, SSL_PROTOCOL_VERSION, self.cert_reqs,
                self.ca_certs, self.ciphers,
            )
        except (OSError, ValueError) as error:
            files = f"--ssl-certfile={self.certfile} --ssl-keyfile={self.keyfile}"
            raise ValueError(f"{files} --ssl-ca-certs={self.ca_certs}: {error}") from None
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Where and how to listen. Levels are names of the logging module, in lower case. shutdown_timeout:
    seconds that answers in flight may go on after SIGTERM."""

    host: str = "127.0.0.1"
    port: int = 8000
    log_level: str = "info"
    log_format: str = "text"
    uvicorn_log_level: str = "info"
    access_log: bool = True
    shutdown_timeout: int = 30
    tls: Tls = field(default_factory=Tls)
    server: ServerOptions = field(default_factory=ServerOptions)


class DrainingServer(uvicorn.Server):
    """Ends as uvicorn does, but what has not finished at the deadline is told so instead of cut off.
    listening: called once clients can connect. lost: says that no engine is left, which ends the server;
    `failed` from then on."""

    def __init__(
        self,
        config: uvicorn.Config,
        seconds: float,
        listening: Callable[[], None],
        stop: Callable[[str], None],
        lost: Callable[[], bool],
    ) -> None:
        super().__init__(config)
        self._seconds = seconds
        self._listening = listening
        self._stop = stop
        self._lost = lost
        self.failed = False

    async def on_tick(self, counter: int) -> bool:
        self.failed = self._lost()
        return self.failed or await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listening()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        reason = f"the server is shutting down, and its {self._seconds:g} seconds for answers are over"
        log.info("draining", connections=len(self.server_state.connections), seconds=self._seconds)
        timer = asyncio.get_running_loop().call_later(self._seconds, self._stop, reason)
        await super().shutdown(sockets)
        timer.cancel()


def serve(args: EngineArgs, options: ServeOptions) -> None:
    """Runs until SIGINT or SIGTERM. Raises ValueError for flags that cannot be honoured, OSError for a port
    that cannot be had: before any weight is read; EngineDeadError where the engine is lost for good."""
    from slipstream.engine.async_llm import AsyncLLM
    from slipstream.engine.processes import keep_for_good
    from slipstream.text.chat_template import load_chat_template

    setup(options.log_level, options.log_format)
    if options.shutdown_timeout < 0:
        raise ValueError(f"--shutdown-timeout={options.shutdown_timeout}: must be at least 0")
    scheme = "https" if options.tls.check() else "http"
    names = _names(args)
    listener = _listen(options.host, options.port)
    begin = time.monotonic()
    engine = AsyncLLM.from_engine_args(args)
    try:
        tokenizer = None if args.skip_tokenizer_init else engine.get_tokenizer()
        render = None if tokenizer is None else load_chat_template(args.chat_template, tokenizer)
        app = build_app(engine, names, tokenizer=tokenizer, render=render, options=options.server)
        host, port = listener.getsockname()[:2]

        def ready() -> None:
            engine.watch()
            url = f"{scheme}://{host}:{port}"
            log.info("ready", url=url, model=names[0], seconds=time.monotonic() - begin)

        tls, level = options.tls, options.uvicorn_log_level
        config = uvicorn.Config(
            app,
            log_level=level,
            log_config=LOGGING_CONFIG if options.log_format == "text" else uvicorn_config(level),
            access_log=options.access_log,
            timeout_graceful_shutdown=options.shutdown_timeout + LAST_WORDS_SECONDS,
            ssl_certfile=tls.certfile,
            ssl_keyfile=tls.keyfile,
            ssl_keyfile_password=tls.keyfile_password,
            ssl_ca_certs=tls.ca_certs,
            ssl_cert_reqs=tls.cert_reqs,
            ssl_ciphers=tls.ciphers,
        )
        # uvicorn raises the signal again once it has ended; a server that was asked to end has not failed.
        signal.signal(signal.SIGTERM, lambda *_: log.info("ended"))
        server = DrainingServer(
            config, options.shutdown_timeout, ready, engine.stop, lambda: bool(engine.health.reason)
        )
        keep_for_good()
        server.run(sockets=[listener])
        if server.failed:
            raise EngineDeadError(engine.health.reason)
    finally:
        engine.shutdown()
        listener.close()


def _names(args: EngineArgs) -> tuple[str, ...]:
    """What clients may call the model, once each. Raises ValueError."""
    given = args.model if args.served_model_name is None else args.served_model_name
    names = (given,) if isinstance(given, str) else tuple(dict.fromkeys(given))
    if not names or not all(names):
        raise ValueError(f"--served-model-name={args.served_model_name!r}: must not be empty")
    return names


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
