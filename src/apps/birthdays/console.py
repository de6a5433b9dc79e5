"""Birthday messages in the console: ids, zones and times, and nothing else of a person."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

from fastapi import Request
from fastapi.responses import RedirectResponse, Response

from apps.birthdays import store
from apps.birthdays.model import BirthdayEvent, EventStatus
from duly import Duly
from duly.console import Pages, Query, Section, read, show
from duly.errors import NotFound
from duly.operate.jobs import list_jobs

if TYPE_CHECKING:
    from duly.console.app import Look

PAGE = 50
SCAN = 2_000  # of what is over, that are looked through for one of its two kinds
LAST_YEAR = 10_000
STATUSES = tuple(status.value for status in EventStatus)
FIRST = (datetime(1, 1, 2, tzinfo=UTC), UUID(int=0))
LAST = (datetime(9999, 1, 1, tzinfo=UTC), UUID(int=2**128 - 1))
OVER = (EventStatus.COMPLETED, EventStatus.FAILED)
pages = Pages()


def register(app: Duly) -> None:
    """Add the section."""
    app.include_console(Section("birthdays", "Birthdays", pages, templates=Path(__file__).parent / "templates"))


@pages.get("")
async def birthdays(request: Request) -> Response:
    """What is to come, the soonest first; what is under way; what is over, the newest first."""
    query = Query(request)
    status, user, after = query.choice("status", STATUSES), query.id("user"), query.place()
    if user is not None:
        return RedirectResponse(f"/console/birthdays/{user}", 303, headers={"Cache-Control": "no-store"})
    shown = EventStatus(status or EventStatus.PENDING)
    async with read(request) as look:
        found, following = await _list(look, shown, after)
    return show(
        request, "birthdays_list.html", now=look.now, events=found, chosen=shown.value, statuses=STATUSES,
        after=following, is_first=after is None, is_over=shown in OVER,
    )  # fmt: skip


async def _list(
    look: Look, status: EventStatus, after: tuple[datetime, UUID] | None
) -> tuple[list[BirthdayEvent], str | None]:
    """A page, and where the next one begins."""
    limit = SCAN if status in OVER else PAGE + 1
    looked = await store.list_of_status(
        look.tx, status, after=after or (LAST if status in OVER else FIRST), limit=limit
    )  # fmt: skip
    found = [event for event in looked if event.status is status]
    if len(found) > PAGE:
        last = found[PAGE - 1]
    elif status in OVER and len(looked) == limit:
        last = looked[-1]
    else:
        return found, None
    at = last.processing_at if status is EventStatus.PROCESSING else last.target_utc
    assert at is not None, "what is under way has its time"
    return found[:PAGE], f"{at.isoformat()}_{last.id}"


@pages.get("/{id}")
async def user(request: Request, id: UUID) -> Response:
    """One user's messages, by year: when, in whose zone, and what became of them."""
    async with read(request) as look:
        person = await store.find_person(look.tx, id)
        events = await store.list_events(look.tx, id, before=LAST_YEAR, limit=PAGE)
        if person is None and not events:
            raise NotFound("there is no such user")
        jobs = [job for event in events[:3] for job in await list_jobs(look.tx, entity_id=str(event.id), limit=5)]
    return show(
        request, "birthdays_one.html", now=look.now, id=id, zone=person.timezone if person else None, events=events,
        jobs=jobs,
    )  # fmt: skip
