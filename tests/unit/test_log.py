"""Log lines: one an event, fields readable and parsable."""

from __future__ import annotations

import datetime
import io
import json
import logging
import logging.config
from collections.abc import Iterator

import pytest

from slipstream.observe.log import (
    ROOT,
    FieldLogger,
    JsonFormatter,
    LineFormatter,
    current_format,
    get_logger,
    setup,
    uvicorn_config,
)


def written(
    logger: FieldLogger, level: int, event: str, form: type[logging.Formatter] = LineFormatter,
    **fields: object,
) -> str:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(form())
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


def test_a_json_line_holds_the_fields_as_what_they_are() -> None:
    line = written(
        get_logger("slipstream.test"), logging.INFO, 'all "of" it', JsonFormatter, port=8000, ok=True,
        seconds=1.5, far=float("inf"), text="a\nb \u00e9", time="mine", where=ROOT,
    )  # fmt: skip
    assert line.count("\n") == 1
    said = json.loads(line)
    when = datetime.datetime.fromisoformat(said.pop("time"))
    assert abs((datetime.datetime.now(datetime.UTC) - when).total_seconds()) < 60
    assert said == {
        "level": "info", "logger": "slipstream.test", "event": 'all "of" it', "port": 8000, "ok": True,
        "seconds": 1.5, "far": "inf", "text": "a\nb \u00e9", "time_": "mine", "where": "slipstream",
    }  # fmt: skip


def test_an_exception_is_a_field_of_its_json_line() -> None:
    try:
        raise ValueError("three")
    except ValueError as error:
        line = written(get_logger("slipstream.test"), logging.ERROR, "failed", JsonFormatter, exc_info=error)
    assert line.count("\n") == 1
    assert json.loads(line)["exception"].splitlines()[-1] == "ValueError: three"


@pytest.fixture
def plain_root() -> Iterator[None]:
    """Our root logger as it was, afterwards."""
    root = logging.getLogger(ROOT)
    before = root.handlers[:], root.level, root.propagate
    yield
    root.handlers[:], root.level, root.propagate = before


def test_setup_has_one_handler_whatever_it_is_told_in_turn(plain_root: None) -> None:
    root = logging.getLogger(ROOT)
    others = len(root.handlers)
    for form in ("text", "json", "text"):
        setup("warning", form)
        assert current_format() == form and root.level == logging.WARNING
        assert len(root.handlers) <= others + 1


def test_lines_of_uvicorns_access_log_are_json_with_fields(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("uvicorn", "uvicorn.access")
    loggers = {name: logging.getLogger(name) for name in names}
    before = {name: (logger.handlers[:], logger.propagate) for name, logger in loggers.items()}
    try:
        logging.config.dictConfig(uvicorn_config("info"))
        args = ("127.0.0.1:5", "POST", "/v1/completions", "1.1", 200)
        logging.getLogger("uvicorn.access").info('%s - "%s %s HTTP/%s" %d', *args)
        said = json.loads(capsys.readouterr().err)
    finally:
        for name, (handlers, propagate) in before.items():
            logging.getLogger(name).handlers[:] = handlers
            logging.getLogger(name).propagate = propagate
    assert (said["event"], said["method"], said["path"], said["status"]) == (
        "request", "POST", "/v1/completions", 200,
    )  # fmt: skip
