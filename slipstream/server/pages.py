"""The dashboard: its static files at /, and the one endpoint that feeds it."""

from __future__ import annotations

import asyncio
import time
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter, Response

from slipstream.contracts.outputs import STEP_COLUMNS
from slipstream.observe.version import package_version
from slipstream.server.context import Context
from slipstream.server.errors import ErrorBody
from slipstream.server.streams import json_answer

if TYPE_CHECKING:
    from slipstream.contracts.outputs import EngineSnapshot
    from slipstream.engine.look import Look

_KINDS = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
_NAMES = ("theme.js", "app.js", "rows.js", "timeline.js", "charts.js", "plan.js", "style.css", "icon.svg")
# Path to file. They hold nothing of this server's, so they are open: the page asks for the key.
PAGES = {"/": "index.html"} | {f"/dashboard/{name}": name for name in _NAMES}
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
}
FRESH_SECONDS = 0.1  # viewers share a snapshot that is younger
PATIENCE_SECONDS = 5.0  # a long step answers late; then the last snapshot is shown again
_ROW_COLUMNS = ("phase", "length", "computed", "max_len", "num_blocks", "drafted", "accepted")
FIRST_TIME = STEP_COLUMNS.index("plan_begin")


def router(context: Context) -> APIRouter:
    routes = APIRouter(tags=["dashboard"])
    folder = files("slipstream.server") / "dashboard"
    for path, name in PAGES.items():
        kind = f"{_KINDS[name.rpartition('.')[2]]}; charset=utf-8"
        routes.add_api_route(path, _page((folder / name).read_bytes(), kind), include_in_schema=False)
    feed = StateFeed(context)

    @routes.get("/v1/engine/state", responses={503: {"model": ErrorBody}})
    async def state() -> Response:
        """The row table, the last steps and the engine's counts: what the dashboard at / draws."""
        return json_answer(await feed.state())

    return routes


def _page(data: bytes, kind: str) -> Any:
    async def page() -> Response:
        return Response(data, media_type=kind, headers=_HEADERS)

    return page


class StateFeed:
    """The engine as it looks, asked only when somebody wants to know, and at most ten times a second."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._last: dict[str, Any] | None = None
        self._when = 0.0
        self._asking: asyncio.Task[dict[str, Any]] | None = None

    async def state(self) -> dict[str, Any]:
        """Raises EngineDeadError."""
        if self._last is not None and time.monotonic() - self._when < FRESH_SECONDS:
            return self._last
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        done, _ = await asyncio.wait({self._asking}, timeout=PATIENCE_SECONDS)
        if done or self._last is None:
            return await asyncio.shield(self._asking)
        return self._last | {"late_seconds": time.monotonic() - self._when}

    async def _ask(self) -> dict[str, Any]:
        look = await self._context.engine.look()
        self._when = time.monotonic()
        self._last = describe(look, self._context, self._when)
        return self._last


def describe(look: Look, context: Context, now: float) -> dict[str, Any]:
    """rows: a list a column; owners: by row; steps: a list a step, times in microseconds before the
    snapshot. now: time.monotonic() of it."""
    owners = {
        str(row): {
            "id": state.request_id,
            "prompt": len(state.prepared.token_ids),
            "cached": state.num_cached or 0,
            "seconds": round(now - state.metrics.arrival_time, 3),
        }
        for row, state in look.owners.items()
    }
    return {
        "model": context.model,
        "version": package_version(),
        "time": now,
        "late_seconds": 0.0,
        "block_size": context.engine.info.limits.block_size,
        "stats": msgspec.structs.asdict(look.stats),
        "rows": {name: getattr(look.snapshot, name).tolist() for name in _ROW_COLUMNS},
        "owners": owners,
        "step_columns": STEP_COLUMNS,
        "steps": _steps(look.snapshot),
    }


def _steps(snapshot: EngineSnapshot) -> list[list[int]]:
    table = snapshot.steps.copy()
    table[:, FIRST_TIME:] *= 1e6
    steps: list[list[int]] = table.round().astype("int64").tolist()
    return steps
