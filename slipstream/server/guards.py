"""ASGI middleware that looks at a request before its body is read: who asks, and whether there is room."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from slipstream.server.errors import ApiError, answer
from slipstream.server.options import ServerOptions
from slipstream.server.pages import PAGES

OPEN_PATHS = frozenset({"/health", "/version", "/metrics", *PAGES})
RETRY_SECONDS = 1


def install_guards(app: FastAPI, options: ServerOptions) -> None:
    """CORS is outermost, so that a browser may read a refusal; then keys; then the count."""
    if options.max_concurrent_requests:
        app.add_middleware(Gate, most=options.max_concurrent_requests)
    if options.api_keys:
        app.add_middleware(KeyGuard, api_keys=tuple(options.api_keys))
    app.add_middleware(
        CORSMiddleware,
        allow_origins=options.allowed_origins,
        allow_methods=options.allowed_methods,
        allow_headers=options.allowed_headers,
        allow_credentials=options.allow_credentials,
    )


class KeyGuard:
    """Asks for `Authorization: Bearer KEY`. Compares digests of equal length with every key, so that the time
    taken tells nothing about any of them."""

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


class Gate:
    """Lets `most` POST requests through at once, streams until their last byte; the others get a 429 before
    their body is kept."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most
        self._inside = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
        elif self._inside >= self._most:
            await self._refuse(scope, receive, send)
        else:
            self._inside += 1
            try:
                await self._app(scope, receive, send)
            finally:
                self._inside -= 1

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A client that is still sending would not read the answer, so its body is let go by.
        while (await receive()).get("more_body"):
            continue
        message = f"{self._most} requests are being answered, as many as --max-concurrent-requests lets in"
        full = answer(ApiError(429, message, code="rate_limit_exceeded", retry_after=RETRY_SECONDS))
        await full(scope, receive, send)
