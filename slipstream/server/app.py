"""The application: routes joined, credentials checked, errors shaped. build_app() is all that others need."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import APIRouter, FastAPI, Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from typing_extensions import TypedDict

from slipstream.config.explanation import VLLM_KEY
from slipstream.observe.log import get_logger
from slipstream.observe.version import package_version
from slipstream.server import chat, completions, tokenize
from slipstream.server.context import Context, Engine, Render
from slipstream.server.errors import ApiError, ErrorBody, answer, error_body, install
from slipstream.server.metrics import Metrics
from slipstream.server.streams import ClientGone, json_answer

if TYPE_CHECKING:
    from slipstream.text.tokenizer import Tokenizer

log = get_logger(__name__)
OPEN_PATHS = frozenset({"/health", "/version", "/metrics"})
CLIENT_GONE = 499  # nginx's status for it; nobody reads the answer, the access log does


class ModelCard(TypedDict):
    id: str
    object: str
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(TypedDict):
    object: str
    data: list[ModelCard]


class Version(TypedDict):
    version: str


def build_app(
    engine: Engine,
    model: str,
    *,
    tokenizer: Tokenizer | None,
    render: Render | None = None,
    api_keys: Sequence[str] = (),
) -> FastAPI:
    """An ASGI app over a running engine, which it shuts down at its own end.

    model: the name that clients use. tokenizer: None where clients send and get ids only. render: the chat
    template, None where the model has none. api_keys: any of them opens every path but /health, /version and
    /metrics; none: no key is asked.
    """
    metrics = Metrics(model, lambda: engine.stats, engine.info)
    max_chars = 0 if tokenizer is None else engine.info.limits.max_model_len * _longest_token(tokenizer)
    context = Context(engine, model, metrics, tokenizer, render, max_chars)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        engine.shutdown()

    app = FastAPI(
        title="Slipstream",
        version=package_version(),
        lifespan=lifespan,
        redoc_url=None,
        description="OpenAI-compatible endpoints. Every error has OpenAI's shape.",
    )
    install(app)
    app.add_exception_handler(ClientGone, _client_gone)
    for routes in (
        _plain_routes(context),
        completions.router(context),
        chat.router(context),
        tokenize.router(context),
    ):
        app.include_router(routes)
    if api_keys:
        app.add_middleware(KeyGuard, api_keys=tuple(api_keys))
    return app


def _longest_token(tokenizer: Tokenizer) -> int:
    """Characters of it, as the vocabulary spells it: at least as many as of the text it stands for."""
    return max(map(len, tokenizer.convert_ids_to_tokens(range(tokenizer.vocab_size))))


async def _client_gone(request: Request, _error: Exception) -> Response:
    log.info("client gone", path=request.url.path)
    return Response(status_code=CLIENT_GONE)


def _plain_routes(context: Context) -> APIRouter:
    routes = APIRouter(tags=["server"])
    limits = context.engine.info.limits

    @routes.get("/health", responses={503: {"model": ErrorBody}})
    async def health() -> Response:
        """200 while the engine takes requests."""
        if context.engine.errored:
            return Response(
                json_answer(error_body(503, "the engine is gone")).body, 503, media_type="application/json"
            )
        return Response(status_code=200)

    @routes.get("/v1/models", responses={200: {"model": ModelList}})
    async def models() -> Response:
        """The one model served."""
        card: ModelCard = {
            "id": context.model,
            "object": "model",
            "created": context.created,
            "owned_by": "slipstream",
            "root": context.model,
            "max_model_len": limits.max_model_len,
        }
        listed: ModelList = {"object": "list", "data": [card]}
        return json_answer(listed)

    @routes.get("/v1/engine/plan")
    async def plan() -> Response:
        """What the engine chose and why, and what vLLM 0.31.0 would have: as `slipstream explain --json`."""
        info = context.engine.info
        return json_answer({**info.plan, VLLM_KEY: info.vllm_0_31})

    @routes.get("/version", responses={200: {"model": Version}})
    async def show_version() -> Response:
        current: Version = {"version": package_version()}
        return json_answer(current)

    @routes.get("/metrics")
    async def metrics() -> Response:
        """Prometheus text format."""
        return Response(context.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return routes


class KeyGuard:
    """ASGI middleware: asks for `Authorization: Bearer KEY`. Compares digests of equal length with every
    key, so that the time taken tells nothing about any of them."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._allowed(scope):
            denied = answer(
                ApiError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")
            )
            await denied(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        header = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = header.partition(b" ")
        given = hashlib.sha256(key.strip()).digest()
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        return scheme.lower() == b"bearer" and any(matches)
