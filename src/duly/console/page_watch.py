"""Who did what, what the engine complains about, and who is alive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import Request
from fastapi.responses import Response

from duly.console import sql
from duly.console.record import for_viewer, read_audit
from duly.console.routes import Pages, Query, read, show
from duly.operate.alerts import list_alerts
from duly.operate.audit import AuditEntry
from duly.operate.status import ALIVE_SECONDS, PROCESSES_LIMIT

if TYPE_CHECKING:
    from duly.console.app import Look

PAGE = 50
AUDIT_SCAN = 5_000


def register(pages: Pages) -> None:
    """Add these routes."""
    pages.get("/audit")(audit)
    pages.get("/alerts")(alerts)
    pages.get("/processes")(processes)


async def audit(request: Request) -> Response:
    """Every action: who, what, before, after, and why."""
    query = Query(request)
    filters = {"who": query.text("who"), "what": query.text("what"), "subject": query.text("subject")}
    after = query.number("after")
    async with read(request) as look:
        if filters["who"] or filters["what"]:
            found, reached = await _search_audit(look, after, **filters)
            found = for_viewer(request, found)
        else:
            found = await read_audit(request, look, subject=filters["subject"], before=after, limit=PAGE + 1)
            reached = None
    more = found[PAGE - 1].id if len(found) > PAGE else reached
    return show(
        request, "audit.html", now=look.now, entries_=found[:PAGE], filters=filters, after=more,
        is_first=after is None, is_filtered=any(filters.values()),
        has_looked=len(found) <= PAGE and reached is not None,
    )  # fmt: skip


async def _search_audit(
    look: Look, before: int | None, *, who: str | None, what: str | None, subject: str | None
) -> tuple[list[AuditEntry], int | None]:
    """What fits, and how far was looked, if there is more to look through."""
    values: dict[str, Any] = {"before": before, "scan": AUDIT_SCAN}
    listing, reached = sql.SEARCH_AUDIT, sql.FIND_AUDIT_REACHED
    if subject is not None:
        listing, reached = sql.SEARCH_AUDIT_OF_SUBJECT, sql.FIND_AUDIT_OF_SUBJECT_REACHED
        values["subject"] = subject
    rows = await look.rows(listing, **values, actor=who, action=what, limit=PAGE + 1)
    ended = await look.rows(reached, **values) if len(rows) <= PAGE else []
    return [AuditEntry(*row) for row in rows], ended[0][0] if ended else None


async def alerts(request: Request) -> Response:
    """What is open; with ``all`` what was resolved, too."""
    query = Query(request)
    everything, before = query.text("all") is not None, query.row_place()
    async with read(request) as look:
        found = await list_alerts(look.tx, open_only=not everything, before=before, limit=PAGE + 1)
    last = found[PAGE - 1] if len(found) > PAGE else None
    after = f"{last.raised_at.isoformat()}_{last.id}" if last else None
    return show(
        request, "alerts.html", now=look.now, alerts=found[:PAGE], everything=everything, after=after,
        is_first=before is None,
    )  # fmt: skip


async def processes(request: Request) -> Response:
    """Who gave a sign of life, and who has fallen silent."""
    async with read(request) as look:
        found = await look.rows(sql.LIST_PROCESSES, limit=PROCESSES_LIMIT)
    return show(request, "processes.html", now=look.now, processes=found, alive_seconds=ALIVE_SECONDS)
