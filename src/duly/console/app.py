"""Mounts the operator's page; until sign-in exists it is served in development only."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import structlog
from fastapi import APIRouter, FastAPI
from fastapi.responses import HTMLResponse, Response
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from sqlalchemy.exc import TimeoutError as PoolTimeout

from duly.console.queries import capped, read_overview
from duly.db import Database, is_disconnect, sqlstate
from duly.settings import Settings

log = structlog.get_logger("duly.console")
MOUNT = "/console"
QUERY_CANCELED = "57014"
HERE = Path(__file__).parent
STATIC = {"console.css": "text/css"}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; img-src 'self'; base-uri 'none'; "
        "form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def mount_console(api: FastAPI, db: Database, settings: Settings) -> bool:
    """Add the console to an api; False, and nothing added, outside development."""
    if settings.env != "development":
        return False
    api.include_router(create_console_router(db))
    api.state.links["console"] = MOUNT
    return True


def create_console_router(db: Database) -> APIRouter:
    """The pages and their stylesheet."""
    router = APIRouter(prefix=MOUNT, include_in_schema=False)
    templates = _environment()

    @router.get("")
    async def overview() -> HTMLResponse:
        try:
            view = await read_overview(db)
        except Exception as error:
            if not is_unavailable(error):
                raise
            log.warning("console_database_away", error=type(error).__name__)
            return _page(templates, "away.html", status=503)
        return _page(templates, "overview.html", view=view)

    @router.get("/static/{name}")
    async def static(name: str) -> Response:
        if name not in STATIC:
            return Response("not found", status_code=404, media_type="text/plain", headers=HEADERS)
        content = (HERE / "static" / name).read_bytes()
        headers = {**HEADERS, "Cache-Control": "max-age=300"}
        return Response(content, media_type=STATIC[name], headers=headers)

    return router


def is_unavailable(error: BaseException) -> bool:
    """Whether the database is away, its pool used up, or an answer took too long."""
    return is_disconnect(error) or isinstance(error, PoolTimeout) or sqlstate(error) == QUERY_CANCELED


def _page(templates: Environment, name: str, *, status: int = 200, **values: Any) -> HTMLResponse:
    body = templates.get_template(name).render(mount=MOUNT, **values)
    return HTMLResponse(body, status_code=status, headers=HEADERS)


def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(capped=capped, duration=duration, when=when, iso=iso)
    return made


def duration(seconds: float | None) -> str:
    """A length of time in one or two units, as a person says it."""
    if seconds is None:
        return "–"
    sign, seconds = ("in ", -seconds) if seconds < 0 else ("", seconds)
    if seconds < 1:
        return f"{sign}{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{sign}{seconds:.1f} s"
    minutes, whole = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{sign}{minutes} min {whole:02d} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{sign}{hours} h {minutes:02d} min"
    return f"{sign}{hours // 24:,} d {hours % 24:02d} h"


def when(moment: datetime | None) -> str:
    """An instant in UTC, to the second."""
    return "–" if moment is None else moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def iso(moment: datetime | None) -> str:
    """An instant for machines."""
    return "" if moment is None else moment.astimezone(UTC).isoformat()
