"""Log lines: one an event, fields readable and parsable."""

from __future__ import annotations

import io
import logging

from slipstream.observe.log import FieldLogger, LineFormatter, get_logger


def written(logger: FieldLogger, level: int, event: str, **fields: object) -> str:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter())
    logger.logger.addHandler(handler)
    logger.logger.setLevel(logging.DEBUG)
    try:
        logger.log(level, event, **fields)  # type: ignore[arg-type]
    finally:
        logger.logger.removeHandler(handler)
    return stream.getvalue()


def test_fields_follow_the_event_in_order() -> None:
    line = written(get_logger("slipstream.test"), logging.INFO, "ready", port=8000, seconds=1.23456789)
    assert line.endswith(" info slipstream.test ready port=8000 seconds=1.23457\n")


def test_a_value_cannot_break_the_line() -> None:
    line = written(
        get_logger("slipstream.test"), logging.ERROR, "failed", text='a "b"\nc=d', none="", plain="x/y"
    )
    assert line.count("\n") == 1
    assert line.rstrip().endswith(r'failed text="a \"b\"\nc=d" none="" plain=x/y')


def test_an_exception_comes_after_its_line() -> None:
    try:
        raise ValueError("three")
    except ValueError as error:
        line = written(get_logger("slipstream.test"), logging.ERROR, "failed", exc_info=error, request="r")
    first, *rest = line.splitlines()
    assert first.endswith("failed request=r") and rest[-1] == "ValueError: three"
