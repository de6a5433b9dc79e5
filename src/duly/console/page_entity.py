"""One entity's timeline, and the search that leads there."""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING

from fastapi import Request
from fastapi.responses import RedirectResponse, Response

from duly.console import sql
from duly.console.routes import Pages, Query, read, read_number, show, signed_in
from duly.console.timeline import read_timeline
from duly.errors import NotFound
from duly.ids import parse_uuid
from duly.operate import sql_why
from duly.operate.dead_letters import find_dead_letter
from duly.operate.jobs import find_job, list_executions
from duly.operate.why import around
from duly.operate.why_look import start
from duly.schedules.edit import get_schedule
from duly.webhooks import sql_operate as webhook_sql
from duly.webhooks.look import find_any

if TYPE_CHECKING:
    from duly.console.app import Look


SIMILAR = 20
KINDS = ("job", "event", "schedule", "webhook_subscription", "webhook_delivery")


def register(pages: Pages) -> None:
    """Add these routes."""
    pages.get("/entity")(entity)
    pages.get("/search")(search)


async def entity(request: Request) -> Response:
    """Everything about ``order:123``, from the request to what became of it."""
    id = Query(request).text("id")
    async with read(request) as look:
        moments = await read_timeline(look.tx, id, signed_in(request).roles) if id else []
    return show(request, "entity.html", status=404 if id and not moments else 200, now=look.now, id=id, moments=moments)


async def search(request: Request) -> Response:
    """A job's number, the id of an event, run or webhook, a schedule, a job name, an entity: the page it is about."""
    asked = Query(request).text("q")
    if asked is None:
        return show(request, "search.html", asked=None, similar=[])
    async with read(request) as look:
        found = await _find(look, asked, signed_in(request).roles)
        similar = [name for name in await look.names() if asked.lower() in name.lower()] if found is None else []
    if found is None:
        return show(request, "search.html", status=404, asked=asked, similar=similar[:SIMILAR])
    return RedirectResponse(found, status_code=303, headers={"Cache-Control": "no-store"})


async def _find(look: Look, asked: str, roles: Set[str]) -> str | None:
    """With its kind before it, as ``duly why`` takes it, or without."""
    kind, _, rest = asked.partition(":")
    if kind in KINDS and rest and (found := await _find_one(look, rest, roles)):
        return found
    return await _find_one(look, asked, roles)


async def _find_one(look: Look, asked: str, roles: Set[str]) -> str | None:
    from duly.console.app import link

    if id := read_number(asked):
        if await find_job(look.tx, id) or await find_dead_letter(look.tx, id):
            return link(f"/jobs/{id}")
        if await list_executions(look.tx, job_id=id, limit=1):
            return link(f"/jobs/{id}")
    if (uuid := parse_uuid(asked)) is not None:
        if await look.rows(sql.FIND_EVENT, id=uuid) or await look.rows(sql.FIND_RECEIVED, id=uuid):
            return link(f"/events/{uuid}")
        if await look.rows(webhook_sql.FIND_DELIVERY, id=uuid):
            return link(f"/webhooks/deliveries/{uuid}")
        if await find_any(look.tx, uuid) is not None:
            return link(f"/webhooks/{uuid}")
        since, until = around(await start(look.tx), uuid) if uuid.version == 7 else (look.now, look.now)
        if rows := await look.rows(sql_why.FIND_EXECUTION, execution_id=uuid, since=since, until=until):
            return link(f"/jobs/{rows[0][0]}/runs/{uuid}")
    return await _find_name(look, asked, roles)


async def _find_name(look: Look, asked: str, roles: Set[str]) -> str | None:
    from duly.console.app import link

    try:
        return link(f"/schedules/{(await get_schedule(look.tx, asked)).name}")
    except NotFound:
        pass
    queued, dead = (await look.rows(sql_why.COUNT_JOBS_OF_NAME, name=asked, cap=1))[0]
    if queued:
        return link("/jobs", name=asked)
    if dead:
        return link("/dead-letters", name=asked)
    if await list_executions(look.tx, name=asked, limit=1):
        return link("/history", name=asked)
    return link("/entity", id=asked) if await read_timeline(look.tx, asked, roles) else None
