"""The application: routes joined, credentials checked, errors shaped. build_app() is all that others need."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Literal

from fastapi import APIRouter, FastAPI, Request, Response
from typing_extensions import TypedDict

from slipstream.config.explanation import VLLM_KEY
from slipstream.observe.log import get_logger
from slipstream.observe.version import package_version
from slipstream.server import chat, completions, embeddings, pages, responses, tokenize
from slipstream.server.context import Context, Engine, Render
from slipstream.server.errors import ErrorBody, install
from slipstream.server.guards import install_guards
from slipstream.server.metrics import Metrics
from slipstream.server.options import ServerOptions
from slipstream.server.request_log import log_request
from slipstream.server.streams import ClientGone, json_answer
from slipstream.server.tracing import Spans, TraceParent

if TYPE_CHECKING:
    from slipstream.contracts.outputs import EngineStats
    from slipstream.engine.client import EngineHealth
    from slipstream.text.tokenizer import Tokenizer

log = get_logger(__name__)
DEFAULTS = ServerOptions()
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


class Health(TypedDict):
    status: Literal["ready", "restarting", "dead"]
    live: bool
    ready: bool
    replacing: Literal["engine", "worker"] | None
    progress: int
    quiet_seconds: float | None
    restarts: int
    worker_restarts: int
    running: int
    waiting: int
    reason: str


def build_app(
    engine: Engine,
    model: str | Sequence[str],
    *,
    tokenizer: Tokenizer | None,
    render: Render | None = None,
    options: ServerOptions = DEFAULTS,
) -> FastAPI:
    """An ASGI app over a running engine, which it shuts down at its own end.

    model: the name that clients use, or names: answers give the first. tokenizer: None where clients send and
    get ids only. render: the chat template, None where the model has none.
    """
    names = (model,) if isinstance(model, str) else tuple(model)
    spans = None if options.otlp_traces_endpoint is None else Spans(options.otlp_traces_endpoint, names[0])
    listeners = [log_request] * options.enable_log_requests + ([] if spans is None else [spans.ended])
    metrics = Metrics(
        names[0], lambda: engine.stats, engine.info, listeners, lambda: engine.health.restarts
    )
    max_chars = 0 if tokenizer is None else engine.info.limits.max_model_len * _longest_token(tokenizer)
    context = Context(engine, names, metrics, options, tokenizer, render, max_chars)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        engine.shutdown()
        if spans is not None:
            spans.close()

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
        responses.router(context),
        embeddings.router(context),
        tokenize.router(context),
        pages.router(context),
    ):
        app.include_router(routes)
    app.state.max_request_bytes = options.max_request_bytes
    if spans is not None:
        app.add_middleware(TraceParent)
    install_guards(app, options)
    return app


def _longest_token(tokenizer: Tokenizer) -> int:
    """Characters of it, as the vocabulary spells it: at least as many as of the text it stands for."""
    return max(map(len, tokenizer.convert_ids_to_tokens(range(tokenizer.vocab_size))))


async def _client_gone(request: Request, _error: Exception) -> Response:
    log.info("client gone", path=request.url.path)
    return Response(status_code=CLIENT_GONE)


def _health(now: EngineHealth, stats: EngineStats) -> Health:
    return {
        "status": "dead" if now.reason else "ready" if now.ready else "restarting",
        "live": not now.reason,
        "ready": now.ready,
        "replacing": now.replacing,
        "progress": now.progress,
        "quiet_seconds": None if now.quiet is None else round(now.quiet, 3),
        "restarts": now.restarts,
        "worker_restarts": now.worker_restarts,
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "reason": now.reason,
    }


def _plain_routes(context: Context) -> APIRouter:
    routes = APIRouter(tags=["server"])
    cards: dict[str, ModelCard] = {
        name: {
            "id": name,
            "object": "model",
            "created": context.created,
            "owned_by": "slipstream",
            "root": context.model,
            "max_model_len": context.engine.info.limits.max_model_len,
        }
        for name in context.names
    }

    @routes.get("/health", responses={200: {"model": Health}, 503: {"model": Health}})
    async def health() -> Response:
        """200 while requests are computed, 503 while another engine or worker starts and once there is none.
        progress: messages, steps and looks of this engine; quiet_seconds: since that moved."""
        now = context.engine.health
        body = json_answer(_health(now, context.engine.stats)).body
        return Response(body, 200 if now.ready else 503, media_type="application/json")

    @routes.get("/v1/models", responses={200: {"model": ModelList}})
    async def models() -> Response:
        """The one model served, under each of its names."""
        listed: ModelList = {"object": "list", "data": list(cards.values())}
        return json_answer(listed)

    @routes.get("/v1/models/{name:path}", responses={200: {"model": ModelCard}, 404: {"model": ErrorBody}})
    async def model(name: str) -> Response:
        """The model served, by one of its names."""
        context.check_model(name)
        return json_answer(cards[name])

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
