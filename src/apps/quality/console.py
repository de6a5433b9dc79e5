"""Non-conformities in the console."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

from fastapi import Request
from fastapi.responses import Response

from apps.quality import service, store
from apps.quality.model import Severity, Status
from duly import Duly
from duly.console import Pages, Query, Section, read, show
from duly.operate.counts import CAP, Count

PAGE = 50
STATUSES = tuple(status.value for status in Status)
SEVERITIES = tuple(severity.value for severity in Severity)
LAST_ID = UUID(int=2**128 - 1)
pages = Pages()


def register(app: Duly) -> None:
    """Add the section."""
    app.include_console(
        Section("quality", "Non-conformities", pages, templates=Path(__file__).parent / "templates")
    )  # fmt: skip


@pages.get("")
async def nonconformities(request: Request) -> Response:
    """The newest first, by status, severity or supplier."""
    query = Query(request)
    status, severity = query.choice("status", STATUSES), query.choice("severity", SEVERITIES)
    supplier, before = query.text("supplier"), query.id("after")
    async with read(request) as look:
        if supplier is not None:
            found = await store.list_ncs(
                look.tx, status=Status(status) if status else None, severity=Severity(severity) if severity else None,
                supplier_id=supplier, before=before, limit=PAGE + 1,
            )  # fmt: skip
        else:
            found = await store.list_by_status(
                look.tx, statuses=[Status(status)] if status else list(Status),
                severities=[Severity(severity)] if severity else list(Severity), before=before or LAST_ID,
                limit=PAGE + 1,
            )  # fmt: skip
        counted = await store.count_by_status(look.tx, cap=CAP + 1)
    return show(
        request, "quality_list.html", now=look.now, found=found[:PAGE], chosen=status, severity=severity,
        supplier=supplier, statuses=STATUSES, severities=SEVERITIES,
        counts={name: Count.of(number) for name, number in counted.items()},
        after=found[PAGE - 1].id if len(found) > PAGE else None, is_first=before is None,
    )  # fmt: skip


@pages.get("/{id}")
async def nonconformity(request: Request, id: UUID) -> Response:
    """One, with its trail."""
    async with read(request) as look:
        nc, trail = await service.read_nc(look.tx, id)
    return show(request, "quality_one.html", now=look.now, nc=nc, trail=trail)
