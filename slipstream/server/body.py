"""Reading a request's body: size, encoding, strict JSON. What passes here is plain data of bounded depth and
width."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope

from slipstream.server.errors import ApiError

MAX_DEPTH = 64
MAX_OBJECT_FIELDS = 4096  # bounds the errors that a schema can find in one object


class StrictRoute(APIRoute):
    """A route whose body is read by StrictRequest."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        inner = super().get_route_handler()

        async def handler(request: Request) -> Response:
            return await inner(StrictRequest(request.scope, request.receive))

        return handler


class StrictRequest(Request):
    """A request that reads at most app.state.max_request_bytes and takes only what RFC 8259 calls JSON."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        super().__init__(scope, receive)
        self._raw: bytes | None = None

    async def body(self) -> bytes:
        if self._raw is None:
            self._raw = await self._read()
        return self._raw

    async def json(self) -> Any:
        return parse_json(await self.body())

    async def _read(self) -> bytes:
        kind = self.headers.get("content-type", "").split(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            raise ApiError(400, f"content-type={kind!r}: must be application/json", "content-type")
        most: int = self.app.state.max_request_bytes
        declared = self.headers.get("content-length", "")
        if declared.isdecimal() and len(declared) < 20 and int(declared) > most:
            _too_large(most)
        parts: list[bytes] = []
        size = 0
        async for part in self.stream():
            size += len(part)
            if size > most:
                _too_large(most)
            parts.append(part)
        return b"".join(parts) or b"null"


def parse_json(raw: bytes) -> Any:
    """The value of a JSON text. Raises ApiError (400) for text that is not UTF-8 or not JSON, numbers that
    are not finite, lone surrogates, a field given twice, and nesting beyond MAX_DEPTH."""
    not_finite: list[float] = []

    def number(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            not_finite.append(value)
        return value

    try:
        value = json.loads(
            raw.decode("utf-8"), parse_constant=number, parse_float=number, object_pairs_hook=_object
        )
        if b"\\u" in raw:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(400, f"body: is not valid UTF-8 at byte {error.start}", "body") from None
    except UnicodeEncodeError:
        raise ApiError(400, "body: holds half of a surrogate pair, which is not text", "body") from None
    except RecursionError:
        _too_deep()
    except ValueError as error:
        raise ApiError(400, f"body: is not valid JSON: {error}", "body") from None
    _check_depth(value)
    if not_finite:
        path = ".".join(_path_of_non_finite(value) or ["body"])
        raise ApiError(400, f"{path}={not_finite[0]}: must be a finite number", path)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(pairs) > MAX_OBJECT_FIELDS:
        raise ApiError(
            400, f"body: an object has {len(pairs)} fields, the limit is {MAX_OBJECT_FIELDS}", "body"
        )
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for place, name in enumerate(names) if name in names[:place])
        raise ApiError(400, f"{twice[:80]}: is given twice", twice[:80])
    return value


def _children(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list) else []


def _path_of_non_finite(value: Any) -> list[str] | None:
    """Where the first number that is not finite stands. Recurses at most MAX_DEPTH levels."""
    if isinstance(value, float) and not math.isfinite(value):
        return []
    for key, child in _children(value):
        path = _path_of_non_finite(child)
        if path is not None:
            return [str(key)[:80], *path]
    return None


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            child
            for parent in level
            if isinstance(parent, dict | list)
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    _too_deep()


def _too_deep() -> NoReturn:
    raise ApiError(400, f"body: is nested more than {MAX_DEPTH} levels deep", "body")


def _too_large(most: int) -> NoReturn:
    raise ApiError(400, f"body: is larger than {most} bytes", "body")
