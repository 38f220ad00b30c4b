"""Errors as HTTP answers, always in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException
from typing_extensions import TypedDict

from slipstream.contracts.errors import BadRequest, EngineDeadError, EngineError, QueueTimeoutError
from slipstream.contracts.limits import BOOLS, NUMBERS, SERVER_NUMBERS
from slipstream.observe.log import get_logger

log = get_logger(__name__)

_LIMITS = {rule.field: rule.limit for rule in NUMBERS + SERVER_NUMBERS} | dict.fromkeys(
    BOOLS, "must be true or false"
)
_LIMITS |= {
    "prompt": "must be a string, a list of strings, a list of token ids or a list of lists of token ids",
    "stop": "must be a string or a list of strings",
    "stop_token_ids": "must be a list of token ids",
    "allowed_token_ids": "must be a list of token ids",
    "logit_bias": "must map token ids to numbers",
    "bad_words": "must be a list of strings",
    "suffix": "is not supported, must be null",
    "use_beam_search": "is not supported, must be false",
    "length_penalty": "is not supported, must be null",
    "logits_processors": "is not supported, must be null",
    "vllm_xargs": "is not supported, must be null",
    "kv_transfer_params": "is not supported, must be null",
    "mm_processor_kwargs": "is not supported, must be null",
    "tool_choice": 'must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}',
    "response_format.type": 'must be "text", "json_object", "json_schema" or "structural_tag"',
}
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}

# pydantic names the member of a union that it tried as if it were a field.
_A_TYPE = re.compile(r"(str|int|float|bool|NoneType)$|(list|dict|constrained-str)\b|literal\[")
# What must be where pydantic found something else; braces are filled from the error's context.
_MUST_BE = {
    "model_type": "an object",
    "model_attributes_type": "an object",
    "dict_type": "an object",
    "list_type": "a list",
    "string_type": "a string",
    "bool_type": "true or false",
    "int_type": "an integer",
    "none_required": "null",
    "literal_error": "{expected}",
    "string_pattern_mismatch": "text of the form {pattern}",
    "too_short": "at least {min_length} long",
    "too_long": "at most {max_length} long",
}


class ErrorDetail(TypedDict):
    """What went wrong. param: the field at fault, where there is one; code: the HTTP status, or OpenAI's
    word."""

    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorBody(TypedDict):
    """Every answer with a status of 400 or more has this shape."""

    error: ErrorDetail


class ApiError(HTTPException):
    """An answer other than success that is not about a field's value: credentials, model names, broken
    JSON."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
        if retry_after is not None:
            headers["Retry-After"] = str(retry_after)
        super().__init__(status, message, headers)
        self.param = param
        self.code = code


def error_body(
    status: int, message: str, param: str | None = None, code: str | int | None = None
) -> ErrorBody:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "internal_server_error")
    return {
        "error": {"message": message, "type": kind, "param": param, "code": status if code is None else code}
    }


def describe(error: Exception) -> tuple[int, ErrorBody]:
    """Status and body of any exception; what is not the user's fault is told in general words only."""
    if isinstance(error, BadRequest):
        return 400, error_body(400, str(error), error.field)
    if isinstance(error, ApiError):
        return error.status_code, error_body(error.status_code, error.detail, error.param, error.code)
    if isinstance(error, QueueTimeoutError):
        return 503, error_body(503, str(error), code="queue_timeout")
    if isinstance(error, EngineDeadError):
        return 503, error_body(503, str(error) or "the engine is gone")
    if isinstance(error, EngineError):
        return 500, error_body(500, str(error) or "the engine failed while serving this request")
    return 500, error_body(500, "internal error; the server's log has the details")


def answer(error: Exception) -> JSONResponse:
    status, body = describe(error)
    headers = error.headers if isinstance(error, HTTPException) else None
    if isinstance(error, QueueTimeoutError):
        headers = {"Retry-After": str(math.ceil(error.seconds))}
    return JSONResponse(body, status, headers)


def install(app: FastAPI) -> None:
    """Make every error of the app an answer in OpenAI's shape."""

    async def known(_request: Request, error: Exception) -> JSONResponse:
        return answer(error)

    async def invalid(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return answer(from_validation(error.errors()))

    async def http(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, StarletteHTTPException)
        return JSONResponse(error_body(error.status_code, error.detail), error.status_code, error.headers)

    async def unknown(request: Request, error: Exception) -> JSONResponse:
        log.error("request failed", path=request.url.path, error=repr(error), exc_info=error)
        return answer(error)

    for kind in (BadRequest, ApiError, EngineError):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(StarletteHTTPException, http)
    app.add_exception_handler(Exception, unknown)


def from_validation(errors: Sequence[Mapping[str, Any]]) -> BadRequest:
    """The first schema violation as a BadRequest: the path of the field, its value, and the rule of
    limits.py."""
    first, *others = errors if _ruled(_path(errors[0])) else _of_the_form_meant(errors)
    path = _path(first)
    field = _ruled(path) or ".".join(path) or "body"
    if first["type"] == "extra_forbidden":
        return BadRequest(
            field, _short(first["input"]), "is not a field that this endpoint knows (see docs/server.md)"
        )
    if first["type"] == "missing":
        return BadRequest(field, None, "is required")
    known = [error for error in (first, *others) if error["type"] in _MUST_BE]
    forms = [_MUST_BE[error["type"]].format(**error.get("ctx", {})) for error in known]
    own = first["msg"][:1].lower() + first["msg"][1:]
    message = "must be " + " or ".join(dict.fromkeys(forms)) if forms else own
    return BadRequest(field, _short(first["input"]), _LIMITS.get(field, message))


def _of_the_form_meant(errors: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those that say why the first field at fault is not good. Every form that it may have gave an error: the
    form meant is the one in which it was found furthest inside."""
    paths = [_path(error) for error in errors]
    inside = [path for path in paths if path[: len(paths[0])] == paths[0]]
    deepest = max(inside, key=len)
    return [error for error, path in zip(errors, paths, strict=True) if path == deepest]


def _ruled(path: Sequence[str]) -> str:
    """The part of a path that has a rule of its own, or nothing."""
    return next((part for part in (".".join(path), *path[:1]) if part in _LIMITS), "")


def _path(error: Mapping[str, Any]) -> list[str]:
    return [str(part)[:80] for part in error["loc"][1:] if not _A_TYPE.match(str(part))]


def _short(value: Any) -> Any:
    """Enough of a value to recognise it: its repr is made before it is cut."""
    if isinstance(value, Mapping):
        return dict(list(value.items())[:8])
    return value[:100] if isinstance(value, str | list) else value
