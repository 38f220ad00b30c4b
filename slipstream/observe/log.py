"""Logging: one line an event, `time level logger event key=value ...`, for people and for grep alike; or a
JSON object a line, for machines."""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import MutableMapping
from datetime import UTC, datetime
from typing import Any

ROOT = "slipstream"
_RESERVED = ("exc_info", "stack_info", "stacklevel", "extra")


class FieldLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose keyword arguments become fields of the line: log.info("ready", port=8000)."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        kept = {name: kwargs[name] for name in _RESERVED if name in kwargs}
        fields = {name: value for name, value in kwargs.items() if name not in _RESERVED}
        kept["extra"] = {"fields": fields}
        return msg, kept


class LineFormatter(logging.Formatter):
    """Fields after the message; a value with spaces, quotes or line ends is quoted as JSON, so a line stays
    one."""

    default_msec_format = "%s.%03d"

    def format(self, record: logging.LogRecord) -> str:
        head = f"{self.formatTime(record)} {record.levelname.lower()} {record.name} {record.getMessage()}"
        fields = getattr(record, "fields", {})
        line = " ".join([head, *(f"{name}={_value(value)}" for name, value in fields.items())])
        if record.exc_info:
            line += f"\n{self.formatException(record.exc_info)}"
        return line


_ACCESS_FIELDS = ("client", "method", "path", "http_version", "status")


class JsonFormatter(logging.Formatter):
    """time (RFC 3339, UTC), level, logger, event and the event's own fields; numbers and booleans stay what
    they are. Lines of uvicorn's access log get fields, too."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = getattr(record, "fields", {})
        event = record.getMessage()
        if record.name == "uvicorn.access" and isinstance(record.args, tuple) and len(record.args) == 5:
            event = "request"
            fields = dict(zip(_ACCESS_FIELDS, record.args, strict=True))
        head = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": event,
        }
        if record.exc_info:
            head["exception"] = self.formatException(record.exc_info)
        line = head | {f"{name}_" if name in head else name: _plain(value) for name, value in fields.items()}
        return json.dumps(line, ensure_ascii=False, default=str)


def _plain(value: Any) -> Any:
    """What JSON has a word for."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


FORMATTERS: dict[str, type[logging.Formatter]] = {"text": LineFormatter, "json": JsonFormatter}


def _value(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    plain = text.isprintable() and text and not any(c in ' "=' for c in text)
    return text if plain else json.dumps(text, ensure_ascii=False)


def get_logger(name: str) -> FieldLogger:
    """The logger of a module (`__name__`). Silent until setup() or the application configures logging."""
    return FieldLogger(logging.getLogger(name), {})


def setup(level: str = "info", form: str = "text") -> None:
    """Send our lines to stderr, in one of FORMATTERS. A program calls this; a library does not. Calling it
    again changes both."""
    root = logging.getLogger(ROOT)
    root.setLevel(level.upper())
    handler = _our_handler()
    if handler is None:
        handler = logging.StreamHandler(sys.stderr)
        root.addHandler(handler)
        root.propagate = False
    handler.setFormatter(FORMATTERS[form]())


def current_format() -> str:
    """The form that setup() chose, text where it was not called."""
    handler = _our_handler()
    return "json" if handler is not None and isinstance(handler.formatter, JsonFormatter) else "text"


def _our_handler() -> logging.Handler | None:
    ours = tuple(FORMATTERS.values())
    handlers = logging.getLogger(ROOT).handlers
    return next((handler for handler in handlers if isinstance(handler.formatter, ours)), None)


def uvicorn_config(level: str) -> dict[str, Any]:
    """logging.config's dictionary that gives uvicorn's logs our JSON form."""
    handler = {"class": "logging.StreamHandler", "formatter": "json", "stream": "ext://sys.stderr"}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"json": {"()": "slipstream.observe.log.JsonFormatter"}},
        "handlers": {"stderr": handler},
        "loggers": {"uvicorn": {"handlers": ["stderr"], "level": level.upper(), "propagate": False}},
    }
