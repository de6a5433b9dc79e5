"""Who did what, what the engine complains about, and who is alive."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import Response

from duly.console import sql
from duly.console.record import read_audit
from duly.console.routes import Pages, Query, read, show
from duly.operate.alerts import list_alerts
from duly.operate.status import ALIVE_SECONDS, PROCESSES_LIMIT

PAGE = 50


def register(pages: Pages) -> None:
    """Add these routes."""
    pages.get("/audit")(audit)
    pages.get("/alerts")(alerts)
    pages.get("/processes")(processes)


async def audit(request: Request) -> Response:
    """Every action: who, what, before, after, and why."""
    query = Query(request)
    subject, after = query.text("subject"), query.number("after")
    async with read(request) as look:
        found = await read_audit(request, look, subject=subject, before=after, limit=PAGE + 1)
    more = found[PAGE - 1].id if len(found) > PAGE else None
    return show(
        request, "audit.html", now=look.now, entries_=found[:PAGE], subject=subject, after=more, is_first=after is None
    )


async def alerts(request: Request) -> Response:
    """What is open; with ``all`` what was resolved, too."""
    everything = Query(request).text("all") is not None
    async with read(request) as look:
        found = await list_alerts(look.tx, open_only=not everything, limit=200)
    return show(request, "alerts.html", now=look.now, alerts=found, everything=everything)


async def processes(request: Request) -> Response:
    """Who gave a sign of life, and who has fallen silent."""
    async with read(request) as look:
        found = await look.rows(sql.LIST_PROCESSES, limit=PROCESSES_LIMIT)
    return show(request, "processes.html", now=look.now, processes=found, alive_seconds=ALIVE_SECONDS)
