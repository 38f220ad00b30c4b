"""Errors that cross borders. What a user did wrong is a BadRequest; what broke under us is an EngineError."""

from __future__ import annotations

from typing import Any


class BadRequest(ValueError):
    """A request that cannot be served as asked.

    The text always names the field, the value that was given and the limit that it breaks, so that the
    HTTP server (status 400) and the Python API (ValueError) say the same thing.
    """

    def __init__(self, field: str, value: Any, limit: str) -> None:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        super().__init__(f"{field}={shown}: {limit}")
        self.field = field
        self.value = value
        self.limit = limit


class EngineError(RuntimeError):
    """The engine failed while serving; the request was valid."""


class EngineDeadError(EngineError):
    """The engine has ended or was closed, and cannot take requests."""


class CrashLoopError(EngineDeadError):
    """What was lost again and again is not replaced any more."""


class WorkerLostError(EngineError):
    """The process that computes for the engine died, or was ended because it hung or broke."""


class StepMemoryError(EngineError):
    """A step found too little memory; whoever computed it can go on."""


# The text of a request's own error where its wait was over; the front end makes it the error below.
OVERDUE = "no row became free in time"


class QueueTimeoutError(EngineError):
    """The request waited for a row longer than it was allowed to, and was given up. seconds: how long."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no row became free within {seconds:g} seconds: try again later")
        self.seconds = seconds
