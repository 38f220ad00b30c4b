"""Logging: one line an event, `time level logger event key=value ...`, for people and for grep alike."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import MutableMapping
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


def _value(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    plain = text.isprintable() and text and not any(c in ' "=' for c in text)
    return text if plain else json.dumps(text, ensure_ascii=False)


def get_logger(name: str) -> FieldLogger:
    """The logger of a module (`__name__`). Silent until setup() or the application configures logging."""
    return FieldLogger(logging.getLogger(name), {})


def setup(level: str = "info") -> None:
    """Send our lines to stderr. A program calls this; a library does not. Calling it again changes the
    level."""
    root = logging.getLogger(ROOT)
    root.setLevel(level.upper())
    if not any(isinstance(handler.formatter, LineFormatter) for handler in root.handlers):
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(LineFormatter())
        root.addHandler(handler)
        root.propagate = False
